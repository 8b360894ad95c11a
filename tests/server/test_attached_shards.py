"""The registrar's record of the shards that run as separate processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from atoll_server.access.refusals import Refused, Status
from atoll_server.data.merged_units import MergedUnits
from atoll_server.learners.learner_registry import LearnerRegistry
from atoll_server.run import attached_shards
from atoll_server.run.attached_shards import QUIET_S, AttachedShard, AttachedShards, LeaseFacts
from atoll_server.run.outbox import Outbox
from atoll_server.shard_context.run_view import RunView
from atoll_wire import shards_pb2 as sh
from atoll_wire.contract import PROTOCOL
from atoll_wire.layout.layout import MergeKind, TensorSpec, plan

from tests.clocks import SetClock

LAYOUT = plan([TensorSpec(f"t{n}", (64, 64), "float32", MergeKind.AVERAGE) for n in range(4)], 4)
STAGE = sh.Stage(sha256=b"winner")


def hello(shard: int = 1, **changed: Any) -> sh.Hello:
    of = {"protocol": PROTOCOL, "shard": shard, "shards": 3, "address": f"s{shard}:1", "directory": b"d%d" % shard}
    return sh.Hello(**of | changed)


def attach(attached: AttachedShards, of: sh.Hello, *, begun: bool = False) -> tuple[AttachedShard, Outbox]:
    shard = attached.admit(of, "r", 2, epoch=5, begun=begun)
    return shard, attached.welcome(shard, sh.Welcome(run="r"), [], RunView(1, 1))


def sent(box: Outbox) -> list[sh.FromRegistrar]:
    """Removes and returns the waiting messages."""
    found = []
    while box._waiting:
        found.append(asyncio.run(box.next()))
    return found


def view(**of: Any) -> sh.FromRegistrar:
    return sh.FromRegistrar(view=sh.View(**of))


def test_messages_are_sent_in_order_and_newer_ones_replace_older_ones():
    box = Outbox()
    for about, tokens in (("view", 1), ("a", 2), ("view", 3), ("b", 4)):
        box.put(about, view(run_tokens=tokens))
    found = sent(box)
    assert [each.view.run_tokens for each in found] == [3, 2, 4]
    assert [each.sequence for each in found] == [1, 2, 3]
    box.put("view", view(run_tokens=5))
    assert [each.sequence for each in sent(box)] == [4], "a sent message must not be replaced"
    box.put("view", view())
    box.end()
    assert asyncio.run(box.next()) is None


def test_no_shard_confirms_a_change_that_waits_behind_a_newer_message():
    """A newer view replaces a pause's view. A message between the two does not confirm the pause."""
    box = Outbox()
    box.put("view", view(paused="by alice"))
    wanted = box.newest
    box.put("member", sh.FromRegistrar())
    box.put("view", view(paused="by alice", run_tokens=7))
    for message in sent(box):
        if message.sequence >= wanted:
            assert message.view.paused, "this message or a later one must contain the pause"
            break


REFUSED = [
    (hello(protocol=PROTOCOL + 1), "use the same version"),
    (hello(shards=4), "the run has 3"),
    (hello(shard=3), "shard 3 of 3 cannot be attached here"),
    (hello(shard=0), "shard 0 of 3 cannot be attached here"),
    (hello(run="other"), "is run r: correct --registrar or --dir"),
    (hello(run="r", generation=3), "restore a newer backup of the registrar"),
    (hello(run="r", generation=2, epoch=6), "generation 2 and epoch 6, ahead of this registrar"),
]


@pytest.mark.parametrize(("of", "text"), REFUSED)
def test_a_shard_process_that_does_not_match_the_run_is_refused(of, text):
    attached = AttachedShards(0, 3, SetClock())
    with pytest.raises(Refused, match=text) as refused:
        attached.admit(of, "r", 2, epoch=5, begun=False)
    assert refused.value.status is Status.FAILED_PRECONDITION
    attached.admit(hello(run="r", generation=2, epoch=5), "r", 2, epoch=5, begun=True)
    attached.admit(hello(run="r", generation=1, epoch=9), "r", 2, epoch=1, begun=True)  # the shard will roll back


@pytest.mark.parametrize("shards", [0, 1025])
def test_the_number_of_shards_is_limited_before_the_registrar_knows_it(shards):
    with pytest.raises(Refused, match="correct its --shard"):
        AttachedShards(None, 0, SetClock()).admit(hello(shard=0, shards=shards), "r", 2, epoch=5, begun=False)


def test_a_wrong_number_of_shards_is_forgotten_before_the_run_begins():
    attached = AttachedShards(None, 0, SetClock())
    shard, box = attach(attached, hello(shard=4, shards=5))
    with pytest.raises(Refused, match="as one of 4, but the run has 5"):
        attached.admit(hello(shard=0, shards=4), "r", 2, epoch=5, begun=False)
    attached.detach(shard, box)
    attach(attached, hello(shard=0, shards=4))
    assert attached.count == 4


def test_a_core_without_other_shards_attaches_none():
    with pytest.raises(Refused, match="shard 0 of 1 cannot be attached here"):
        AttachedShards(0, 1, SetClock()).admit(hello(shard=0, shards=1), "r", 2, epoch=5, begun=True)


def test_another_directory_never_takes_a_shards_place_in_a_run_that_has_begun():
    attached = AttachedShards(0, 3, SetClock())
    attach(attached, hello(staged=b"winner"))
    for state in ({"staged": b"winner"}, {}):
        with pytest.raises(Refused, match="a different directory holds shard 1") as refused:
            attached.admit(hello(directory=b"other", **state), "r", 2, epoch=5, begun=True)
        assert refused.value.status is Status.ALREADY_EXISTS
    with pytest.raises(Refused, match="shard 1 is empty, but the run has parameters"):
        attached.admit(hello(), "r", 2, epoch=5, begun=True)
    again = AttachedShards(0, 3, SetClock())
    again.restore(attached.as_data())
    with pytest.raises(Refused, match="a different directory"):
        again.admit(hello(directory=b"other", staged=b"winner"), "r", 2, epoch=5, begun=True)


def test_before_the_run_begins_a_silent_shard_may_be_replaced():
    clock = SetClock()
    attached = AttachedShards(0, 3, clock)
    _, box = attach(attached, hello())
    with pytest.raises(Refused, match="a different directory"):
        attached.admit(hello(directory=b"other"), "r", 2, epoch=5, begun=False)
    clock.steady += QUIET_S
    shard, newer = attach(attached, hello(directory=b"other"))
    assert asyncio.run(box.next()) is None, "the older call must end"
    assert (shard.directory, shard.outbox) == (b"other", newer)
    late = sh.FromShard(staged=sh.Staged(sha256=b"of the older directory"))
    attached.heard(shard, box, late, LearnerRegistry(1))
    assert shard.staged == b"", "messages of the older call must not count"
    attached.detach(shard, box)
    assert attached.missing() == [2], "the older call's end must change nothing"
    attached.detach(shard, newer)
    assert attached.missing() == [1, 2]


def test_a_shard_first_receives_a_welcome_and_then_the_whole_state():
    attached = AttachedShards(0, 3, SetClock())
    registry = LearnerRegistry(8)
    entry = registry.join("a", "eu", 1, 0, 0.5, b"", b"proof", 0.0, 0.0)
    shard = attached.admit(hello(), "r", 2, epoch=5, begun=False)
    attached.tell(RunView(1, 1))
    attached.member(entry)
    attached.runs(LAYOUT)
    attached.begin(sh.Begun(stage=STAGE))
    box = attached.welcome(shard, sh.Welcome(run="r"), registry.entries.values(), RunView(1, 2, paused="by alice"))
    found = sent(box)
    assert [each.WhichOneof("what") for each in found] == ["welcome", "member", "view", "begun"]
    assert found[2].view.paused == "by alice", "the registrar must send the pause before any report"
    assert list(found[3].begun.stage.owned) == list(attached.fragments(LAYOUT, 1))


# ------------------------------------------------------------------------------------------------- confirmations


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(attached_shards, "CONFIRM_S", 0.05)


def confirmation(sequence: int) -> sh.FromShard:
    return sh.FromShard(confirmed=sh.Confirmed(sequence=sequence))


def test_an_answer_names_the_shards_that_have_not_confirmed(quick):
    async def late() -> list[int]:
        attached, registry = AttachedShards(0, 3, SetClock()), LearnerRegistry(1)
        shards = [attach(attached, hello(number)) for number in (1, 2)]
        for (shard, box), missing in zip(shards, (0, 1), strict=True):
            attached.heard(shard, box, confirmation(box.newest - missing), registry)
        return await attached.confirmed()

    assert asyncio.run(late()) == [2]


def test_an_answer_waits_for_a_confirmation_and_names_a_shard_that_is_away(quick):
    async def late() -> list[int]:
        attached, registry = AttachedShards(0, 3, SetClock()), LearnerRegistry(1)
        shard, box = attach(attached, hello(1))
        waiting = asyncio.create_task(attached.confirmed())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        attached.heard(shard, box, confirmation(box.newest), registry)
        return await waiting

    assert asyncio.run(late()) == [2]


def test_a_shard_that_attaches_again_confirms_the_messages_of_its_new_call(quick):
    """Numbers begin again with each call, so an earlier call's confirmations prove nothing."""

    async def late() -> list[int]:
        attached, registry = AttachedShards(0, 2, SetClock()), LearnerRegistry(1)
        of = hello(1, shards=2)
        shard, old = attach(attached, of)
        waiting = asyncio.create_task(attached.confirmed())
        await asyncio.sleep(0)
        newer = attached.admit(of, "r", 2, epoch=5, begun=False)
        attached.heard(shard, old, confirmation(100), registry)  # the confirmation was in flight when the call was cut
        await asyncio.sleep(0)
        box = attached.welcome(newer, sh.Welcome(), [], RunView(1, 1))
        attached.heard(shard, old, confirmation(100), registry)
        attached.heard(shard, box, confirmation(box.newest - 1), registry)
        return await waiting

    assert asyncio.run(late()) == [1]


# ------------------------------------------------------------------------------------------------- first parameters


def test_a_run_begins_when_all_shards_have_staged_the_same_parameters():
    async def begins() -> None:
        attached, registry = AttachedShards(0, 3, SetClock()), LearnerRegistry(1)
        one, first = attach(attached, hello(1, staged=b"loser"))
        staging = asyncio.create_task(attached.stage(STAGE, LAYOUT))
        await asyncio.sleep(0)
        (stage,) = [each.stage for each in sent_now(first) if each.HasField("stage")]
        assert list(stage.owned) == list(attached.fragments(LAYOUT, 1))
        attached.heard(one, first, sh.FromShard(staged=sh.Staged(sha256=b"winner")), registry)
        two, second = attach(attached, hello(2))
        attached.heard(two, second, sh.FromShard(staged=sh.Staged(sha256=b"loser")), registry)
        await asyncio.sleep(0.01)
        assert not staging.done()
        assert attached.offered() == b"winner"
        attached.heard(two, second, sh.FromShard(staged=sh.Staged(sha256=b"winner")), registry)
        await asyncio.wait_for(staging, 1.0)

    asyncio.run(begins())


def test_the_lease_holder_hears_which_shard_is_missing(monkeypatch):
    monkeypatch.setattr(attached_shards, "AWAY_S", 0.05)

    async def begins() -> None:
        attached = AttachedShards(0, 3, SetClock())
        attach(attached, hello(1, staged=b"winner"))
        staging = asyncio.create_task(attached.stage(STAGE, LAYOUT))
        with pytest.raises(Refused, match="cannot begin without shard 2 of 3: start every"):
            await asyncio.wait_for(staging, 5.0)

    asyncio.run(begins())


def sent_now(box: Outbox) -> list[sh.FromRegistrar]:
    return list(box._waiting.values())


def test_a_learners_sums_come_from_the_shard_that_counts_them():
    attached, registry = AttachedShards(0, 3, SetClock()), LearnerRegistry(8)
    entry = registry.join("a", "eu", 1, 0, 0.5, b"", b"proof", 0.0, 0.0)
    shard, box = attach(attached, hello(2))
    sums = sh.LearnerSums(learner="a", merged_token_parameters=str(10**30), bytes_up=5, pending=3, missed=2)
    strange = [sh.LearnerSums(learner="unknown"), sh.LearnerSums(learner="a", merged_token_parameters="-1")]
    attached.heard(shard, box, sh.FromShard(summary=sh.Summary(troubles=["full"], learners=[sums, *strange])), registry)
    assert entry.account.merged_token_parameters == 10**30
    assert (entry.account.bytes_up, shard.pending, shard.missed) == (5, {"a": 3}, {"a": 2})
    assert (shard.summary.troubles, len(shard.summary.learners)) == (["full"], 0)


def test_the_division_is_restored_from_the_ledger():
    attached = AttachedShards(None, 0, SetClock())
    attach(attached, hello(0, shards=2))
    again = AttachedShards(None, 0, SetClock())
    again.restore(attached.as_data())
    again.runs(LAYOUT)
    assert (again.count, again.own, list(again.remote)) == (2, 2, [0, 1])
    assert again.shards[0].address == "s0:1"
    assert again.missing() == [0, 1]
    assert sorted(again.shards[0].fragments + again.shards[1].fragments) == [0, 1, 2, 3]


def test_the_sums_of_a_lease_count_when_every_shard_has_sent_them():
    attached, registry = AttachedShards(0, 3, SetClock()), LearnerRegistry(4)
    attached.await_lease(7, "a", 1)
    shards = [attach(attached, hello(number)) for number in (1, 2)]
    for number, (shard, box) in enumerate(shards, 1):
        assert [each.lease.lease for each in sent(box) if each.HasField("lease")] == [7]
        assert attached.facts(7) is None, "a restarted registrar must wait for the other shards' sums"
        units = sh.FragmentUnits(fragment=number, through=3, firsts=[1], lasts=[2])
        sums = sh.LeaseSums(lease=7, settled=number == 1, fragments=[units])
        attached.heard(shard, box, sh.FromShard(summary=sh.Summary(leases=[sums])), registry)
    merged = MergedUnits(3, ((1, 2),))
    assert attached.facts(7) == [LeaseFacts({1: merged}, True), LeaseFacts({2: merged}, False)]
    attached.lease_over(7)
    assert [each.lease.over for each in sent(shards[0][1])] == [True]
    assert attached.facts(7) is None
