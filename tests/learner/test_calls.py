"""What a refusal means to a learner, how long it waits, and how the two threads meet."""

from __future__ import annotations

import random

import grpc
import numpy as np
import pytest
from atoll.agent.calls import CURES, LONGEST_BACKOFF_S, Cure, backoff_s, cure
from atoll.fragments.adoption import Fate
from atoll.fragments.exchange import AT_ONCE, Handover, Prepared, Taken
from atoll_wire.clock import SYSTEM
from atoll_wire.links import SAID

from tests.clocks import SetClock

ONE = np.ones(1, np.float32)


def test_every_status_of_the_contract_has_its_cure():
    assert CURES[grpc.StatusCode.UNAUTHENTICATED] is Cure.JOIN_AGAIN
    assert CURES[grpc.StatusCode.FAILED_PRECONDITION] is Cure.STOP
    assert CURES[grpc.StatusCode.OUT_OF_RANGE] is Cure.DROP_WORK
    for passing in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DATA_LOSS):
        assert passing not in CURES


def drained(handover: Handover) -> tuple[list, list, list]:
    """What there is to do at a boundary, done."""
    todo = handover.next()
    done = list(todo.released), list(todo.prepared), list(todo.due)
    for each in (todo.released, todo.prepared, todo.due):
        each.clear()
    return done


def refusal(code: grpc.StatusCode, *trailing: tuple[str, str]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), "no")


@pytest.mark.parametrize("code", grpc.StatusCode)
def test_only_what_a_core_or_a_front_said_is_acted_upon(code):
    assert cure(refusal(code)) is Cure.TRY_AGAIN
    assert cure(refusal(code, *SAID)) is CURES.get(code, Cure.TRY_AGAIN)


@pytest.mark.parametrize("attempt", range(40))
def test_back_off_grows_to_a_limit_and_is_never_the_same_for_all(attempt):
    waits = {backoff_s(attempt, random.Random(seed)) for seed in range(20)}
    assert len(waits) > 15
    assert 0 < max(waits) <= LONGEST_BACKOFF_S
    assert max(waits) <= 2 * min(waits)


def test_a_newer_anchor_replaces_a_waiting_one_and_keeps_its_fate():
    handover = Handover(SYSTEM)
    handover.offer(Prepared(0, 5, ONE, Fate(q=ONE)))
    handover.offer(Prepared(0, 6, 2 * ONE, Fate()))
    _, (prepared,), _ = drained(handover)
    assert (prepared.version, prepared.anchor[0]) == (6, 2.0)
    assert prepared.fate.q is ONE
    assert not handover.something


def test_a_fragment_is_adopted_before_it_is_taken():
    handover = Handover(SYSTEM)
    for fragment in range(AT_ONCE + 1):
        handover.ask(fragment, 1)
        handover.offer(Prepared(fragment, 5, ONE, Fate()))
    _, prepared, due = drained(handover)
    assert [each.fragment for each in prepared] == [each.fragment for each in due] == list(range(AT_ONCE))
    assert handover.something
    _, prepared, due = drained(handover)
    assert [each.fragment for each in prepared] == [each.fragment for each in due] == [AT_ONCE]


def test_all_rounds_that_are_due_are_answered_at_a_boundary_but_never_too_many():
    handover = Handover(SYSTEM)
    for fragment in range(2 * AT_ONCE + 1):
        handover.ask(fragment, 1)
    assert [len(drained(handover)[2]) for _ in range(4)] == [AT_ONCE, AT_ONCE, 1, 0]
    assert drained(handover) == ([], [], [])


def test_rounds_that_found_no_step_boundary_are_taken_back():
    handover = Handover(SYSTEM)
    handover.ask(0, 4)
    assert handover.withdraw(60.0) == []
    (late,) = handover.withdraw(-1.0)
    assert late.cycle == 4
    assert drained(handover)[2] == []


def test_rounds_that_wait_for_their_turn_at_step_boundaries_are_not_taken_back():
    clock = SetClock(steady=100.0)
    handover = Handover(clock)
    for fragment in range(3 * AT_ONCE + 1):
        handover.ask(fragment, 1)
    for _ in range(3):  # each takes long, and some of the rounds
        clock.steady += 0.8
        drained(handover)
        assert handover.withdraw(1.0) == []
    clock.steady += 1.1
    (late,) = handover.withdraw(1.0)
    assert late.fragment == 3 * AT_ONCE


def test_waiting_for_acknowledgements_ends_with_the_last_one():
    handover = Handover(SYSTEM)
    assert handover.wait_settled(0.0)
    handover.submitted(taken := Taken(0, 1, None))
    handover.submitted(taken)
    assert not handover.wait_settled(0.0)
    handover.settle(taken)
    handover.submitted(taken)  # after an interruption that nobody noticed
    assert handover.wait_settled(0.0)
