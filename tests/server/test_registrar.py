"""The registrar's view of the shards and their fragments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from atoll_server.access.refusals import Refused, Status
from atoll_server.rounds.liveness import LiveLearners
from atoll_server.rounds.round_state import RoundState
from atoll_server.run.attached_shards import AttachedShards
from atoll_server.run.registrar import Registrar
from atoll_server.run.run_clock import RunClock
from atoll_server.settings import Limits
from atoll_server.telemetry.journal import Journal
from atoll_wire import outer_pb2 as pb
from atoll_wire.layout.layout import MergeKind, TensorSpec, plan
from atoll_wire.process.clock import SYSTEM


def test_a_caller_of_another_shards_fragment_must_join_again():
    run = Registrar(Limits(), RunClock(SYSTEM), Journal(), AttachedShards(own=0, count=2))
    with pytest.raises(Refused, match="no parameters yet"):
        run.numbered(0)
    tensors = [TensorSpec(f"t{n}", (64, 64), "float32", MergeKind.AVERAGE, ()) for n in range(4)]
    layout = plan(tensors, 4)
    assert len(layout.fragments) == 4
    shard = SimpleNamespace(layout=layout, fragments={0: "zero", 2: "two"})
    run.runs(layout, shard)
    assert run.owner(2) == (shard, "two")
    for fragment, status in ((1, Status.UNAUTHENTICATED), (4, Status.INVALID_ARGUMENT)):
        with pytest.raises(Refused) as refused:
            run.owner(fragment)
        assert refused.value.status is status
    assert run.numbered(0) is shard, "the shard's number must be its place"
    with pytest.raises(Refused, match="serves shard 0, not shard 1: join again") as refused:
        run.numbered(1)
    assert refused.value.status is Status.UNAUTHENTICATED


def test_learners_get_the_places_of_all_shards_after_each_attached():
    run = Registrar(Limits(), RunClock(SYSTEM), Journal(), AttachedShards(own=0, count=2))
    layout = plan([TensorSpec(f"t{n}", (64, 64), "float32", MergeKind.AVERAGE, ()) for n in range(4)], 4)
    run.runs(layout, SimpleNamespace(fragments={0: "zero", 2: "two"}))
    with pytest.raises(Refused, match="shard 1 of the run has not been attached yet") as refused:
        run.places()
    assert refused.value.status is Status.UNAVAILABLE, "the learner must try again"
    run.attached.shards[1].address = "shard-1:7400"
    assert [(each.address, list(each.fragments)) for each in run.places()] == [("", [0, 2]), ("shard-1:7400", [1, 3])]


def test_the_pace_is_that_of_the_fastest_live_learner_and_of_all_fragments():
    run = Registrar(Limits(), RunClock(SYSTEM), Journal(), AttachedShards(own=0, count=2))
    assert run.pace(0.0).outer_step_s is None, "the run has no parameters yet"
    layout = plan([TensorSpec(f"t{n}", (64, 64), "float32", MergeKind.AVERAGE, ()) for n in range(4)], 4)
    live = LiveLearners(0.0, frozenset("ab"), frozenset("ab"), True, 2.0)
    fragments = {number: SimpleNamespace(version=9, rounds=RoundState(9, ages={9: 6.0})) for number in (0, 2)}
    run.runs(layout, SimpleNamespace(fragments=fragments, syncer=SimpleNamespace(present=lambda _: live)))
    other = run.attached.shards[1].summary
    other.fragments.extend(pb.FragmentStatus(fragment=number, version=9, outer_steps=8.0) for number in (1, 3))
    pace = run.pace(0.0)
    assert pace.outer_steps == 7.0
    assert pace.outer_step_s == 2.0 * run.settings.inner_steps
    assert pace.live == frozenset("ab")
    run.paused = "by ann"
    assert run.pace(0.0).outer_step_s is None
