"""PURE: limits how many versions callers read at the same time, so that stalled callers cannot fill the memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from atoll_server.access.refusals import Refused, Status

MAX_OF_ONE = 2  # versions of one thing that a caller may read at a time: its streams may begin before and after a merge
MAX_OLD = 8  # old versions of all things that stay in memory only for their readers


class _Reader(NamedTuple):
    learner: Hashable
    thing: Hashable
    version: Hashable
    end: Callable[[Refused], None]


class ReaderLimits:
    """Limits how many versions callers (learners or readers) read at the same time.

    A thing is anything with versions, such as a fragment. Each caller may read at most MAX_OF_ONE versions of a thing
    at a time. All callers together may read at most `most_old` old versions, over all things. A version is old once a
    newer one exists.
    """

    def __init__(self, most_old: int = MAX_OLD) -> None:
        self._most_old = most_old
        self._readers: dict[int, _Reader] = {}  # oldest first
        self._newest: dict[Hashable, Hashable] = {}
        self._count = 0

    @contextmanager
    def read(
        self, learner: Hashable, thing: Hashable, version: Hashable, end: Callable[[Refused], None]
    ) -> Iterator[None]:
        """Context manager that counts a caller as a reader of a thing's newest version.

        end: called with the reason to end this read, if the read exceeds a limit now or later.
        """
        self._count += 1
        number, self._newest[thing] = self._count, version
        self._readers[number] = _Reader(learner, thing, version, end)
        mine = [reader for reader in self._readers.values() if (reader.learner, reader.thing) == (learner, thing)]
        stay = list(dict.fromkeys(reader.version for reader in mine))[-MAX_OF_ONE:]
        for reader in mine:
            if reader.version not in stay:
                reader.end(_old("the same caller reads newer versions"))
        self._trim()
        try:
            yield
        finally:
            del self._readers[number]

    def reads(self, version: Hashable) -> bool:
        """Returns whether any caller reads this version."""
        return any(reader.version == version for reader in self._readers.values())

    def passed(self, thing: Hashable) -> None:
        """Records that a thing has a newer version. Its older versions now stay in memory only for their readers."""
        self._newest.pop(thing, None)
        self._trim()

    def _trim(self) -> None:
        read = dict.fromkeys((reader.thing, reader.version) for reader in self._readers.values())
        old = [place for place in read if self._newest.get(place[0]) != place[1]]
        gone = set(old[: max(0, len(old) - self._most_old)])
        for reader in self._readers.values():
            if (reader.thing, reader.version) in gone:
                reader.end(_old(f"at most {self._most_old} old versions are kept"))


def _old(why: str) -> Refused:
    return Refused(Status.UNAVAILABLE, f"the requested version is old, and {why}: fetch the newest version")
