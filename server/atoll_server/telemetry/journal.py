"""The journal of a core: what happened is recorded here, once, and told to all that subscribed.

Subscribers are told at once, in the order in which they subscribed. A subscriber that only shows what happened
(metrics, timeline, events, logs, the audit log) cannot stop anything: a fault in it is logged and counted. Learners
rely on the log of followers: a fault there goes to the code that recorded the entry.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from atoll_server.telemetry.entries import Entry

log = structlog.get_logger()

Subscriber = Callable[[Entry, float], None]  # with the time, in monotonic seconds


class Journal:
    """faults: of subscribers that only show; always 0."""

    def __init__(self) -> None:
        self.faults = 0
        self._subscribers: list[tuple[Subscriber, bool]] = []

    def subscribe(self, subscriber: Subscriber, *, only_shows: bool) -> None:
        """Tells it of every entry from now on."""
        self._subscribers.append((subscriber, only_shows))

    def record(self, entry: Entry, now: float) -> None:
        """Tells all subscribers. now: monotonic seconds."""
        for subscriber, only_shows in self._subscribers:
            try:
                subscriber(entry, now)
            except Exception:
                if not only_shows:
                    raise
                self.faults += 1
                log.exception(
                    "an entry of the journal was not shown, training goes on: report this as a fault of Atoll",
                    entry=type(entry).__name__,
                )
