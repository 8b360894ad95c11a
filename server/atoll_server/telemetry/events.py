"""PURE: keeps recent events as text for people.

A caller's position consists of the log's number and the number of the last event that the caller has seen.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from atoll_wire import outer_pb2 as pb

from atoll_server.telemetry import entries
from atoll_server.telemetry.entries import Arrival, Entry

LONGEST_TEXT = 400  # limit on the characters of another process's event
MAX_EVENTS = 2000  # number of events that are kept
REFUSED_EVERY_S = 10.0  # shortest time between two events about refused contributions


class Kind(StrEnum):
    """An event's kind. The dashboard uses these values."""

    CORE = "core"
    JOINED = "joined"
    BACK = "back"
    SILENT = "silent"
    LEFT = "left"
    EVICTED = "evicted"
    REFUSED = "refused"
    CHECKPOINT = "checkpoint"
    PAUSED = "paused"
    RESUMED = "resumed"
    TROUBLE = "trouble"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. at: seconds on the run's clock. learner: empty if the event concerns the whole run."""

    number: int
    at: float
    kind: Kind
    learner: str
    text: str


def event_message(event: Event) -> pb.Event:
    return pb.Event(number=event.number, at=event.at, kind=event.kind, learner=event.learner, text=event.text)


class EventLog:
    """The newest MAX_EVENTS events."""

    def __init__(self, wall: Callable[[float], float]) -> None:
        """wall: converts monotonic seconds to seconds on the run's clock."""
        self.log = 1 + secrets.randbits(62)
        self._wall = wall
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._number = 0
        self._refused = 0  # contributions refused since the newest event about refusals
        self._refused_at = -REFUSED_EVERY_S

    def after(self, log: int, number: int) -> list[Event]:
        """Returns the events after a caller's position, or all events if the position came from another process."""
        known = number if log == self.log else 0
        return [event for event in self._events if event.number > known]

    def on(self, entry: Entry, now: float) -> None:  # noqa: C901, PLR0912 - a case for each kind
        """Adds an event if the entry matters to people. now: monotonic seconds."""
        match entry:
            case entries.Started():
                self._add(Kind.CORE, f"the core started: epoch {entry.epoch}", now)
            case entries.Restored():
                source = f"from the backup of {entry.backup}" if entry.backup else f"to checkpoint {entry.checkpoint}"
                self._add(Kind.CORE, f"restored {source} (generation {entry.generation})", now)
            case entries.InitialParameters():
                self._add(Kind.CORE, f"the run has its initial parameters ({entry.parameters:,})", now)
            case entries.PauseChanged():
                kind, text = (Kind.PAUSED, f"paused {entry.reason}") if entry.reason else (Kind.RESUMED, "resumed")
                self._add(kind, text, now)
            case entries.SnapshotTaken():
                what = "snapshot" if entry.part else "checkpoint"
                self._add(Kind.CHECKPOINT, f"{what} {entry.number} is durable", now)
            case entries.Trouble():
                self._add(Kind.TROUBLE, entry.text, now)
            case entries.Joined():
                self._joined(entry, now)
            case entries.Left():
                self._add(Kind.LEFT, "left", now, entry.learner)
            case entries.Evicted():
                self._add(Kind.EVICTED, f"was evicted: {entry.reason}", now, entry.learner)
            case entries.Readmitted():
                self._add(Kind.BACK, "may join again", now, entry.learner)
            case entries.Silenced():
                self._add(Kind.SILENT, f"has reported no step for {entry.silent_s:.0f} s", now, entry.learner)
            case entries.Recovered():
                self._add(Kind.BACK, "trains again", now, entry.learner)
            case entries.FrontConnected():
                again = f" again after {entry.silent_s:.0f} s" if entry.silent_s else ""
                self._add(Kind.BACK if again else Kind.CORE, f"front {entry.front} is connected{again}", now)
            case entries.FrontSilenced():
                text = f"front {entry.front} is cut off; learners behind it: {entry.learners}"
                self._add(Kind.SILENT, text, now)
            case entries.TurnedAway() | entries.ArrivalRefused() | entries.PendingRefused():
                self._refused += 1
            case (
                entries.TakenUp()
                | entries.InitialParametersRefused()
                | entries.SnapshotFailed()
                | entries.OfCallers()
                | entries.UploadBegan()
                | entries.Clamped()
                | entries.Acknowledged()
                | entries.OfRounds()
            ):
                pass
            case _:
                assert_never(entry)

    def add(self, event: pb.Event, where: str) -> None:
        """Adds an event of another process. Ignores an event of an unknown kind. where: the process's name."""
        if event.kind in set(Kind):
            self._number += 1
            text = f"{where}: {event.text}"[:LONGEST_TEXT]
            self._events.append(Event(self._number, event.at, Kind(event.kind), event.learner, text))

    def tell_refused(self, now: float) -> None:
        """Adds one event for all contributions that were refused recently, at most once per REFUSED_EVERY_S."""
        if not self._refused or now - self._refused_at < REFUSED_EVERY_S:
            return
        what = "contribution was" if self._refused == 1 else "contributions were"
        text = f"{self._refused} {what} refused or turned away: see `atoll receipts` and the core's log"
        self._add(Kind.REFUSED, text, now)
        self._refused = 0
        self._refused_at = now

    def _joined(self, entry: entries.Joined, now: float) -> None:
        match entry.arrival:
            case Arrival.NEW:
                text = f"joined from {entry.region}" if entry.region else "joined"
                self._add(Kind.JOINED, text, now, entry.learner)
            case Arrival.RESTARTED:
                text = f"restarted as incarnation {entry.incarnation} after {entry.down_s:.1f} s down"
                self._add(Kind.BACK, text, now, entry.learner)
            case Arrival.AGAIN:
                pass
            case _:
                assert_never(entry.arrival)

    def _add(self, kind: Kind, text: str, now: float, learner: str = "") -> None:
        self._number += 1
        self._events.append(Event(self._number, self._wall(now), kind, learner, text))
