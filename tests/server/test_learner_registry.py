"""Names of learners, and the processes that may use them."""

from __future__ import annotations

import pytest
from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.learner_registry import CALLS_COME_S, LearnerRegistry


def join(
    registry: LearnerRegistry, name: str = "a", nonce: int = 1, incarnation: int = 0, wall: float = 0.0,
    region: str = "eu", now: float = 0.0,
):  # fmt: skip
    entry = registry.join(name, region, nonce, incarnation, 0.5, b"", b"proof", wall, now)
    if entry.nonce != nonce:
        entry = registry.join(name, region, nonce, incarnation, 0.5, b"proof", b"", wall, now)
    return entry


def test_a_retry_keeps_the_incarnation_and_a_restart_gets_the_next():
    registry = LearnerRegistry(10)
    assert join(registry).incarnation == 1
    assert join(registry).incarnation == 1
    assert join(registry, nonce=2).incarnation == 2


def test_a_connected_name_is_not_taken_over():
    registry = LearnerRegistry(10)
    with join(registry).stream(print), pytest.raises(Refused, match="already connected") as refused:
        join(registry, nonce=2)
    assert refused.value.status is Status.ALREADY_EXISTS
    assert registry.entries["a"].incarnation == 1


def test_calls_end_with_their_session():
    registry, ended = LearnerRegistry(10), list[tuple[str, str]]()
    entry = join(registry)

    def ends(name):
        return lambda why: ended.append((name, why.status.name))

    with entry.stream(ends("first")), entry.stream(ends("its other")):
        join(registry)
        assert ended == [("first", "UNAUTHENTICATED"), ("its other", "UNAUTHENTICATED")]
        assert entry.connected, "a returning process must keep its name"
        with entry.stream(ends("second")):
            registry.evict(entry, "a test", 1.0)
    assert ended[2:] == [("second", "FAILED_PRECONDITION")]
    assert not entry.connected


def test_a_late_join_of_a_process_that_died_keeps_its_name_from_others_for_seconds_only():
    registry = LearnerRegistry(10)
    with join(registry).stream(print):
        join(registry, now=10.0)  # the process is dead, but its calls seem to be open
    with pytest.raises(Refused, match="already connected"):
        join(registry, nonce=2, now=10.0 + CALLS_COME_S)
    assert join(registry, nonce=2, now=10.1 + CALLS_COME_S).incarnation == 2


def test_an_older_process_is_fenced_for_every_message():
    registry = LearnerRegistry(10)
    old = join(registry).session
    new = join(registry, nonce=2).session
    with pytest.raises(Refused, match="fenced off"):
        join(registry, nonce=1, incarnation=1)
    with pytest.raises(Refused, match="fenced off"):
        registry.check("a", 1, old)
    assert registry.check("a", 2, new).nonce == 2


def test_a_late_first_join_of_a_dead_process_cannot_fence_the_living_one():
    registry = LearnerRegistry(10)
    join(registry, nonce=1)
    join(registry, nonce=2)
    again = LearnerRegistry(10)
    entry = registry.entries["a"]
    again.restore("a", "eu", entry.incarnation, entry.nonces, entry.account.as_data(), "")
    for one in (registry, again):
        with pytest.raises(Refused, match="fenced off"):
            join(one, nonce=1, incarnation=0)
        assert (one.entries["a"].incarnation, one.entries["a"].nonce) == (2, 2)


def test_a_name_is_taken_over_only_by_a_process_that_answers():
    registry = LearnerRegistry(10)
    first = join(registry, nonce=1).session
    late = registry.join("a", "eu", 2, 0, 0.5, b"", b"challenge", 0.0, 0.0)
    assert (late.incarnation, late.nonce, late.session) == (1, 1, first)
    for proof in (b"", b"guessed"):
        assert registry.join("a", "eu", 2, 0, 0.5, proof, b"another", 0.0, 0.0).incarnation == 1
    assert registry.join("a", "eu", 3, 0, 0.5, b"another", b"third", 0.0, 0.0).incarnation == 1, "a wrong proof"
    assert registry.join("a", "eu", 3, 0, 0.5, b"third", b"fourth", 0.0, 0.0).incarnation == 2


def test_an_older_process_takes_a_name_over_only_from_one_that_does_not_come_back():
    registry = LearnerRegistry(10)
    registry.join("a", "eu", 1, 0, 5.0, b"", b"t", 100.0, 0.0)  # started at 95
    registry.since = 120.0  # the core restarted, and no learner is connected yet
    for wall in (120.5, 179.0):
        with pytest.raises(Refused, match="newer process") as refused:
            registry.join("a", "eu", 2, 0, wall - 50.0, b"", b"t", wall, 0.0)
        assert refused.value.status is Status.UNAVAILABLE, "a process that may be dead and seem newer must wait"
    assert registry.join("a", "eu", 3, 0, 10.0, b"", b"proof", 121.0, 0.0).challenge == (3, b"proof"), (
        "a newer process may take the name"
    )
    assert registry.join("a", "eu", 2, 0, 131.0, b"", b"proof", 181.0, 0.0).challenge == (2, b"proof")
    registry.join("a", "eu", 1, 1, 85.0, b"", b"t", 182.0, 0.0)
    registry.entries["a"].account.left_at = 183.0
    assert registry.join("a", "eu", 2, 0, 134.0, b"", b"other", 184.0, 0.0).challenge == (2, b"other"), "it has left"


def test_the_number_of_regions_is_limited():
    registry = LearnerRegistry(1000)
    for number in range(256):
        registry.join(f"l{number}", f"r{number}", 1, 0, 0.5, b"", b"t", 0.0, 0.0)
    with pytest.raises(Refused, match="256 regions"):
        registry.join("one-more", "elsewhere", 1, 0, 0.5, b"", b"t", 0.0, 0.0)
    assert registry.join("one-more", "r7", 1, 0, 0.5, b"", b"t", 0.0, 0.0).region == "r7"
    with pytest.raises(Refused, match="256 regions"):
        join(registry, "one-more", nonce=2, region="elsewhere")
    registry.evict(registry.entries["l3"], "it lies", 1.0)  # the region is free again
    assert join(registry, "one-more", nonce=2, region="elsewhere").region == "elsewhere"
    registry.entries["l4"].account.left_at = 1.0
    assert join(registry, "another", region="elsewhere too").region == "elsewhere too"
    with pytest.raises(Refused, match="256 regions"):
        join(registry, "l4", region="r4")  # the learner returns, but its region's place is taken


def test_a_name_has_one_region_at_a_time():
    registry = LearnerRegistry(10)
    for number in range(1, 1000):
        assert join(registry, nonce=number, region=f"r{number}").region == f"r{number}"
    with pytest.raises(Refused, match="which its process cannot change"):
        join(registry, nonce=999, region="elsewhere")
    assert join(registry, "b", region="another").region == "another"


def test_nonce_0_takes_over_no_name():
    registry = LearnerRegistry(10)
    join(registry)
    with pytest.raises(Refused, match="nonce 0") as refused:
        registry.join("a", "eu", 0, 0, 0.5, b"", b"t", 0.0, 0.0)
    assert refused.value.status is Status.INVALID_ARGUMENT
    assert registry.entries["a"].incarnation == 1
    with pytest.raises(Refused, match="nonce 0"):
        join(registry, "new", nonce=0)
    again = LearnerRegistry(10)
    again.restore("a", "eu", 1, [0], registry.entries["a"].account.as_data(), "")  # an earlier process of the name
    assert again.join("a", "eu", 2, 0, 0.5, b"", b"proof", 0.0, 0.0).incarnation == 1


def test_the_number_of_remembered_processes_is_limited():
    registry = LearnerRegistry(10)
    for nonce in range(1, 500):
        join(registry, nonce=nonce)
    assert registry.entries["a"].incarnation == 499
    assert len(registry.entries["a"].nonces) == 64


def test_a_wrong_token_or_an_unknown_name_must_join():
    registry = LearnerRegistry(10)
    session = join(registry).session
    for name, incarnation, number in (("a", 1, 0), ("a", 1, session + 1), ("a", 9, session), ("b", 1, session)):
        with pytest.raises(Refused) as refused:
            registry.check(name, incarnation, number)
        assert refused.value.status is Status.UNAUTHENTICATED


def test_a_name_restored_from_the_ledger_must_join_again():
    registry = LearnerRegistry(10)
    account = join(registry).account.as_data()
    again = LearnerRegistry(10)
    again.restore("a", "eu", 1, [1], account, "")
    with pytest.raises(Refused, match="has not joined"):
        again.check("a", 1, 0)
    assert join(again).incarnation == 1


def test_the_number_of_names_is_limited():
    registry = LearnerRegistry(2)
    join(registry, "a")
    join(registry, "b")
    with pytest.raises(Refused, match="the limit") as refused:
        join(registry, "c")
    assert refused.value.status is Status.RESOURCE_EXHAUSTED
    assert join(registry, "a").incarnation == 1


def test_a_name_that_differs_only_in_case_is_refused():
    registry = LearnerRegistry(10)
    join(registry, "EU-west")
    again = LearnerRegistry(10)
    again.restore("EU-west", "eu", 1, [1], registry.entries["EU-west"].account.as_data(), "")
    for one in (registry, again):
        with pytest.raises(Refused, match='"EU-west" only in case') as refused:
            join(one, "eu-West")
        assert refused.value.status is Status.INVALID_ARGUMENT
        assert list(one.entries) == ["EU-west"]
        assert join(one, "EU-west").incarnation == 1


@pytest.mark.parametrize("name", ["", "-a", "a b", "x" * 65, "../up", "a/b", "é"])
def test_a_name_that_cannot_be_a_file_name_is_refused(name):
    with pytest.raises(Refused, match="is not allowed"):
        join(LearnerRegistry(2), name)


def test_a_silent_connected_process_does_not_keep_its_name():
    registry = LearnerRegistry(10)
    entry = join(registry, nonce=1)
    entry.streams = {print: None}  # a stream of a vanished host, which nothing ends
    for second in range(20):
        entry.reports.saw(float(second))
    with pytest.raises(Refused, match="is already connected"):
        registry.join("a", "eu", 2, 0, 0.5, b"", b"t", 22.0, 22.0)
    registry.join("a", "eu", 2, 0, 0.5, b"", b"proof", 30.0, 30.0)
    assert registry.join("a", "eu", 2, 0, 0.5, b"proof", b"t", 30.0, 30.0).incarnation == 2
