"""PURE: what happened lately, as people would tell it; found by looking at the run again and again.

Nothing has to report to it: each look is compared with the one before. A position is (log, number) as a follower's.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_EVENTS = 2000  # kept
REFUSED_EVERY_S = 10.0  # at most so often contributions that were refused are told


@dataclass(frozen=True, slots=True)
class Event:
    """at: seconds of the run's clock."""

    number: int
    at: float
    kind: str
    learner: str
    text: str


@dataclass(frozen=True, slots=True)
class Sight:
    """A learner as a look finds it."""

    state: str
    region: str
    incarnation: int
    stepped_at: float  # its last sign of progress; of one that left, of its good-bye
    down_s: float  # before its newest incarnation joined
    evicted: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """A run at one moment. checkpoints: the newest one's number; refused: contributions, at the door or later."""

    at: float
    learners: Mapping[str, Sight]
    parameters: int
    checkpoint: int
    paused: str
    refused: int
    troubles: Sequence[str]


class Diary:
    """Events, the newest last, and since when each learner is in its state."""

    def __init__(self) -> None:
        self.log = 1 + secrets.randbits(62)
        self.since: dict[str, float] = {}
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._number = 0
        self._last: Look | None = None
        self._refused = 0  # as last told
        self._refused_at = 0.0
        self._mute: set[str] = set()  # whose silence or eviction was told

    def after(self, log: int, number: int) -> list[Event]:
        """Those that a reader has not seen; all that are kept, when its position is of another process."""
        known = number if log == self.log else 0
        return [event for event in self._events if event.number > known]

    def note(self, at: float, kind: str, text: str, learner: str = "") -> None:
        """Adds one."""
        self._number += 1
        self._events.append(Event(self._number, at, kind, learner, text))

    def look(self, now: Look) -> None:
        """Writes down what is not as it was."""
        last, self._last = self._last, now
        for name, sight in now.learners.items():
            self._learner(name, sight, last.learners.get(name) if last is not None else None, now, first=last is None)
        if last is None:
            self._refused = now.refused
            for trouble in now.troubles:
                self.note(now.at, "trouble", trouble)
            return
        if now.parameters and not last.parameters:
            self.note(now.at, "core", f"the run has its first parameters: {now.parameters:,}")
        if now.checkpoint > last.checkpoint:
            self.note(now.at, "checkpoint", f"checkpoint {now.checkpoint} is durable")
        if now.paused != last.paused:
            self.note(now.at, "paused", f"paused {now.paused}" if now.paused else "the run goes on")
        for trouble in now.troubles:
            if trouble not in last.troubles:
                self.note(now.at, "trouble", trouble)
        self._tell_refused(now)

    def _learner(self, name: str, sight: Sight, last: Sight | None, now: Look, *, first: bool) -> None:
        if last is not None and last.state == sight.state and last.incarnation == sight.incarnation:
            return
        quiet = sight.state in {"silent", "left", "evicted"}
        self.since[name] = min(now.at, sight.stepped_at) if quiet else now.at
        if first:
            return  # it is as it was before this core started
        if last is None:
            self.note(now.at, "joined", f"joined from {sight.region or 'no region'}", name)
        elif sight.incarnation != last.incarnation:
            text = f"was started again, as incarnation {sight.incarnation}: {sight.down_s:.1f} s down"
            self.note(now.at, "back", text, name)
        if last is None or last.state == sight.state:
            return
        match sight.state:
            case "silent":
                self._mute.add(name)
                self.note(now.at, "silent", f"makes no steps since {now.at - sight.stepped_at:.0f} s", name)
            case "left" if last.state == "evicted":
                self.note(now.at, "back", "may join again", name)
            case "left":
                self.note(now.at, "left", "said good-bye", name)
            case "evicted":
                self.note(now.at, "evicted", f"was evicted: {sight.evicted}", name)
            case "live" if name in self._mute:
                self._mute.discard(name)
                if sight.incarnation == last.incarnation:
                    self.note(now.at, "back", "trains again", name)

    def _tell_refused(self, now: Look) -> None:
        more = now.refused - self._refused
        if more > 0 and now.at - self._refused_at >= REFUSED_EVERY_S:
            what = "contribution was" if more == 1 else "contributions were"
            self.note(now.at, "refused", f"{more} {what} refused: the receipts and the core's log say whose and why")
            self._refused = now.refused
            self._refused_at = now.at
