"""The units of one dataset that a learner has leased but not begun, and the requests for more units.

The agent sends the requests while the model trains. The training thread waits only if no unit is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import structlog
from atoll_wire import outer_pb2 as pb

from atoll.data.unit_log import LeaseLog, UnitLog
from atoll.errors import NONSENSE, LearnerError

log = structlog.get_logger()

FIRST_UNITS, MOST_UNITS = 4, 512  # units in the first request; limit on units in one request
PIECE_S = 0.5  # seconds of one wait; see atoll.fragments.exchange
LONGEST_RETRY_S = 10.0
WAITS = (
    "other learners hold all remaining data units: waiting until these are finished or return (if a learner is gone, "
    "`atoll evict NAME --gone` returns its units)"
)


@dataclass(frozen=True, slots=True)
class LeasedUnit:
    """A leased unit. ordinal: number in the lease, from 1. log: the lease's log."""

    unit: int
    epoch: int
    ordinal: int
    log: LeaseLog


class Leasing(Protocol):
    """The part of the agent that this module uses."""

    @property
    def run(self) -> tuple[str, int]:
        """The run's id and generation."""

    def lease_units(
        self, request: Callable[[], pb.LeaseUnitsRequest], after_s: float
    ) -> Future[tuple[pb.LeaseUnitsReply, int]]:
        """Asks for units. Returns a future of the reply and the run's generation when the request was sent.

        request: called for each attempt; returns the request. after_s: the seconds to wait first.
        """


class LeasedUnits:
    """A queue of leased units. Only the training thread uses it.

    failure: a function that returns the learner's error, or None. pause: a context manager for the time in which other
    learners hold all units. finished: whether every unit of all epochs is finished.
    """

    def __init__(
        self,
        dataset: pb.DatasetDeclaration,
        agent: Leasing,
        log: UnitLog,
        lag: int,
        failure: Callable[[], LearnerError | None],
        pause: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._dataset = dataset
        self._agent = agent
        self._log = log
        self._lag = lag
        self._failure = failure
        self._pause = pause
        self._queue: deque[LeasedUnit] = deque()
        self._lease = 0
        self._mine = LeaseLog(lag)  # the log of the current lease
        self._generation = 0
        self._received = 0
        self._wanted = FIRST_UNITS
        self._asked: Future[tuple[pb.LeaseUnitsReply, int]] | None = None
        self._retry_s = 0.0  # seconds before the next request; above 0 if other learners hold all units
        self._held_by: list[str] = []  # some of these learners
        self.finished = False

    def next(self) -> LeasedUnit | None:
        """Returns the next unit, or None if none can be leased now. Waits for the core's answer.

        Raises LearnerError if the learner cannot continue.
        """
        if self._asked is not None and self._asked.done():
            self._receive()  # before the queue is used, since a reply with a new lease empties it
        while not self._valid():
            self._get()
            if self._valid():  # training had to wait, so the next request asks for more
                self._wanted = min(2 * self._wanted, MOST_UNITS)
            elif self.finished or self._retry_s:
                return None
        unit = self._queue.popleft()
        if self._asked is None and len(self._queue) < self._wanted // 2:
            self._ask()
        return unit

    def wait(self) -> bool:
        """Waits until a unit can be leased. Returns False if every unit of all epochs is finished.

        The loop must have trained on all handed-out samples. Raises the same errors as `next`.
        """
        self._log.settle()
        self.finished = False
        if not self._valid():
            self._get()
        if not (self._valid() or self.finished):
            with self._pause():
                self._wait_for_others()
        return not self.finished

    def _wait_for_others(self) -> None:
        """Waits until a unit can be leased or all are finished. Logs which learners hold units."""
        said: list[str] = []
        while not (self._valid() or self.finished):
            if self._held_by not in ([], said):
                log.info(WAITS, dataset=self._dataset.name, held_by=self._held_by)
                said = self._held_by
            self._get()

    def _valid(self) -> bool:
        """Returns whether the queue has valid units. A restore of the run to a checkpoint ends all leases."""
        if self._queue and self._agent.run[1] != self._generation:
            self._queue.clear()
        return bool(self._queue)

    def _get(self) -> None:
        """Waits for the reply to one request, and sends it unless it was sent earlier."""
        if self._asked is None:
            self._ask()
        self._receive()

    def _ask(self) -> None:
        wanted = self._wanted

        def request() -> pb.LeaseUnitsRequest:
            return pb.LeaseUnitsRequest(
                dataset=self._dataset,
                lease=self._lease,
                received=self._received,
                finished=self._mine.finished,
                wanted=wanted,
            )

        self._asked = self._agent.lease_units(request, self._retry_s)

    def _receive(self) -> None:
        """Waits for the reply to the request and adds its units to the queue."""
        assert self._asked is not None, "it was asked"
        while not self._asked.done():
            if (failure := self._failure()) is not None:
                raise failure
            _wait(self._asked)
        asked, self._asked = self._asked, None
        try:
            reply, generation = asked.result()
        except CancelledError as error:
            raise self._failure() or LearnerError(
                "the learner has left the run: lease units before close() or the end of the block"
            ) from error
        if len(reply.units) != len(reply.epochs) or (reply.units and max(reply.units) >= self._dataset.units):
            raise LearnerError(f"the core sent an invalid list of units: {NONSENSE}")
        if reply.lease != self._lease:
            self._begin(reply.lease)
        self._generation = generation
        for unit, epoch in zip(reply.units, reply.epochs, strict=True):
            self._received += 1
            self._queue.append(LeasedUnit(unit, epoch, self._received, self._mine))
        self.finished = reply.state == pb.LeaseUnitsReply.STATE_FINISHED
        waits = reply.state == pb.LeaseUnitsReply.STATE_WAIT
        self._retry_s = min(max(0.0, reply.retry_s), LONGEST_RETRY_S) if waits else 0.0
        self._held_by = list(reply.held_by)

    def _begin(self, lease: int) -> None:
        """Begins a lease. Units of the previous lease that were not begun now belong to other learners."""
        self._queue.clear()
        if self._lease:
            self._log.close(self._lease)
        self._lease, self._received = lease, 0
        self._mine = self._log.open(lease, self._lag)


def _wait(asked: Future[tuple[pb.LeaseUnitsReply, int]]) -> None:
    try:
        asked.exception(PIECE_S)
    except (TimeoutError, CancelledError):
        return
