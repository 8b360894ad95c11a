"""PURE: remembers the processes that recently could not join, since nothing else of a run shows them."""

from __future__ import annotations

from collections import OrderedDict

from atoll_server.access.refusals import Refused, Status

RECENT_S = 600.0  # a refused process waits for its restart, and does not ask again
KEPT = 64  # names
LONGEST_NAME = 80
PASSING = {Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED}  # after these, a learner tries again by itself


class RefusedJoins:
    """The newest refusals of Joins, by the name that the process used. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, tuple[float, str]] = OrderedDict()  # oldest first

    def add(self, learner: str, refused: Refused, now: float) -> None:
        """Records a refusal that an operator must resolve. Ignores others."""
        if refused.status in PASSING:
            return
        name = learner[:LONGEST_NAME]
        self._newest[name] = (now, refused.detail)
        self._newest.move_to_end(name)
        if len(self._newest) > KEPT:
            self._newest.popitem(last=False)

    def joined(self, learner: str) -> None:
        """Forgets the refusal of a process that has joined since then."""
        self._newest.pop(learner, None)

    def text(self, now: float) -> str:
        """Returns the newest refusal of the last RECENT_S seconds, and the number of other names; empty if none."""
        recent = [(name, detail) for name, (at, detail) in self._newest.items() if now - at < RECENT_S]
        if not recent:
            return ""
        name, detail = recent[-1]
        more = f" (and {len(recent) - 1} more)" if len(recent) > 1 else ""
        return f'"{name}"{more} cannot join: {detail}'
