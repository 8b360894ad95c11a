"""PURE: who reads which version of what, so that a reader that stands still does not keep every version in memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from atoll_server.access.refusals import Refused, Status

MAX_OF_ONE = 2  # versions of one thing that a learner reads: its streams may begin before and after a merge
MAX_OLD = 8  # versions that are kept for their readers alone, of all fragments together


class _Reader(NamedTuple):
    learner: Hashable
    thing: Hashable
    version: Hashable
    end: Callable[[Refused], None]


class ReaderLimits:
    """Of one thing a learner reads two versions; and of all things together few are read that are not the newest."""

    def __init__(self, most_old: int = MAX_OLD) -> None:
        self._most_old = most_old
        self._readers: dict[int, _Reader] = {}  # in the order of coming
        self._newest: dict[Hashable, Hashable] = {}
        self._count = 0

    @contextmanager
    def read(
        self, learner: Hashable, thing: Hashable, version: Hashable, end: Callable[[Refused], None]
    ) -> Iterator[None]:
        """While it lasts, the learner reads the newest version of a thing. end: ends that, if it has to be."""
        self._count += 1
        number, self._newest[thing] = self._count, version
        self._readers[number] = _Reader(learner, thing, version, end)
        mine = [reader for reader in self._readers.values() if (reader.learner, reader.thing) == (learner, thing)]
        stay = list(dict.fromkeys(reader.version for reader in mine))[-MAX_OF_ONE:]
        for reader in mine:
            if reader.version not in stay:
                reader.end(_old("the same learner reads newer ones"))
        self._trim()
        try:
            yield
        finally:
            del self._readers[number]

    def reads(self, version: Hashable) -> bool:
        """Whether anybody reads it."""
        return any(reader.version == version for reader in self._readers.values())

    def passed(self, thing: Hashable) -> None:
        """There is a newer version of it: those that are read are kept for that alone."""
        self._newest.pop(thing, None)
        self._trim()

    def _trim(self) -> None:
        read = dict.fromkeys((reader.thing, reader.version) for reader in self._readers.values())
        old = [place for place in read if self._newest.get(place[0]) != place[1]]
        gone = set(old[: max(0, len(old) - self._most_old)])
        for reader in self._readers.values():
            if (reader.thing, reader.version) in gone:
                reader.end(_old(f"{self._most_old} of them are kept at most"))


def _old(why: str) -> Refused:
    return Refused(Status.UNAVAILABLE, f"what was read is an old version, and {why}: ask again")
