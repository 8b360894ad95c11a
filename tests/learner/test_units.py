"""Datasets of leased units give every sample in order, report only trained units, and refuse clearly."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import structlog
from atoll.data import Rows, Units
from atoll.data.leased_units import LeasedUnits
from atoll.data.unit_log import UnitLog
from atoll.data.units import check_single, declaration
from atoll.errors import LearnerError
from atoll_wire import outer_pb2 as pb
from torch.utils.data import DataLoader

REPLY = pb.LeaseUnitsReply
ROWS, UNIT = 20, 2


class Registrar:
    """Answers requests immediately. others: number of further requests without units, which other learners hold.

    returned: units that the other learners then lose.
    """

    def __init__(self, units: list[int], others: int = 0, most: int = 3, returned: tuple[int, ...] = ()) -> None:
        self.left, self.others, self.most, self.returned = units, others, most, list(returned)
        self.run, self.lease, self.handed = ("run", 1), 5, 0
        self.requests: list[pb.LeaseUnitsRequest] = []
        self.failure: LearnerError | None = None

    def lease_units(self, request: Callable[[], pb.LeaseUnitsRequest], after_s: float) -> Future[Any]:
        asked, reply = request(), REPLY(lease=self.lease, retry_s=1.0)
        self.requests.append(asked)
        count = min(asked.wanted, self.most)
        given, self.left = self.left[:count], self.left[count:]
        reply.units.extend(given)
        reply.epochs.extend([0] * len(given))
        self.handed += len(given)
        self.others -= not given
        if not given and self.others == 0:
            self.left, self.returned = self.returned, []
        done = asked.finished == self.handed and self.others < 0
        reply.state = REPLY.STATE_LEASED if given else REPLY.STATE_FINISHED if done else REPLY.STATE_WAIT
        if reply.state == REPLY.STATE_WAIT:
            reply.held_by.append(f"other-{self.others}")
        future: Future[Any] = Future()
        if self.failure is None:
            future.set_result((reply, self.run[1]))
        return future


class Loop:
    """A training loop. trained: the samples of each step."""

    def __init__(self, registrar: Registrar, lag: int = 0) -> None:
        self.log, self.steps, self.trained = UnitLog(), 0, list[list[int]]()
        source = Rows(list(range(ROWS)), UNIT)
        declared = declaration(source, "rows", 0, 1)
        self.registrar = registrar
        self.pauses = list[str]()
        leased = LeasedUnits(declared, registrar, self.log, lag, lambda: registrar.failure, self.pause)
        self.units = Units(source, leased, declared)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.pauses.append("began")
        yield
        self.pauses.append("ended")

    def step(self, batch: Any) -> None:
        self.trained.append(batch.tolist())
        self.steps += 1
        self.log.stepped(self.steps)

    def samples(self) -> list[int]:
        return [sample for batch in self.trained for sample in batch]


def rows_of(units: list[int]) -> list[int]:
    return [row for unit in units for row in (UNIT * unit, UNIT * unit + 1)]


def batches(loop: Loop, kind: str, batch_size: int) -> Iterator[Any]:
    return iter(
        DataLoader(loop.units, batch_size=batch_size)
        if kind == "plain"
        else loop.units.loader(batch_size, num_workers={"loader": 0, "workers": 2}[kind])
    )


@pytest.mark.parametrize("kind", ["plain", "loader", "workers"])
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_every_sample_of_every_unit_is_trained_in_order_and_reported(kind, batch_size):
    order = [3, 0, 7, 1, 2, 9, 4]
    loop = Loop(Registrar(list(order)))
    while loop.units.more():
        for batch in batches(loop, kind, batch_size):
            loop.step(batch)
    assert loop.samples() == rows_of(order)
    assert loop.log.ranges(0, loop.steps) == ((5, 0, len(order)),)
    for ordinal in range(1, len(order) + 1):  # the step of each unit is that of its last sample
        last = UNIT * ordinal - 1
        step = next(n for n in range(1, loop.steps + 1) if sum(map(len, loop.trained[:n])) > last)
        assert loop.log.ranges(step - 1, step)[0][1] < ordinal <= loop.log.ranges(step - 1, step)[0][2]


@pytest.mark.parametrize("kind", ["plain", "loader", "workers"])
def test_a_unit_counts_as_trained_only_after_the_step(kind):
    loop = Loop(Registrar([0, 1, 2, 3]))
    for batch in batches(loop, kind, 2):
        assert loop.log.ranges(0, loop.steps)[0][2] == loop.steps
        loop.step(batch)


@pytest.mark.parametrize("kind", ["plain", "loader", "workers"])
def test_an_interrupted_loop_continues_with_the_next_sample(kind):
    loop = Loop(Registrar([0, 1, 2, 3, 4, 5]))
    while loop.units.more():
        for batch in batches(loop, kind, 3):
            loop.step(batch)
            if loop.steps % 2:
                break
    assert loop.samples() == rows_of([0, 1, 2, 3, 4, 5])
    assert loop.log.ranges(0, loop.steps) == ((5, 0, 6),)


@pytest.mark.parametrize("kind", ["plain", "loader", "workers"])
def test_an_incomplete_batch_is_trained_before_waiting_for_other_learners(kind):
    """Otherwise two learners could wait for the units in each other's incomplete batch."""
    registrar = Registrar([0, 1, 2], others=3, returned=(9, 8))
    loop = Loop(registrar)
    rounds = 0
    while loop.units.more():
        rounds += 1
        for batch in batches(loop, kind, 4):
            loop.step(batch)
    assert [len(batch) for batch in loop.trained] == [4, 2, 4]
    assert loop.samples() == rows_of([0, 1, 2, 9, 8])
    assert rounds == 2
    assert registrar.requests[-1].finished == 5


def test_units_of_an_ended_lease_are_dropped_unless_begun():
    registrar = Registrar([0, 1, 2, 3], most=2)
    loop = Loop(registrar)
    samples = iter(loop.units)
    assert [next(samples), next(samples)] == [0, 1]
    registrar.run = ("run", 2)  # as after a restore to a checkpoint
    registrar.lease, registrar.handed, registrar.left = 6, 0, [8, 9]
    assert [next(samples) for _ in range(4)] == rows_of([8, 9])
    loop.log.stepped(1)
    assert loop.log.ranges(0, 1) == ((5, 0, 1), (6, 0, 2))


def test_a_lease_that_ends_during_a_request_is_replaced_by_a_new_one():
    """The reply has a new lease without units, so it empties the queue just when a unit is needed."""
    registrar = Registrar(list(range(10)), most=2)
    loop = Loop(registrar)
    answer = registrar.lease_units

    def ends_once(request: Callable[[], pb.LeaseUnitsRequest], after_s: float) -> Future[Any]:
        if len(registrar.requests) == 1:
            registrar.requests.append(request())
            registrar.lease, registrar.handed = 6, 0
            future: Future[Any] = Future()
            future.set_result((REPLY(lease=6, state=REPLY.STATE_WAIT, retry_s=1.0), 1))
            return future
        return answer(request, after_s)

    registrar.lease_units = ends_once  # type: ignore[method-assign]
    while loop.units.more():
        for batch in batches(loop, "plain", 1):
            loop.step(batch)
    assert loop.samples() == rows_of([0, *range(2, 10)]), "unit 1 was not begun, so other learners get it"


def test_a_learner_that_waits_for_other_learners_pauses_and_names_them():
    loop = Loop(Registrar([0], others=4, returned=(1,)))
    with structlog.testing.capture_logs() as logs:
        while loop.units.more():
            assert loop.pauses in ([], ["began", "ended"])
            for batch in batches(loop, "plain", 1):
                loop.step(batch)
    assert loop.samples() == rows_of([0, 1])
    assert loop.pauses == ["began", "ended"]
    assert [each["held_by"] for each in logs] == [["other-1"], ["other-0"]]
    assert "atoll evict NAME --gone" in logs[0]["event"]


def test_a_learner_that_fails_stops_waiting():
    registrar = Registrar([0])
    registrar.failure = LearnerError("evicted")
    loop = Loop(registrar)
    with pytest.raises(LearnerError, match="evicted"):
        next(iter(loop.units))


def test_units_in_worker_processes_are_refused():
    loop = Loop(Registrar([0, 1]))
    with pytest.raises(LearnerError, match=r"num_workers=0, or `units\.loader"):
        next(iter(DataLoader(loop.units, batch_size=1, num_workers=1)))
    with pytest.raises(LearnerError, match="worker processes"):
        pickle.dumps(loop.units)


def test_several_ranks_are_refused():
    check_single(1)
    with pytest.raises(LearnerError, match="2 ranks"):
        check_single(2)


def test_a_saved_state_of_the_same_dataset_is_accepted_and_changes_nothing():
    loop, other = Loop(Registrar([0, 1])), Loop(Registrar([0, 1]))
    next(iter(loop.units))
    other.units.load_state_dict(loop.units.state_dict())
    assert list(other.units)[:2] == [0, 1]
    with pytest.raises(LearnerError, match="saved state is of dataset"):
        other.units.load_state_dict(loop.units.state_dict() | {"seed": 9})
