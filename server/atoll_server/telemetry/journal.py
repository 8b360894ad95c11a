"""The journal of a core: each entry is recorded once and passed to all subscribers.

Subscribers are called at once, in the order of subscription. Some subscribers only show entries: metrics, timeline,
events, logs, the audit log. A fault in one of these is logged and counted, and stops nothing. Learners rely on the log
of followers: a fault there is raised to the code that recorded the entry.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from atoll_server.telemetry.entries import Entry

log = structlog.get_logger()

Subscriber = Callable[[Entry, float], None]  # with the time, in monotonic seconds


class Journal:
    """faults: number of faults in subscribers that only show entries; always 0 unless Atoll has a bug."""

    def __init__(self) -> None:
        self.faults = 0
        self._subscribers: list[tuple[Subscriber, bool]] = []

    def subscribe(self, subscriber: Subscriber, *, only_shows: bool) -> None:
        """Calls `subscriber` for every later entry. only_shows: a fault in it is logged and counted, not raised."""
        self._subscribers.append((subscriber, only_shows))

    def record(self, entry: Entry, now: float) -> None:
        """Passes an entry to all subscribers. now: monotonic seconds."""
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
