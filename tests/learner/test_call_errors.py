"""The remedy for each refusal, the length of back-off, and the exchange between the two threads."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from typing import Any

import grpc
import numpy as np
import pytest
from atoll.fragments.adoption import Adopting, Change, Fate, PreparedAnchor
from atoll.fragments.exchange import PER_BOUNDARY, Submission, ThreadExchange
from atoll.transfers.call_errors import CURES, LONGEST_BACKOFF_S, Remedy, backoff_s, remedy
from atoll_wire.connections.link import ATOLL_STATUS
from atoll_wire.process.clock import SYSTEM

from tests.clocks import SetClock

ONE = np.ones(1, np.float32)


def test_every_status_of_the_protocol_has_its_remedy():
    assert CURES[grpc.StatusCode.UNAUTHENTICATED] is Remedy.JOIN_AGAIN
    assert CURES[grpc.StatusCode.FAILED_PRECONDITION] is Remedy.STOP
    assert CURES[grpc.StatusCode.OUT_OF_RANGE] is Remedy.DROP_WORK
    for passing in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DATA_LOSS):
        assert passing not in CURES


def drained(exchange: ThreadExchange) -> tuple[list, list, list]:
    """Removes and returns the work of a boundary."""
    todo = exchange.next()
    done = list(todo.released), list(todo.prepared), list(todo.due)
    for each in (todo.released, todo.prepared, todo.due):
        each.clear()
    return done


def refusal(code: grpc.StatusCode, *trailing: tuple[str, str]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), "no")


@pytest.mark.parametrize("code", grpc.StatusCode)
def test_only_what_a_core_or_a_front_said_is_acted_upon(code):
    assert remedy(refusal(code)) is Remedy.TRY_AGAIN
    assert remedy(refusal(code, *ATOLL_STATUS)) is CURES.get(code, Remedy.TRY_AGAIN)


@pytest.mark.parametrize("attempt", range(40))
def test_back_off_grows_to_a_limit_and_is_never_the_same_for_all(attempt):
    waits = {backoff_s(attempt, random.Random(seed)) for seed in range(20)}
    assert len(waits) > 15
    assert 0 < max(waits) <= LONGEST_BACKOFF_S
    assert max(waits) <= 2 * min(waits)


def test_a_newer_anchor_replaces_a_waiting_one_and_keeps_its_fate():
    exchange = ThreadExchange(SYSTEM)
    exchange.offer(PreparedAnchor(0, 5, ONE, Fate(q=ONE)))
    exchange.offer(PreparedAnchor(0, 6, 2 * ONE, Fate()))
    _, (prepared,), _ = drained(exchange)
    assert (prepared.version, prepared.anchor[0]) == (6, 2.0)
    assert prepared.fate.q is ONE
    assert not exchange.something


def test_a_long_time_without_a_boundary_keeps_one_anchor_of_each_fragment():
    """During a long evaluation, the run may publish many versions, each as large as the model."""
    exchange, anchors = ThreadExchange(SYSTEM), list[weakref.ref[Any]]()
    for version in range(5, 20):
        anchor = np.zeros(8, np.float32)
        anchors.append(weakref.ref(anchor))
        change = Change(anchor, None, None)
        exchange.offer(PreparedAnchor(0, version, anchor, Fate(q=ONE if version == 6 else None), change))
    del anchor, change
    assert [reference() is not None for reference in anchors] == [False] * 14 + [True]
    _, (prepared,), _ = drained(exchange)
    assert (prepared.version, prepared.fate.q is ONE, prepared.change) == (19, True, None)


def test_a_rank_keeps_the_anchors_that_rank_0_may_choose():
    """Rank 0's last choice may still be on its way. A newer anchor may not be confirmed yet."""
    exchange = ThreadExchange(SYSTEM)
    for version in range(1, 8):
        exchange.offer(PreparedAnchor(0, version, ONE, Fate(q=ONE if version == 4 else None)), confirmed=False)
    exchange.supersede(0, (6, 0), chosen=(3, 0))
    assert [each.version for each in exchange._prepared[0]] == [1, 2, 3, 6, 7]
    exchange.follow([], [Adopting(0, 3, 0)], [])
    assert [each.version for each in exchange.todo.prepared] == [3]
    exchange.supersede(0, (7, 0), chosen=(3, 0))
    exchange.follow([], [Adopting(0, 7, 0, merged=True)], [])
    assert [(each.version, each.fate.q is ONE) for each in exchange.todo.prepared] == [(7, True)]


def test_a_rank_that_lags_by_two_boundaries_keeps_both_choices():
    """Rank 0 ends a boundary as soon as all ranks have begun it, so it may choose again before the others follow."""
    exchange = ThreadExchange(SYSTEM)
    for version, chosen in ((1, None), (2, (1, 0)), (3, (2, 0))):
        exchange.offer(PreparedAnchor(0, version, version * ONE, Fate()), confirmed=False)
        exchange.supersede(0, (version, 0), chosen)
    for version in (1, 2, 3):
        exchange.follow([], [Adopting(0, version, 0)], [])
        (prepared,) = exchange.todo.prepared
        assert prepared.anchor[0] == version


def test_versions_that_other_ranks_lack_are_counted():
    exchange = ThreadExchange(SYSTEM)
    for version in (1, 2, 3):
        exchange.offer(PreparedAnchor(0, version, ONE, Fate()), confirmed=False)
        assert exchange.unconfirmed(0) == version
    exchange.supersede(0, (2, 0), None)
    assert (exchange.unconfirmed(0), exchange.waiting, exchange.waits(0), exchange.waits(1)) == (1, 2, True, False)
    exchange.follow([], [Adopting(0, 2, 0)], [])
    assert exchange.unconfirmed(0) == 1


@pytest.mark.parametrize("calls", range(1, 30))
def test_a_signal_handler_that_raises_while_a_boundary_begins_repeats_and_loses_nothing(calls):
    """Python runs signal handlers when a function is called."""
    exchange, left = ThreadExchange(SYSTEM), [calls]
    exchange.ask(1, 7)
    exchange.offer(PreparedAnchor(0, 5, ONE, Fate()))

    def interrupt(_, event: str, __) -> None:
        left[0] -= event == "call"
        if not left[0]:
            raise KeyboardInterrupt

    gc.disable()  # Python ignores what callbacks of the garbage collector raise
    sys.settrace(interrupt)
    try:
        exchange.next()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
        gc.enable()
    work = [drained(exchange) for _ in range(2)]
    assert [each.version for _, prepared, _ in work for each in prepared] == [5]
    assert [each.cycle for _, _, due in work for each in due] == [7]


def test_rank_0_keeps_the_anchor_that_it_has_chosen():
    exchange = ThreadExchange(SYSTEM)
    for version in (1, 2):
        exchange.offer(PreparedAnchor(0, version, ONE, Fate()))
    (chosen,) = exchange.choose_first()
    exchange.offer(PreparedAnchor(0, 3, ONE, Fate()), confirmed=False)
    assert exchange.confirm(0, 3, 0) == (2, 0)
    assert [each.version for each in exchange.take_first([chosen])] == [2]
    assert [each.version for each in exchange.choose_first()] == [3]


def test_a_fragment_is_adopted_before_it_is_taken():
    exchange = ThreadExchange(SYSTEM)
    for fragment in range(PER_BOUNDARY + 1):
        exchange.ask(fragment, 1)
        exchange.offer(PreparedAnchor(fragment, 5, ONE, Fate()))
    _, prepared, due = drained(exchange)
    assert [each.fragment for each in prepared] == [each.fragment for each in due] == list(range(PER_BOUNDARY))
    assert exchange.something
    _, prepared, due = drained(exchange)
    assert [each.fragment for each in prepared] == [each.fragment for each in due] == [PER_BOUNDARY]


def test_all_rounds_that_are_due_are_answered_at_a_boundary_but_never_too_many():
    exchange = ThreadExchange(SYSTEM)
    for fragment in range(2 * PER_BOUNDARY + 1):
        exchange.ask(fragment, 1)
    assert [len(drained(exchange)[2]) for _ in range(4)] == [PER_BOUNDARY, PER_BOUNDARY, 1, 0]
    assert drained(exchange) == ([], [], [])


def test_rounds_that_found_no_step_boundary_are_taken_back():
    exchange = ThreadExchange(SYSTEM)
    exchange.ask(0, 4)
    assert exchange.withdraw(60.0) == []
    (late,) = exchange.withdraw(-1.0)
    assert late.cycle == 4
    assert drained(exchange)[2] == []


def test_rounds_that_wait_for_their_turn_at_step_boundaries_are_not_taken_back():
    clock = SetClock(steady=100.0)
    exchange = ThreadExchange(clock)
    for fragment in range(3 * PER_BOUNDARY + 1):
        exchange.ask(fragment, 1)
    for _ in range(3):  # each call handles a limited number of rounds
        clock.steady += 0.8
        drained(exchange)
        assert exchange.withdraw(1.0) == []
    clock.steady += 1.1
    (late,) = exchange.withdraw(1.0)
    assert late.fragment == 3 * PER_BOUNDARY


def test_waiting_for_acknowledgements_ends_with_the_last_one():
    exchange = ThreadExchange(SYSTEM)
    assert exchange.wait_settled(0.0)
    exchange.submitted(taken := Submission(0, 1, None))
    exchange.submitted(taken)
    assert not exchange.wait_settled(0.0)
    exchange.settle(taken)
    exchange.submitted(taken)  # after an unnoticed interruption
    assert exchange.wait_settled(0.0)
