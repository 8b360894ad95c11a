"""PURE: limits on the versions that learners read at a time, so that stalled readers cannot fill the memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from atoll_server.access.refusals import Refused, Status

MAX_OF_ONE = 2  # versions of one thing per learner, whose streams may begin before and after a merge
MAX_OLD = 8  # old versions, over all things, that are kept only for their readers


class _Reader(NamedTuple):
    learner: Hashable
    thing: Hashable
    version: Hashable
    end: Callable[[Refused], None]


class ReaderLimits:
    """Limits the versions that learners read: to MAX_OF_ONE per learner and thing, and to `most_old` old versions.

    A thing is whatever has versions, such as a fragment. A version is old once there is a newer one. most_old: limit
    over all things.
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
        """Context manager in which a learner reads a thing's newest version.

        end: ends the read when a limit is reached.
        """
        self._count += 1
        number, self._newest[thing] = self._count, version
        self._readers[number] = _Reader(learner, thing, version, end)
        mine = [reader for reader in self._readers.values() if (reader.learner, reader.thing) == (learner, thing)]
        stay = list(dict.fromkeys(reader.version for reader in mine))[-MAX_OF_ONE:]
        for reader in mine:
            if reader.version not in stay:
                reader.end(_old("the same learner reads newer versions"))
        self._trim()
        try:
            yield
        finally:
            del self._readers[number]

    def reads(self, version: Hashable) -> bool:
        """Returns whether any learner reads this version."""
        return any(reader.version == version for reader in self._readers.values())

    def passed(self, thing: Hashable) -> None:
        """Records that a thing has a newer version: its older versions are now kept only for their readers."""
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
