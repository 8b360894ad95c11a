"""Tokens prove sessions to the process that issued them, and to any other process with the run's key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.learner_registry import RegistryEntry
from atoll_server.learners.session_tokens import SessionKey
from atoll_server.run.registrar import Registrar
from atoll_server.run.run_clock import RunClock
from atoll_server.settings import Limits, RunSettings
from atoll_server.telemetry.journal import Journal
from atoll_wire import outer_pb2 as pb

from tests.clocks import SetClock

KEY = SessionKey(bytes(32), b"this start", "run", 1)
META = {
    "run": "r", "generation": 1, "epoch": 7, "session_key": bytes(32).hex(), "settings": RunSettings().model_dump(),
}  # fmt: skip
NEVER: Any = None  # in place of a ledger


def test_a_token_is_verified_without_the_process_that_issued_it():
    token = KEY.token("a", 3, 5)
    assert replace(KEY).number("a", 3, token) == 5


@pytest.mark.parametrize(
    "other", [
        replace(KEY, secret=b"another"), replace(KEY, start=b"another"), replace(KEY, run="another"),
        replace(KEY, generation=2),
    ],
)  # fmt: skip
def test_a_token_of_another_key_start_run_or_generation_proves_nothing(other):
    assert other.number("a", 3, KEY.token("a", 3, 5)) == 0


def test_a_token_that_was_changed_or_is_shown_for_another_session_proves_nothing():
    token = KEY.token("a", 3, 5)
    assert KEY.number("b", 3, token) == KEY.number("a", 4, token) == 0
    for wrong in (b"", bytes(40), token[:-1], token + b"x", token[:8], (6).to_bytes(8, "big") + token[8:]):
        assert KEY.number("a", 3, wrong) == 0
    for place in range(len(token)):
        assert KEY.number("a", 3, token[:place] + bytes([token[place] ^ 1]) + token[place + 1 :]) == 0
    assert KEY.number('a", 3, 5', 3, token) == 0


def test_a_key_is_not_shown():
    assert "000" not in repr(replace(KEY, secret=b"000", start=b"000"))


# ------------------------------------------------------------------------------------------------- a registrar's
# sessions


def started(**meta: Any) -> Registrar:
    """Returns a registrar as a core starts it with the data in its directory."""
    run = Registrar(Limits(), RunClock(SetClock()), Journal())
    run.restore(META | meta, [], NEVER)
    return run


def joins(run: Registrar, nonce: int = 1) -> RegistryEntry:
    entry = run.registry.join("a", "eu", nonce, 0, 0.5, b"", b"proof", run.clock.wall(), 0.0)
    return (
        entry
        if entry.nonce == nonce
        else run.registry.join("a", "eu", nonce, 0, 0.5, b"proof", b"", run.clock.wall(), 0.0)
    )


def session(run: Registrar, entry: RegistryEntry) -> pb.Session:
    """Returns the session in a Join's reply."""
    return pb.Session(run="r", learner="a", incarnation=entry.incarnation, generation=1, token=run.token(entry))


def refusal(run: Registrar, of: pb.Session) -> tuple[Status, str]:
    with pytest.raises(Refused) as refused:
        run.session(of)
    return refused.value.status, refused.value.detail


def test_a_session_from_before_a_rejoin_takeover_or_eviction_stays_refused():
    run = started()
    first = session(run, joins(run))
    assert run.session(first).entry.name == "a"
    second = session(run, joins(run))  # the same process, whose incarnation stays
    assert refusal(run, first)[0] is Status.UNAUTHENTICATED
    assert run.session(second).incarnation == 1
    third = session(run, joins(run, nonce=2))
    assert refusal(run, second) == (
        Status.FAILED_PRECONDITION,
        'learner "a" was started again elsewhere, so this older process is fenced off: stop it',
    )
    second.incarnation = 2
    assert refusal(run, second)[0] is Status.UNAUTHENTICATED
    entry = run.session(third).entry
    run.registry.evict(entry, "it lies", 1.0)
    assert "was evicted (it lies)" in refusal(run, third)[1]
    run.registry.evict(entry, "", 2.0)
    assert refusal(run, third) == (Status.UNAUTHENTICATED, 'learner "a" has not joined this core: join first')
    fourth = session(run, joins(run, nonce=2))
    assert (run.session(fourth).incarnation, refusal(run, third)[0]) == (2, Status.UNAUTHENTICATED)


def test_a_session_from_before_a_leave_stays_refused():
    run = started()
    entry = joins(run)
    first = session(run, entry)
    entry.start_session(0, Refused(Status.UNAUTHENTICATED, "it has left"))
    assert refusal(run, first) == (Status.UNAUTHENTICATED, 'learner "a" has not joined this core: join first')
    nothing = session(run, entry)  # a token without a session, which is never issued
    assert refusal(run, nothing)[0] is Status.UNAUTHENTICATED
    joins(run)
    for old in (first, nothing):
        assert refusal(run, old)[0] is Status.UNAUTHENTICATED


def test_sessions_of_an_earlier_start_or_a_copied_directory_are_refused_in_any_epoch():
    """Two cores that start from one backup have the same epoch and names, and issue the same session numbers."""
    run, copy = started(), started()
    mine = session(run, joins(run))
    joins(copy)
    assert run.session(mine).incarnation == 1
    assert refusal(copy, mine) == (
        Status.UNAUTHENTICATED,
        'the session of learner "a" is unknown to this core: join again',
    )
