"""A core's journal: each entry is recorded once and passed to all subscribers.

Subscribers are called immediately, in the order of subscription. The metrics, the timeline, the events, the logs and
the audit log only show entries. An error in one of these is logged and counted, and training continues. Learners rely
on the follower log, so its errors are raised in the code that recorded the entry.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from atoll_server.telemetry.entries import Entry

log = structlog.get_logger()

Subscriber = Callable[[Entry, float], None]  # arguments: entry, and its time in monotonic seconds


class Journal:
    """Passes entries to subscribers. faults: number of errors in subscribers that only show entries."""

    def __init__(self) -> None:
        self.faults = 0
        self._subscribers: list[tuple[Subscriber, bool]] = []

    def subscribe(self, subscriber: Subscriber, *, only_shows: bool) -> None:
        """Calls `subscriber` for every later entry. only_shows: whether its errors are logged instead of raised."""
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
                    "a journal entry could not be shown, and training continues: report this bug",
                    entry=type(entry).__name__,
                )
