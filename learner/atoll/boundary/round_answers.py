"""Answers rounds at a step boundary: takes and submits a pseudo-gradient, or declines with a reason."""

from __future__ import annotations

from collections.abc import Callable

from atoll_wire import outer_pb2 as pb

from atoll.boundary.local_parameters import LocalParameters
from atoll.data.unit_log import UnitLog
from atoll.fragments.exchange import DueRound, Submission, ThreadExchange
from atoll.stats import Counters


class RoundAnswers:
    """Answers rounds on one rank. submit: passes a pseudo-gradient to this rank's agent; idempotent.

    log: of the data units that this process trains.

    A signal handler may raise at any line. The next boundary calls `hand_over`, which completes interrupted work.
    """

    def __init__(
        self,
        local: LocalParameters,
        exchange: ThreadExchange,
        counters: Counters,
        submit: Callable[[Submission], None],
        log: UnitLog,
    ) -> None:
        self._local = local
        self._exchange = exchange
        self._counters = counters
        self._submit = submit
        self._log = log
        self._taking: int | None = None  # the fragment whose pseudo-gradient is being taken or submitted
        self._taken: Submission | None = None

    def answer(self) -> None:
        """Answers all due rounds in order."""
        due = self._exchange.todo.due
        while due:
            track = self._local.tracks[due[0].fragment]
            if track.flying is not None:
                self.decline(due[0], "the learner's earlier contribution is in flight")
            elif track.steps_from == self._counters.steps or track.tokens_from == self._counters.tokens:
                self.decline(due[0], "no outstanding work for this fragment")
            else:
                self.take(due[0])
            due.popleft()

    def decline(self, due: DueRound, reason: str) -> None:
        """Records why this learner sends no contribution to a round. The agent tells the core the reason."""
        self._exchange.declined.append(pb.Declined(fragment=due.fragment, cycle=due.cycle, reason=reason))

    def take(self, due: DueRound) -> None:
        """Takes a pseudo-gradient and submits it."""
        self._taking = due.fragment
        self._log.forget(min(track.steps_from for track in self._local.tracks))
        units = self._log.ranges(self._local.tracks[due.fragment].steps_from, self._counters.steps)
        outstanding = self._local.take(due.fragment, self._counters.tokens, self._counters.steps)
        self._taken = Submission(due.fragment, due.cycle, outstanding, units)
        self.hand_over()

    def hand_over(self) -> None:
        """Submits the taken pseudo-gradient, even if an exception interrupted an earlier attempt."""
        if self._taken is not None:
            self._submit(self._taken)
        elif self._taking is not None:
            self._local.tracks[self._taking].refused()  # `take` was interrupted
        self._taking = self._taken = None
