"""What a step boundary answers rounds with: pseudo-gradients that are taken and handed over, or why there is none."""

from __future__ import annotations

from collections.abc import Callable

from atoll_wire import outer_pb2 as pb

from atoll.boundary.local_parameters import Local
from atoll.fragments.exchange import Due, Handover, Taken
from atoll.stats import Counters


class Rounds:
    """Of the rank that talks. submit: hands over to the agent; again is as good as once.

    An exception in any line, say of a signal's handler, may be followed by `hand_over` at the next boundary.
    """

    def __init__(self, local: Local, handover: Handover, counters: Counters, submit: Callable[[Taken], None]) -> None:
        self._local = local
        self._handover = handover
        self._counters = counters
        self._submit = submit
        self._taking: int | None = (
            None  # a fragment, from before a pseudo-gradient of it is taken until it is handed over
        )
        self._taken: Taken | None = None

    def answer(self) -> None:
        """Each round that is due, in turn."""
        due = self._handover.todo.due
        while due:
            track = self._local.tracks[due[0].fragment]
            if track.flying is not None:
                self.decline(due[0], "its contribution is in flight")
            elif track.steps_from == self._counters.steps or track.tokens_from == self._counters.tokens:
                self.decline(due[0], "nothing was trained since its anchor")
            else:
                self.take(due[0])
            due.popleft()

    def decline(self, due: Due, reason: str) -> None:
        """Says why there is no contribution."""
        self._handover.declined.append(pb.Declined(fragment=due.fragment, cycle=due.cycle, reason=reason))

    def take(self, due: Due) -> None:
        """Takes a pseudo-gradient and hands it over. Raises LearnerError when it is not finite."""
        self._taking = due.fragment
        outstanding = self._local.take(due.fragment, self._counters.tokens, self._counters.steps)
        self._taken = Taken(due.fragment, due.cycle, outstanding)
        self.hand_over()

    def hand_over(self) -> None:
        """Submits what was taken; also what an exception kept from being submitted."""
        if self._taken is not None:
            self._submit(self._taken)
        elif self._taking is not None:
            self._local.tracks[self._taking].refused()  # the taking itself was interrupted
        self._taking = self._taken = None
