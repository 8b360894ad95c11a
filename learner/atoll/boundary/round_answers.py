"""Answers rounds at a step boundary: takes and submits a pseudo-gradient, or declines the round with a reason.

A pseudo-gradient is kept back until rank 0's watch has judged the movements in it (see `movement_watch`). All ranks
submit their parts of it at the same boundary, which rank 0 chooses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import structlog
from atoll_wire import outer_pb2 as pb

from atoll.boundary.local_parameters import LocalParameters
from atoll.data.unit_log import UnitLog
from atoll.fragments.exchange import DueRound, Submission, ThreadExchange
from atoll.stats import Counters

log = structlog.get_logger()


class RoundAnswers:
    """Answers rounds on one rank. submit: called to pass a pseudo-gradient to this rank's agent; idempotent.

    log: the log of the data units that this process's steps finished.

    kept_back: submissions that wait for a verdict, each with the number of its boundary, in the order of the
    boundaries.

    A signal handler may raise at any line. The next boundary first calls `hand_over`, which completes interrupted work.
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
        self._told_uncounted = False
        self._taking: int | None = None  # the fragment whose pseudo-gradient is being taken
        self.kept_back = deque[tuple[int, Submission]]()
        self._sent = list[Submission]()  # those whose values may not be encoded yet
        self._judged = 0  # number of the newest boundary whose pseudo-gradients may be submitted

    @property
    def uncoded(self) -> int:
        """The number of pseudo-gradients that hold a copy of their values, because they are not encoded yet."""
        self._forget_coded()
        return len(self.kept_back) + len(self._sent)

    def _forget_coded(self) -> None:
        self._sent = [each for each in self._sent if not (each.settled or each.outstanding.is_coded)]

    def answer(self, boundary: int) -> None:
        """Answers all due rounds in order. boundary: see `take`."""
        due = self._exchange.todo.due
        while due:
            track = self._local.tracks[due[0].fragment]
            if track.flying is not None:
                self.decline(due[0], "the learner's earlier contribution is in flight")
            elif track.steps_from == self._counters.steps:
                self.decline(due[0], "no outstanding work for this fragment")
            elif track.tokens_from == self._counters.tokens:
                self.decline(due[0], "its steps had no tokens")
                self._tell_uncounted()
            else:
                self.take(due[0], boundary)
            due.popleft()

    def _tell_uncounted(self) -> None:
        if not self._told_uncounted and self._counters.tokens == 0:
            self._told_uncounted = True
            text = "no work is sent, since step() was called with tokens=0: pass the tokens of each step"
            log.warning(text, steps=self._counters.steps)

    def decline(self, due: DueRound, reason: str) -> None:
        """Records why this learner sends no contribution to a round. The agent tells the core the reason."""
        self._exchange.declined.append(pb.Declined(fragment=due.fragment, cycle=due.cycle, reason=reason))

    def take(self, due: DueRound, boundary: int = 0) -> None:
        """Takes a pseudo-gradient. boundary: the number of the boundary that must be judged before `hand_over` submits
        the pseudo-gradient, or 0 to submit it immediately.
        """
        self._taking = due.fragment
        self._log.forget(min(track.steps_from for track in self._local.tracks))
        units = self._log.ranges(self._local.tracks[due.fragment].steps_from, self._counters.steps)
        outstanding = self._local.take(due.fragment, self._counters.tokens, self._counters.steps)
        self.kept_back.append((boundary, Submission(due.fragment, due.cycle, outstanding, units)))
        self._taking = None
        if not boundary:
            self.hand_over()

    def hand_over(self, judged: int = 0) -> None:
        """Submits the work that was taken at boundaries up to `judged`, even if an earlier attempt was interrupted.

        Without a number, it only completes an earlier attempt, because a later verdict may forbid the rest.
        """
        if self._taking is not None and all(kept.fragment != self._taking for _, kept in self.kept_back):
            self._local.tracks[self._taking].refused()  # `take` was interrupted
        self._taking = None
        self._judged = max(self._judged, judged)
        self._forget_coded()
        while self.kept_back and self.kept_back[0][0] <= self._judged:
            taken = self.kept_back[0][1]
            self._submit(taken)
            self._sent.append(taken)
            self.kept_back.popleft()

    def withdraw(self, fragment: int, reason: str) -> int:
        """Declines the round of a contribution that was kept back, if any, because the contribution's work is dropped.
        Idempotent.

        Returns the number of overwritten tokens, which are lost (see `Track.refused`).
        """
        given_up = 0
        for kept in [each for each in self.kept_back if each[1].fragment == fragment]:
            given_up = self._local.tracks[fragment].refused()
            self.decline(DueRound(fragment, kept[1].cycle, 0.0), reason)
            self.kept_back.remove(kept)
        return given_up
