"""PURE: all links of a run. A front announces itself. A learner that does not use a front has its own link.

Times are monotonic seconds on the core's clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import HEARTBEAT_S, REPORT_S, LinkState

from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.learner_registry import LARGEST_REGION
from atoll_server.links.link import Link, MergePace
from atoll_server.telemetry import entries

MAX_FRONTS = 256
NONCES = 16  # number of a front's processes that are remembered; learners behind it may name an older process
FORGET_S = 60.0  # seconds after which a silent front without learners behind it is forgotten
APART_S = 2.0 * HEARTBEAT_S  # a cut link silences a front and the learners behind it within this time
LATE_S = 1.15 * REPORT_S  # seconds without a report after which a learner is silent, rather than only taking no steps
RETURN_S = 30.0  # seconds within which learners reconnect after their front has reconnected
LONGEST_TRIP_S = 3600.0


@dataclass(frozen=True, slots=True)
class LearnerTraffic:
    """Data about a present learner.

    heard_at: time of its last message; None if it has sent none since the core's start.
    """

    name: str
    region: str
    heard_at: float | None
    bytes_up: int
    bytes_down: int


@dataclass(slots=True, eq=False)
class Front(Link):
    """A front. owner: the name in its certificate; empty without one. host: its address. nonces: the newest is last.

    shown: the last recorded state. silent_since: time when the last silence began. connected_at: time when it ended.
    """

    owner: str = ""
    host: str = ""
    nonces: list[int] = field(default_factory=list)
    shown: LinkState = LinkState.UNKNOWN
    silent_since: float | None = None
    connected_at: float = 0.0

    def trouble(self, pace: MergePace, now: float) -> str:
        """Returns one line for operators while the front is silent and learners are behind it; otherwise ""."""
        if self.state(now) is not LinkState.SILENT or self.heard_at is None or not self.learners:
            return ""
        budget_s, count = self.budget_s(pace, now), len(self.learners)
        if budget_s is None:
            work = "no work is lost, since nothing is merged without them"
        elif budget_s > 0:
            work = f"their work counts if the link is back within {duration(budget_s)}"
        else:
            work = "their oldest work no longer counts"
        since, behind = duration(now - self.heard_at), f"{count} learner{'s' * (count > 1)}"
        return f"front {self.name} cut off for {since}; {behind} behind it can keep training; {work}"


class Links:
    """The fronts, keyed by name, and the learners' own links, keyed by learner."""

    def __init__(self) -> None:
        self.fronts: dict[str, Front] = {}
        self.own: dict[str, Link] = {}
        self._by_nonce: dict[int, Front] = {}
        self._through: dict[str, int] = {}  # by learner: nonce of the front through which it follows the run
        self._round_trips: dict[str, float] = {}  # by learner, in seconds
        self._looked_at = -math.inf

    @property
    def all(self) -> list[Link]:
        """All links, with those of fronts first."""
        return [*(self.fronts[name] for name in sorted(self.fronts)), *(self.own[name] for name in sorted(self.own))]

    # ------------------------------------------------------------------------------ messages

    def announced(self, report: pb.FrontReport, owner: str, host: str, now: float) -> Front:
        """Returns the front that sent a call's first report.

        A process that starts where a front fell silent takes that front's place. owner: the name in the caller's
        certificate. host: the caller's address without its port. Raises Refused for a malformed report or for more than
        MAX_FRONTS fronts.
        """
        if not report.nonce or len(report.region) > LARGEST_REGION or not report.region.isprintable():
            text = "a front announces itself with a nonce, and a region of at most 64 printable characters"
            raise Refused(Status.INVALID_ARGUMENT, text)
        same = [each for each in self.fronts.values() if (each.owner, each.region) == (owner, report.region)]
        front = next((each for each in same if report.nonce in each.nonces), None)
        if front is None:
            front = next((each for each in same if each.host == host and not _connected(each, now)), None)
        if front is None:
            self._make_room(now)
            front = Front(self._new_name(report.region or owner or "front"), report.region, front=True)
            self.fronts[front.name] = front
        front.owner, front.host = owner, host
        front.nonces = [*(each for each in front.nonces if each != report.nonce), report.nonce][-NONCES:]
        self._index()
        return front

    def heard(self, front: Front, report: pb.FrontReport, now: float) -> None:
        """Records a front's report. A front that leaves is forgotten at once."""
        if report.leaving:
            if self.fronts.get(front.name) is front and front.nonces[-1] == report.nonce:
                self._forget(front)
            return
        if front.state(now) is not LinkState.CONNECTED:
            front.connected_at = now
        front.heard_at = now
        front.round_trip_s = _trip(report.round_trip_s)
        front.traffic.saw(report.bytes_up, report.bytes_down, now)

    def follows(self, learner: str, nonce: int) -> None:
        """Records the front through which a learner follows the run.

        nonce: the front's nonce; 0 if there is no front.
        """
        self._through[learner] = nonce

    def measured(self, learner: str, round_trip_s: float) -> None:
        """Records the round trip that a learner measured."""
        self._round_trips[learner] = _trip(round_trip_s)

    def _make_room(self, now: float) -> None:
        if len(self.fronts) < MAX_FRONTS:
            return
        unused = [each for each in self.fronts.values() if not each.learners and not _connected(each, now)]
        if not unused:
            text = f"the core knows {MAX_FRONTS} fronts (the limit): use fewer fronts"
            raise Refused(Status.RESOURCE_EXHAUSTED, text)
        self._forget(min(unused, key=lambda each: each.heard_at or 0.0))

    def _forget(self, front: Front) -> None:
        del self.fronts[front.name]
        self._index()

    def _index(self) -> None:
        self._by_nonce = {nonce: front for front in self.fronts.values() for nonce in front.nonces}

    def _new_name(self, base: str) -> str:
        names = (base, *(f"{base}-{number}" for number in range(2, MAX_FRONTS + 2)))
        return next(name for name in names if name not in self.fronts)

    # ------------------------------------------------------------------------------ once per second

    def look(self, learners: Collection[LearnerTraffic], outer_steps: float, now: float) -> list[entries.Entry]:
        """Updates all links and returns the changes of fronts since the last call. Call it once per second.

        learners: the present learners. outer_steps: see `MergePace`.
        """
        behind: dict[str, list[str]] = {name: [] for name in self.fronts}
        own: dict[str, Link] = {}
        for each in learners:
            front = self.front_of(each.name)
            if front is not None:
                behind[front.name].append(each.name)
                continue
            link = self.own.get(each.name)
            if link is None:
                link = Link(each.name, each.region, front=False, learners=(each.name,))
            link.region, link.round_trip_s = each.region, self._round_trips.get(each.name, 0.0)
            link.heard_at = each.heard_at
            self._count(link, outer_steps)
            link.traffic.saw(each.bytes_up, each.bytes_down, now)
            own[each.name] = link
        self.own = own
        for name, names in behind.items():
            self.fronts[name].learners = tuple(sorted(names))
        changes = list[entries.Entry]()
        for front in list(self.fronts.values()):
            self._count(front, outer_steps)
            changes += self._changes(front, now)
        self._looked_at = now
        return changes

    def front_of(self, learner: str) -> Front | None:
        """Returns the front through which a learner follows the run, or None."""
        return self._by_nonce.get(self._through.get(learner, 0))

    def cut_off(self, learner: str, heard_at: float, now: float) -> bool:
        """Returns whether a silent learner may be training behind a link that is or was recently cut.

        This is the case unless the learner reports or its front sent messages for longer than the learner did.

        heard_at: time of the learner's last report.
        """
        front = self.front_of(learner)
        if front is None or front.heard_at is None:
            return False
        returning = heard_at < front.connected_at and now - front.connected_at < RETURN_S
        return returning or (now - heard_at > LATE_S and front.heard_at - heard_at < APART_S)

    def _count(self, link: Link, outer_steps: float) -> None:
        if link.heard_at is not None and link.heard_at > self._looked_at:
            link.outer_steps = outer_steps

    def _changes(self, front: Front, now: float) -> Iterator[entries.Entry]:
        """Yields the change of a front's state, if any. Forgets a silent front without learners after FORGET_S."""
        state, heard_at = front.state(now), front.heard_at
        if not front.learners and now - (heard_at or 0.0) > FORGET_S:
            self._forget(front)
        if state is front.shown or heard_at is None:
            return
        front.shown = state
        if state is LinkState.SILENT:
            front.silent_since = heard_at
            yield entries.FrontSilenced(front.name, len(front.learners))
        else:
            silent_s = 0.0 if front.silent_since is None else heard_at - front.silent_since
            yield entries.FrontConnected(front.name, front.region, silent_s)


def duration(seconds: float) -> str:
    """Returns a duration as text for people, such as "38 s" or "6.2 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _connected(front: Front, now: float) -> bool:
    return front.state(now) is LinkState.CONNECTED


def _trip(seconds: float) -> float:
    return seconds if 0.0 <= seconds <= LONGEST_TRIP_S else 0.0
