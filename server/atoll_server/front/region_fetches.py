"""Fetches updates and whole fragments for the learners and readers of a region, so that each crosses the WAN once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import LinkLost, open_stream
from atoll_wire.connections.frame_transfer import download
from atoll_wire.connections.link import ATOLL_STATUS, is_atoll_status
from atoll_wire.contract import UPDATES_KEPT
from atoll_wire.messages.frame_messages import Sent, WireFrame, frames_in
from prometheus_client import Counter

from atoll_server.access.reader_limits import ReaderLimits
from atoll_server.access.refusals import Refused, Status
from atoll_server.front.fetch_cache import CachedFetch, CacheFullError, CacheKey, CorruptFetchError, FetchCache
from atoll_server.front.metrics import FrontMetrics
from atoll_server.rpc.calls import ending, wanted_frames
from atoll_server.upstream.core_connection import UpstreamShard
from atoll_server.upstream.routes import Routes

log = structlog.get_logger()

Request: TypeAlias = pb.FetchRequest | pb.ReadRequest
Find: TypeAlias = Callable[[], Awaitable[tuple[pb.FetchHeader, CachedFetch, Sequence[int]]]]

FIXED = -1  # fragment in a CacheKey that stands for the run's fixed values
RECENT = 4  # a reader may get a whole fragment that is up to this many versions old and applies the updates itself
OLD_UPDATES, OLD_WHOLES = 16, 2  # old updates and whole fragments that stay in memory only for readers
TRIES = 4  # attempts to fetch a whole fragment; a version may be published between its header and its frames
ASK_S = 20.0  # timeout for a header, in seconds
OF_THE_SESSION = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
}


class RegionFetches:
    """Fetches updates and whole fragments into a cache and relays those that do not fit.

    limit_bytes: limit on cached frames.
    """

    def __init__(self, routes: Routes, metrics: FrontMetrics, limit_bytes: int) -> None:
        self._routes = routes
        self._metrics = metrics
        self.cache = FetchCache(limit_bytes)
        self._versions = ReaderLimits()
        # Readers that are not learners have separate limits, so that they cannot end a learner's fetch.
        self._followed = {False: ReaderLimits(OLD_UPDATES), True: ReaderLimits(OLD_WHOLES)}
        self._bringing: set[asyncio.Task[None]] = set()

    async def fetch(self, request: pb.FetchRequest) -> AsyncGenerator[Sent, None]:
        """Yields the replies that the core would send. Raises LinkLost, Refused or a call's AioRpcError."""
        served = self._metrics.learner(request.session.learner, "down")
        name, versions = request.session.learner, self._versions
        find = None if request.header_only else partial(self._item, request)
        async with aclosing(self._replies(request, find, name, versions, served)) as replies:
            async for reply in replies:
                yield reply

    async def read(
        self, request: pb.ReadRequest, newest: pb.PublishedVersion | None, fixed_frames: int
    ) -> AsyncGenerator[Sent, None]:
        """Yields the replies to a reader, without receipts. Asks the core only for frames that are not cached.

        newest: the newest version of the fragment, or None if it is unknown. fixed_frames: number of frames of the
        fixed values. Raises LinkLost, Refused or a call's AioRpcError.
        """
        versions = self._followed[request.whole or request.fixed]
        find = partial(self._read_item, request, newest, fixed_frames)
        served = self._metrics.readers_down
        async with aclosing(self._replies(request, find, object(), versions, served)) as replies:
            async for reply in replies:
                if isinstance(reply, pb.FetchReply) and reply.header.receipts:
                    bare = pb.FetchReply()
                    bare.CopyFrom(reply)
                    bare.header.ClearField("receipts")
                    yield bare
                else:
                    yield reply

    async def _replies(
        self, request: Request, find: Find | None, reader: Hashable, versions: ReaderLimits, served: Counter
    ) -> AsyncGenerator[Sent, None]:
        """Yields replies from the cache, or relays them.

        find: function that returns the header for this caller, the item (possibly incomplete) and the indices of the
        wanted frames; None to relay. reader: key of the caller in `versions`. served: counter of payload bytes.
        """
        for _ in range(TRIES if find is not None else 0):
            assert find is not None, "checked above"
            begun = False
            try:
                header, item, wanted = await find()
                yield pb.FetchReply(header=header)
                begun = True
                with versions.read(reader, item.place[:4], item.place[4:], ending()):
                    async for message in item.read(wanted):
                        served.inc(len(message))
                        yield message
                return
            except CorruptFetchError as error:
                if begun:
                    text = f"a fetch of fragment {request.fragment} did not complete: fetch it again"
                    raise Refused(Status.UNAVAILABLE, text) from error
            except CacheFullError as error:
                if begun:
                    why = f"this front has no free memory for fragment {request.fragment}"
                    text = f"{why}: try again later, or raise the front's --cache"
                    raise Refused(Status.RESOURCE_EXHAUSTED, text) from error
                break
        async for reply in self._relay(request, served):
            yield reply

    def told(self, shard: UpstreamShard, log: int, session: pb.Session, versions: Iterable[tuple[int, int]]) -> None:
        """Records a shard's message to a learner. If the log has changed, drops the shard's items."""
        self.announced(shard, log, session.run, session.generation, versions)
        shard.sessions.answered(session, self._routes.clock.monotonic())
        self._metrics.vouched(session.learner)

    def announced(
        self, shard: UpstreamShard, log: int, run: str, generation: int, versions: Iterable[tuple[int, int]]
    ) -> None:
        """Records a shard's new versions (see `UpstreamShard.told`).

        If the log has changed, drops the shard's items.
        """
        if not shard.told(log, run, generation, versions):
            self.cache.clear(shard.fragments)

    async def _read_item(
        self, request: pb.ReadRequest, newest: pb.PublishedVersion | None, fixed_frames: int
    ) -> tuple[pb.FetchHeader, CachedFetch, Sequence[int]]:
        """Returns the item for a reader. Asks the core only for missing frames, not for the header."""
        if request.fixed:
            place, count = CacheKey(request.run, request.generation, FIXED, True, 0), fixed_frames
        else:
            place, count = self._read_place(request, newest)
        wanted = wanted_frames(request, count)
        item = self.cache.find(place) or self.cache.begin(place, count)
        self._bring_missing(request, item, wanted)
        return await item.begun(), item, wanted

    def _read_place(self, request: pb.ReadRequest, newest: pb.PublishedVersion | None) -> tuple[CacheKey, int]:
        """Returns the key and the number of frames of the update or of a recent version of the whole fragment."""
        if newest is None:
            text = f"this front does not know the versions of fragment {request.fragment} yet: try again"
            raise Refused(Status.UNAVAILABLE, text)
        fragment = (request.run, request.generation, request.fragment)
        if not request.whole:
            if not newest.version - UPDATES_KEPT < request.version <= newest.version:
                update = f"update {request.version} of fragment {request.fragment}"
                text = f"{update} is not available: fetch the whole fragment"
                raise Refused(Status.NOT_FOUND, text)
            return CacheKey(*fragment, False, request.version), newest.frames
        # A recent version suffices: the reader applies the later updates, which are cached too.
        place = self.cache.recent(CacheKey(*fragment, True, newest.version - RECENT))
        if place is None:
            known = self._routes.owner(request, request.fragment).whole.get(fragment, (0, 0))
            version, checksum = max(known, (newest.version, newest.crc32c))
            place = CacheKey(*fragment, True, version, checksum)
        return place, newest.frames

    async def _item(self, request: pb.FetchRequest) -> tuple[pb.FetchHeader, CachedFetch, Sequence[int]]:
        """Returns the header for this learner, the item (possibly incomplete) and the indices of the wanted frames."""
        session, header = request.session, None
        shard = self._routes.owner(session, request.fragment)
        fragment = (session.run, session.generation, request.fragment)
        place = CacheKey(*fragment, request.whole, request.version)
        known = shard.sessions.known(session, self._routes.clock.monotonic()) and fragment in shard.counts
        there = self.cache.find(place) is not None or request.version <= shard.newest.get(fragment, 0)
        if request.whole or not known or not there:
            # The core checks the session. For a whole fragment, it sends the version and the learner's newest receipt.
            header = await self._header(request)
            shard.counts[fragment] = header.frames
            place = place._replace(version=header.version, crc32c=header.crc32c if request.whole else 0)
        wanted = wanted_frames(request, shard.counts[fragment])
        item = self.cache.find(place) or self.cache.begin(place, shard.counts[fragment])
        self._bring_missing(request, item, wanted)
        begun = await item.begun()
        return header or begun, item, wanted

    def _bring_missing(self, request: Request, item: CachedFetch, wanted: Sequence[int]) -> None:
        """Fetches the wanted frames that are missing, in a task that continues even if the caller's call ends."""
        if claimed := item.claim(wanted):
            task = asyncio.create_task(self._bring(request, item, claimed))
            self._bringing.add(task)
            task.add_done_callback(self._bringing.discard)

    async def _header(self, request: pb.FetchRequest) -> pb.FetchHeader:
        shard = self._routes.owner(request.session, request.fragment)
        asked = pb.FetchRequest(header_only=True)
        asked.MergeFrom(request)
        asked.ClearField("frames")
        began = self._routes.clock.monotonic()
        with (
            shard.link.quick.use() as connection,
            open_stream("Fetch", connection.stub.Fetch(asked, timeout=ASK_S)) as call,
        ):
            reply = await call.read()
        shard.link.answered(self._routes.clock.monotonic() - began)
        if not isinstance(reply, pb.FetchReply) or not reply.header.frames > 0:
            raise Refused(Status.UNAVAILABLE, "the core sent a reply without a header: fetch again")
        shard.sessions.answered(request.session, self._routes.clock.monotonic())
        return reply.header

    async def _bring(self, request: Request, item: CachedFetch, claimed: Sequence[int]) -> None:
        """Fetches frames into an item.

        If the fetch fails, the readers that wait for these frames raise the same error.
        """
        shard = self._shard_of(request)
        asked: Any = type(request)()
        asked.CopyFrom(request)
        asked.ClearField("frames")
        asked.ClearField("fast")  # concerns the caller's link, not this front's
        counter = self._counter_of(request)

        def took(header: pb.FetchHeader, frame: WireFrame | pb.Frame) -> None:
            counter.inc(len(frame.payload))
            if item.place.whole:
                shard.whole[item.place[:3]] = (header.version, header.crc32c)
            item.took(header, frame)

        try:
            if not await download(shard.link, asked, claimed, took):
                raise CorruptFetchError
        except (CorruptFetchError, CacheFullError) as error:
            self.cache.drop(item)  # the core now has a different version, or this front has no memory
            item.failed(claimed, type(error))
        except grpc.aio.AioRpcError as error:
            if error.code() in OF_THE_SESSION:  # concerns only this caller, so another call fetches instead
                if isinstance(request, pb.FetchRequest):
                    shard.sessions.refused(request.session)
                item.failed(claimed, CorruptFetchError)
            else:
                mark = ATOLL_STATUS if is_atoll_status(error) else ()
                item.failed(claimed, partial(_again, error.code(), error.details() or "", mark))
        except LinkLost:
            item.failed(claimed, LinkLost)
        except asyncio.CancelledError:
            item.failed(claimed, LinkLost)
            raise
        except Exception as error:
            log.exception("a fetch from the core failed: report this bug", fragment=request.fragment)
            text = f"this front failed to fetch fragment {request.fragment} ({error!r}): try again, and report this bug"
            item.failed(claimed, partial(_again, grpc.StatusCode.UNAVAILABLE, text))
        finally:
            if not item.header.frames:  # no frame arrived, so the item may not exist at the core
                self.cache.drop(item)
            self._metrics.cached.set(self.cache.size_bytes)

    async def _relay(self, request: Request, served: Counter) -> AsyncIterator[Sent]:
        """Yields the core's replies to this request without caching them."""
        counter, link = self._counter_of(request), self._shard_of(request).link
        method = "Read" if isinstance(request, pb.ReadRequest) else "Fetch"
        asked: Any = type(request)()
        asked.CopyFrom(request)
        asked.fast = link.fast
        with (
            link.carriers.use() as connection,
            open_stream(method, getattr(connection.stub, method)(asked)) as call,
            link.transfers.of(call) as moved,
        ):
            async for reply in call:
                moved()
                size = sum(len(frame.payload) for frame in frames_in(reply))
                counter.inc(size)
                served.inc(size)
                yield reply

    def _shard_of(self, request: Request) -> UpstreamShard:
        if isinstance(request, pb.FetchRequest):
            return self._routes.owner(request.session, request.fragment)
        return self._routes.registrar if request.fixed else self._routes.owner(request, request.fragment)

    def _counter_of(self, request: Request) -> Counter:
        if isinstance(request, pb.ReadRequest) and request.fixed:
            return self._metrics.fixed
        return self._metrics.whole if request.whole else self._metrics.updates

    async def end(self) -> None:
        """Cancels all fetches and waits until they have ended."""
        for task in self._bringing:
            task.cancel()
        await asyncio.gather(*self._bringing, return_exceptions=True)


def _again(code: grpc.StatusCode, details: str, mark: tuple[tuple[str, str], ...] = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*mark), details)
