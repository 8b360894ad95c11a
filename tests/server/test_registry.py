"""Names and the processes that speak for them."""

from __future__ import annotations

import pytest
from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.registry import CALLS_COME_S, Roster


def join(
    roster: Roster, name: str = "a", nonce: int = 1, incarnation: int = 0, wall: float = 0.0,
    region: str = "eu", now: float = 0.0,
):  # fmt: skip
    entry = roster.join(name, region, nonce, incarnation, 0.5, b"", b"proof", wall, now)
    if entry.nonce != nonce:
        entry = roster.join(name, region, nonce, incarnation, 0.5, b"proof", b"", wall, now)
    return entry


def test_a_retry_keeps_the_incarnation_and_a_restart_gets_the_next():
    roster = Roster(10)
    assert join(roster).incarnation == 1
    assert join(roster).incarnation == 1
    assert join(roster, nonce=2).incarnation == 2


def test_a_connected_name_is_not_given_away():
    roster = Roster(10)
    with join(roster).stream(print), pytest.raises(Refused, match="connected now") as refused:
        join(roster, nonce=2)
    assert refused.value.status is Status.ALREADY_EXISTS
    assert roster.entries["a"].incarnation == 1


def test_calls_of_a_session_end_when_it_does():
    roster, ended = Roster(10), list[tuple[str, str]]()
    entry = join(roster)

    def ends(name):
        return lambda why: ended.append((name, why.status.name))

    with entry.stream(ends("first")), entry.stream(ends("its other")):
        join(roster)
        assert ended == [("first", "UNAUTHENTICATED"), ("its other", "UNAUTHENTICATED")]
        assert entry.connected, "it is coming back: nobody else gets its name"
        with entry.stream(ends("second")):
            roster.evict(entry, "a test", 1.0)
    assert ended[2:] == [("second", "FAILED_PRECONDITION")]
    assert not entry.connected


def test_a_late_join_of_a_process_that_died_keeps_its_name_from_others_for_seconds_only():
    roster = Roster(10)
    with join(roster).stream(print):
        join(roster, now=10.0)  # its calls seem open still, and will never come again
    with pytest.raises(Refused, match="connected now"):
        join(roster, nonce=2, now=10.0 + CALLS_COME_S)
    assert join(roster, nonce=2, now=10.1 + CALLS_COME_S).incarnation == 2


def test_an_older_process_is_fenced_whatever_it_says():
    roster = Roster(10)
    old = join(roster).session
    new = join(roster, nonce=2).session
    with pytest.raises(Refused, match="fenced off"):
        join(roster, nonce=1, incarnation=1)
    with pytest.raises(Refused, match="fenced off"):
        roster.check("a", 1, old)
    assert roster.check("a", 2, new).nonce == 2


def test_a_late_first_join_of_a_dead_process_cannot_fence_the_living_one():
    roster = Roster(10)
    join(roster, nonce=1)
    join(roster, nonce=2)
    again = Roster(10)
    entry = roster.entries["a"]
    again.restore("a", "eu", entry.incarnation, entry.nonces, entry.account.as_data(), "")
    for one in (roster, again):
        with pytest.raises(Refused, match="fenced off"):
            join(one, nonce=1, incarnation=0)
        assert (one.entries["a"].incarnation, one.entries["a"].nonce) == (2, 2)


def test_a_name_is_taken_over_only_by_a_process_that_answers():
    roster = Roster(10)
    first = join(roster, nonce=1).session
    late = roster.join("a", "eu", 2, 0, 0.5, b"", b"challenge", 0.0, 0.0)
    assert (late.incarnation, late.nonce, late.session) == (1, 1, first)
    for proof in (b"", b"guessed"):
        assert roster.join("a", "eu", 2, 0, 0.5, proof, b"another", 0.0, 0.0).incarnation == 1
    assert roster.join("a", "eu", 3, 0, 0.5, b"another", b"third", 0.0, 0.0).incarnation == 1, "another's proof"
    assert roster.join("a", "eu", 3, 0, 0.5, b"third", b"fourth", 0.0, 0.0).incarnation == 2


def test_an_older_process_takes_a_name_over_only_from_one_that_does_not_come_back():
    roster = Roster(10)
    roster.join("a", "eu", 1, 0, 5.0, b"", b"t", 100.0, 0.0)  # started at 95
    roster.since = 120.0  # the core was started again: nobody is connected yet
    for wall in (120.5, 179.0):
        with pytest.raises(Refused, match="younger") as refused:
            roster.join("a", "eu", 2, 0, wall - 50.0, b"", b"t", wall, 0.0)
        assert refused.value.status is Status.UNAVAILABLE, "a late Join may make a dead process seem younger: it waits"
    assert roster.join("a", "eu", 3, 0, 10.0, b"", b"proof", 121.0, 0.0).challenge == (3, b"proof"), "a younger one may"
    assert roster.join("a", "eu", 2, 0, 131.0, b"", b"proof", 181.0, 0.0).challenge == (2, b"proof")
    roster.join("a", "eu", 1, 1, 85.0, b"", b"t", 182.0, 0.0)
    roster.entries["a"].account.left_at = 183.0
    assert roster.join("a", "eu", 2, 0, 134.0, b"", b"other", 184.0, 0.0).challenge == (2, b"other"), "it has left"


def test_regions_are_bounded():
    roster = Roster(1000)
    for number in range(256):
        roster.join(f"l{number}", f"r{number}", 1, 0, 0.5, b"", b"t", 0.0, 0.0)
    with pytest.raises(Refused, match="256 regions"):
        roster.join("one-more", "elsewhere", 1, 0, 0.5, b"", b"t", 0.0, 0.0)
    assert roster.join("one-more", "r7", 1, 0, 0.5, b"", b"t", 0.0, 0.0).region == "r7"
    with pytest.raises(Refused, match="256 regions"):
        join(roster, "one-more", nonce=2, region="elsewhere")
    roster.evict(roster.entries["l3"], "it lies", 1.0)  # and what only it had is free again
    assert join(roster, "one-more", nonce=2, region="elsewhere").region == "elsewhere"
    roster.entries["l4"].account.left_at = 1.0
    assert join(roster, "another", region="elsewhere too").region == "elsewhere too"
    with pytest.raises(Refused, match="256 regions"):
        join(roster, "l4", region="r4")  # comes back to a place that is taken


def test_a_name_has_one_region_at_a_time():
    roster = Roster(10)
    for number in range(1, 1000):
        assert join(roster, nonce=number, region=f"r{number}").region == f"r{number}"
    with pytest.raises(Refused, match="does not move"):
        join(roster, nonce=999, region="elsewhere")
    assert join(roster, "b", region="another").region == "another"


def test_a_name_is_not_taken_over_by_what_a_message_says_when_it_says_nothing():
    roster = Roster(10)
    join(roster)
    with pytest.raises(Refused, match="nonce 0") as refused:
        roster.join("a", "eu", 0, 0, 0.5, b"", b"t", 0.0, 0.0)
    assert refused.value.status is Status.INVALID_ARGUMENT
    assert roster.entries["a"].incarnation == 1
    with pytest.raises(Refused, match="nonce 0"):
        join(roster, "new", nonce=0)
    again = Roster(10)
    again.restore("a", "eu", 1, [0], roster.entries["a"].account.as_data(), "")  # of a process that said it before
    assert again.join("a", "eu", 2, 0, 0.5, b"", b"proof", 0.0, 0.0).incarnation == 1


def test_remembered_processes_are_bounded():
    roster = Roster(10)
    for nonce in range(1, 500):
        join(roster, nonce=nonce)
    assert roster.entries["a"].incarnation == 499
    assert len(roster.entries["a"].nonces) == 64


def test_a_wrong_token_or_an_unknown_name_has_to_join():
    roster = Roster(10)
    session = join(roster).session
    for name, incarnation, number in (("a", 1, 0), ("a", 1, session + 1), ("a", 9, session), ("b", 1, session)):
        with pytest.raises(Refused) as refused:
            roster.check(name, incarnation, number)
        assert refused.value.status is Status.UNAUTHENTICATED


def test_a_name_taken_up_from_the_ledger_has_to_join_again():
    roster = Roster(10)
    account = join(roster).account.as_data()
    again = Roster(10)
    again.restore("a", "eu", 1, [1], account, "")
    with pytest.raises(Refused, match="has not joined"):
        again.check("a", 1, 0)
    assert join(again).incarnation == 1


def test_the_number_of_names_is_bounded():
    roster = Roster(2)
    join(roster, "a")
    join(roster, "b")
    with pytest.raises(Refused, match="its limit") as refused:
        join(roster, "c")
    assert refused.value.status is Status.RESOURCE_EXHAUSTED
    assert join(roster, "a").incarnation == 1


def test_a_name_that_differs_in_case_only_is_refused():
    roster = Roster(10)
    join(roster, "EU-west")
    again = Roster(10)
    again.restore("EU-west", "eu", 1, [1], roster.entries["EU-west"].account.as_data(), "")
    for one in (roster, again):
        with pytest.raises(Refused, match='"EU-west" in case only') as refused:
            join(one, "eu-West")
        assert refused.value.status is Status.INVALID_ARGUMENT
        assert list(one.entries) == ["EU-west"]
        assert join(one, "EU-west").incarnation == 1


@pytest.mark.parametrize("name", ["", "-a", "a b", "x" * 65, "../up", "a/b", "é"])
def test_a_name_that_could_not_be_a_file_name_is_refused(name):
    with pytest.raises(Refused, match="is not allowed"):
        join(Roster(2), name)


def test_a_connected_process_that_fell_silent_does_not_hold_its_name():
    roster = Roster(10)
    entry = join(roster, nonce=1)
    entry.streams = {print: None}  # of a host that vanished: nothing ends it
    for second in range(20):
        entry.reports.saw(float(second))
    with pytest.raises(Refused, match="is connected now"):
        roster.join("a", "eu", 2, 0, 0.5, b"", b"t", 22.0, 22.0)
    roster.join("a", "eu", 2, 0, 0.5, b"", b"proof", 30.0, 30.0)
    assert roster.join("a", "eu", 2, 0, 0.5, b"proof", b"t", 30.0, 30.0).incarnation == 2
