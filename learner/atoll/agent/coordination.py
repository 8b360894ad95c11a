"""Coordinates the agents of a learner's ranks: rank 0 joins the run for all ranks, and each rank transfers its frames.

Ranks adopt a version only when every owner has prepared its part and all parts together have the published checksum.
Ranks send a contribution only when every owner has encoded its part, because the header covers all frames.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire import ranks_pb2 as rk
from atoll_wire.codec.checksums import joined
from atoll_wire.layout.layout import FragmentLayout

from atoll.agent.core_view import CoreView, FragmentTrack
from atoll.fragments.adoption import Fate, PreparedAnchor
from atoll.fragments.exchange import ThreadExchange
from atoll.fragments.segments import Coded
from atoll.ranks.division import Owners, owned_runs
from atoll.ranks.messages import RankMessages
from atoll.stats import Counters

log = structlog.get_logger()

Rows: TypeAlias = tuple[tuple[int, int], ...]  # length and CRC-32C of each payload


class Coordination:
    """Exchanges information with the agents of the other ranks. This base class is for a single-process learner.

    owners: the assignment of frames to ranks.
    """

    owners = Owners()

    def sound(self, header: pb.FetchHeader, checksum: int) -> bool:
        """Returns whether this rank's part of a version may be valid. checksum: the CRC-32C of this rank's values."""
        return self.owners.size > 1 or checksum == header.crc32c  # only all parts together have the published checksum

    def prepared(self, track: FragmentTrack, header: pb.FetchHeader, checksum: int) -> None:
        """Tells the other ranks that this rank has prepared its part of a version. checksum: see `sound`."""

    async def table(self, track: FragmentTrack, seq: int, mine: Rows) -> Rows:  # noqa: ARG002 - there is one rank
        """Returns the length and CRC-32C of each payload of a contribution. mine: the rows for this rank's frames."""
        return mine

    def announced(self, track: FragmentTrack) -> None:
        """Tells the other ranks the newest version of a fragment."""

    def opened(self, track: FragmentTrack) -> None:
        """Tells the other ranks that a fragment's round opened."""

    def joined(self, reply: pb.JoinReply, restores: int) -> None:
        """Forwards the reply to a Join to the other ranks. restores: see Track."""

    def restored(self) -> None:
        """Forgets all prepared versions, because the run was restored to a checkpoint."""

    def ended(self, track: FragmentTrack, seq: int, *, drop: bool) -> None:
        """Tells the other ranks that a contribution ended without a merge."""

    def fetches_to_drop(self, track: FragmentTrack) -> bool:  # noqa: ARG002 - there is one rank
        """Returns whether this rank must fetch the whole fragment, so that its adoption drops the outstanding work."""
        return True

    async def all_prepared(self, fragments: int) -> None:
        """Waits until all ranks have prepared a version of each fragment."""


class Tables:
    """Lets tasks wait for the tables of contributions, which list all payloads."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], asyncio.Future[Rows]] = {}

    async def wait(self, fragment: int, seq: int) -> Rows:
        """Waits until `found` receives a contribution's table. Returns the table."""
        future: asyncio.Future[Rows] = asyncio.get_running_loop().create_future()
        self._waiting[fragment, seq] = future
        try:
            return await future
        finally:
            self._waiting.pop((fragment, seq), None)

    def found(self, fragment: int, seq: int, rows: Rows) -> None:
        """Passes a table to the task that waits for it, if any."""
        future = self._waiting.get((fragment, seq))
        if future is not None and not future.done():
            future.set_result(rows)


class Leading(Coordination):
    """The coordination on rank 0 of several ranks.

    begin_fetch: called to start a fetch for a track. merged: called to record that a track's contribution in flight was
    merged.
    """

    def __init__(self, messages: RankMessages, core: CoreView, exchange: ThreadExchange, counters: Counters) -> None:
        self.owners = Owners(messages.rank, messages.size)
        self._messages = messages
        self._core = core
        self._exchange = exchange
        self._counters = counters
        self._parts: defaultdict[tuple[int, int, int], dict[int, rk.Part]] = defaultdict(dict)
        self._rows: defaultdict[tuple[int, int], dict[int, Rows]] = defaultdict(dict)
        self._newest_parts: dict[tuple[int, int], int] = {}  # version of the newest part, by rank and fragment
        self._confirmed: dict[int, tuple[int, int]] = {}  # version and published checksum, by fragment
        self._tables = Tables()
        self._news = asyncio.Event()
        self.begin_fetch: Callable[[FragmentTrack], None] = lambda _: None
        self.merged: Callable[[FragmentTrack], None] = lambda _: None

    def _tell(self, **what: object) -> None:
        message = rk.RankMessage(sender=0, **what).SerializeToString()  # type: ignore[arg-type]
        for rank in range(1, self._messages.size):
            self._messages.send(rank, message)

    def _owning(self, fragment: FragmentLayout) -> list[int]:
        """Returns the ranks that own frames of a fragment, in the order of the frames."""
        runs = enumerate(owned_runs(fragment, self._messages.size))
        return [rank for _, rank in sorted((run.first, rank) for rank, run in runs if run.frames)]

    def prepared(self, track: FragmentTrack, header: pb.FetchHeader, checksum: int) -> None:
        if self._confirmed.get(track.fragment) == (header.version, header.crc32c):
            for (fragment, version, _), parts in self._parts.items():
                if fragment == track.fragment and version > header.version:
                    parts.pop(0, None)  # the shard was restored, and this rank has dropped these versions
            self._confirm(track.fragment, header.version, header.crc32c)  # fetched again: all ranks have it
        else:
            self._part(0, part_of(track, header, checksum, self._core.session.generation))

    async def table(self, track: FragmentTrack, seq: int, mine: Rows) -> Rows:
        waiting = asyncio.ensure_future(self._tables.wait(track.fragment, seq))
        await asyncio.sleep(0)  # so that the wait has begun when the last row completes the table
        try:
            self._row(0, track.fragment, seq, mine)
            return await waiting
        finally:
            waiting.cancel()

    def announced(self, track: FragmentTrack) -> None:
        announced = rk.Announced(
            fragment=track.fragment, version=track.target, setbacks=track.setbacks, skipped_to=track.skipped_to
        )
        self._tell(announced=announced)

    def opened(self, track: FragmentTrack) -> None:
        self._tell(opened=rk.Opened(fragment=track.fragment))

    def joined(self, reply: pb.JoinReply, restores: int) -> None:
        self._tell(joined=rk.Joined(reply=reply, restores=restores, address=self._core.link.address))

    def restored(self) -> None:
        self._parts.clear()
        self._newest_parts.clear()
        self._confirmed.clear()

    def ended(self, track: FragmentTrack, seq: int, *, drop: bool) -> None:
        self._rows.pop((track.fragment, seq), None)
        self._tables.found(track.fragment, seq, ())
        self._tell(ended=rk.Ended(fragment=track.fragment, seq=seq, drop=drop))

    def fetches_to_drop(self, track: FragmentTrack) -> bool:
        """See Coordination. If rank 0 owns no frames, it offers the newest version again instead of fetching."""
        if track.run.frames:
            return True
        newest = self._confirmed.get(track.fragment)
        if newest is None:
            track.drop = True  # the run was restored, so the other ranks will prepare a version
        else:
            self._offer_empty(track, *newest, Fate(None, drop=True, restores=track.restores))
            self._confirm(track.fragment, *newest)
        return False

    async def all_prepared(self, fragments: int) -> None:
        while self._exchange.confirmed < fragments:
            self._news.clear()
            await self._news.wait()

    def receive(self, message: rk.RankMessage) -> None:
        """Handles a message from another rank."""
        match message.WhichOneof("what"):
            case "part":
                self._part(message.sender, message.part)
            case "rows":
                rows = message.rows
                self._row(message.sender, rows.fragment, rows.seq, rows_of(rows))
            case "session_lost":
                lost = message.session_lost
                for shard in self._core.shards:
                    if shard.number == lost.shard and shard.session.token == lost.token:
                        shard.lose(shard.session)
            case "traffic":
                self._counters.bytes_up += message.traffic.up
                self._counters.bytes_down += message.traffic.down
                self._counters.bytes_whole += message.traffic.whole

    def _part(self, rank: int, part: rk.Part) -> None:
        """Records a rank's part of a version. Confirms the version when all parts have arrived and are valid."""
        if part.generation != self._core.session.generation:
            return  # the run was restored to a checkpoint: the rank will prepare its version
        track, name = self._core.track(part.fragment), (part.fragment, part.version, part.published)
        self._note_skip(track, rank, part.version)
        parts = self._parts[name]
        parts[rank] = part
        owning = self._owning(track.run.fragment)
        if not parts.keys() >= set(owning):
            return
        for old in [key for key in self._parts if key[0] == part.fragment and key[1] <= part.version]:
            del self._parts[old]
        runs = owned_runs(track.run.fragment, self._messages.size)
        if joined((parts[rank].crc32c, 4 * runs[rank].length) for rank in owning) != part.published:
            self._mismatch(track)
            return
        if not track.run.frames:
            self._follow(track, parts, part)
        self._confirm(part.fragment, part.version, part.published)

    def _note_skip(self, track: FragmentTrack, rank: int, version: int) -> None:
        """Tells all ranks if a rank has skipped versions, because it fetched the whole fragment."""
        newest = self._newest_parts.get((rank, track.fragment), -1)
        self._newest_parts[rank, track.fragment] = version
        if version != newest + 1 and version > track.skipped_to:
            track.skipped_to = version
            self.announced(track)
            self.begin_fetch(track)

    def _confirm(self, fragment: int, version: int, published: int) -> None:
        self._confirmed[fragment] = version, published
        last = self._exchange.confirm(fragment, version, published)
        newest = rk.AnchorName(version=version, checksum=published)
        chosen = None if last is None else rk.AnchorName(version=last[0], checksum=last[1])
        self._tell(confirmed=rk.Confirmed(fragment=fragment, newest=newest, chosen=chosen))
        self._news.set()
        self.begin_fetch(self._core.track(fragment))

    def _mismatch(self, track: FragmentTrack) -> None:
        log.error("the checksum of an anchor is wrong: fetching the whole fragment", fragment=track.fragment)
        self._counters.mismatches += 1
        track.whole = True
        self._tell(refetch=rk.Refetch(fragment=track.fragment))
        self.begin_fetch(track)

    def _follow(self, track: FragmentTrack, parts: dict[int, rk.Part], part: rk.Part) -> None:
        """Offers an anchor of a fragment if other ranks own all of the fragment's frames."""
        drop, flying = track.drop, track.in_flight
        merged = flying is not None and any(each.merged >= flying.seq for each in parts.values())
        if merged:
            self.merged(track)
        track.version, track.whole, track.drop = part.version, False, False
        fate = Fate(Coded.of(()) if merged else None, drop, track.restores)
        self._offer_empty(track, part.version, part.published, fate)

    def _offer_empty(self, track: FragmentTrack, version: int, published: int, fate: Fate) -> None:
        anchor = PreparedAnchor(track.fragment, version, np.empty(0, np.float32), fate, checksum=published)
        self._exchange.offer(anchor, confirmed=False)

    def _row(self, rank: int, fragment: int, seq: int, rows: Rows) -> None:
        """Records the table rows of a rank's frames. The last owner's rows complete the table."""
        track = self._core.track(fragment)
        if rank and seq <= track.ended:
            return
        known, owning = self._rows[fragment, seq], self._owning(track.run.fragment)
        known[rank] = rows
        if known.keys() >= {0, *owning}:
            del self._rows[fragment, seq]
            table = tuple(row for owner in owning for row in known[owner])
            self._tell(table=table_message(fragment, seq, table))
            self._tables.found(fragment, seq, table)


class Following(Coordination):
    """The coordination on a rank other than 0."""

    def __init__(self, messages: RankMessages, core: CoreView) -> None:
        self.owners = Owners(messages.rank, messages.size)
        self._messages = messages
        self._core = core
        self.tables = Tables()

    def tell(self, **what: object) -> None:
        """Sends a message to rank 0."""
        message = rk.RankMessage(sender=self._messages.rank, **what)  # type: ignore[arg-type]
        self._messages.send(0, message.SerializeToString())

    def prepared(self, track: FragmentTrack, header: pb.FetchHeader, checksum: int) -> None:
        self.tell(part=part_of(track, header, checksum, self._core.session.generation))

    async def table(self, track: FragmentTrack, seq: int, mine: Rows) -> Rows:
        self.tell(rows=table_message(track.fragment, seq, mine))
        return await self.tables.wait(track.fragment, seq)

    def fetches_to_drop(self, track: FragmentTrack) -> bool:  # noqa: ARG002 - rank 0 decides
        """Returns False, because this rank has already prepared every version that rank 0 may choose."""
        return False

    def ended(self, track: FragmentTrack, seq: int, *, drop: bool) -> None:  # noqa: ARG002 - rank 0 decides
        """Ends the wait for the contribution's table. Rank 0 tells the other ranks that the contribution ended."""
        self.tables.found(track.fragment, seq, ())


def part_of(track: FragmentTrack, header: pb.FetchHeader, checksum: int, generation: int) -> rk.Part:
    """Returns the message that describes this rank's part of a version."""
    return rk.Part(
        fragment=track.fragment,
        version=header.version,
        published=header.crc32c,
        crc32c=checksum,
        merged=track.merged,
        generation=generation,
    )


def table_message(fragment: int, seq: int, rows: Sequence[tuple[int, int]]) -> rk.Table:
    sizes, checksums = [size for size, _ in rows], [checksum for _, checksum in rows]
    return rk.Table(fragment=fragment, seq=seq, sizes=sizes, checksums=checksums)


def rows_of(table: rk.Table) -> Rows:
    return tuple(zip(table.sizes, table.checksums, strict=True))


def receive_on_loop(
    messages: RankMessages, handle: Callable[[rk.RankMessage], None], failed: Callable[[Exception], None]
) -> None:
    """Starts to receive messages and handles each one on the current event loop. failed: called with a fatal error."""
    loop = asyncio.get_running_loop()

    def call(function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(function, *arguments)

    def handle_or_fail(message: bytes) -> None:
        try:
            handle(rk.RankMessage.FromString(message))
        except Exception as error:
            failed(error)

    messages.begin(lambda message: call(handle_or_fail, message), lambda error: call(failed, error))
