"""Shows the newest published versions of a process's shards to the readers that watch them.

A board keeps one version per fragment. Slow readers skip versions, so the board's memory does not grow for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field

from atoll_wire import outer_pb2 as pb

BEAT_S = 1.0  # interval of empty replies, which show that this process is alive


@dataclass(slots=True)
class _ShownShard:
    """A shard's versions. count: number of changes so far. changed: the count after each fragment's last change."""

    log: int
    count: int = 0
    newest: dict[int, pb.PublishedVersion] = field(default_factory=dict)
    changed: dict[int, int] = field(default_factory=dict)


class VersionBoard:
    """The newest versions of each shard. Must be used on only one event loop."""

    def __init__(self) -> None:
        self._shards: dict[int, _ShownShard] = {}
        self._changed = asyncio.Event()
        self.watching = 0  # number of readers that watch now

    def show(self, shard: int, log: int, versions: Iterable[pb.PublishedVersion]) -> None:
        """Shows the versions that are newer than those shown, and ignores the others. shard: the shard's number.

        log: the shard's log, as in WatchReply. If the log is new, `versions` must contain all fragments of the shard.
        """
        shown = self._shards.get(shard)
        if shown is None or shown.log != log:
            shown = self._shards[shard] = _ShownShard(log)
        for version in versions:
            known = shown.newest.get(version.fragment)
            if known is None or known.version < version.version:
                shown.count += 1
                shown.newest[version.fragment] = version
                shown.changed[version.fragment] = shown.count
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def clear(self) -> None:
        """Forgets all shards. Readers keep watching."""
        self._shards.clear()

    def newest(self, fragment: int) -> pb.PublishedVersion | None:
        """Returns a fragment's newest version, or None if it is unknown."""
        found = (shown.newest.get(fragment) for shown in self._shards.values())
        return next((version for version in found if version is not None), None)

    def shows(self, shard: int) -> bool:
        """Returns whether the board shows the versions of a shard."""
        return shard in self._shards

    async def watch(self) -> AsyncGenerator[pb.WatchReply, None]:
        """Yields the versions of all shards, then each change.

        Yields an empty reply after BEAT_S seconds without a change.
        """
        told = dict[int, tuple[int, int]]()  # log and count by shard
        self.watching += 1
        try:
            while True:
                changed, quiet = self._changed, True
                for number, shown in list(self._shards.items()):
                    log, count = told.get(number, (0, 0))
                    count = count if log == shown.log else 0
                    if (log, count) == (shown.log, shown.count):
                        continue
                    told[number] = (shown.log, shown.count)
                    newer = [each for index, each in shown.newest.items() if shown.changed[index] > count]
                    quiet = False
                    yield pb.WatchReply(shard=number, log=shown.log, versions=newer)
                if quiet:
                    try:
                        async with asyncio.timeout(BEAT_S):
                            await changed.wait()
                    except TimeoutError:
                        yield pb.WatchReply()
        finally:
            self.watching -= 1
