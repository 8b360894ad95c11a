"""Fetches updates and whole fragments for the learners of a region, so that each of them crosses the WAN once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from functools import partial

import grpc
import grpc.aio
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import LinkLost, open_stream
from atoll_wire.connections.frame_transfer import download
from atoll_wire.connections.link import ATOLL_STATUS, is_atoll_status
from atoll_wire.messages.frame_messages import Sent, WireFrame, frames_in

from atoll_server.access.reader_limits import ReaderLimits
from atoll_server.access.refusals import Refused, Status
from atoll_server.front.core_connection import UpstreamShard
from atoll_server.front.fetch_cache import CachedFetch, CacheFullError, CacheKey, CorruptFetchError, FetchCache
from atoll_server.front.metrics import FrontMetrics
from atoll_server.front.routes import Routes
from atoll_server.rpc.calls import ending, wanted_frames

log = structlog.get_logger()

TRIES = 4  # attempts for a whole fragment, since a version may be published between its header and its frames
ASK_S = 20.0  # timeout for a header, in seconds
OF_THE_SESSION = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
}


class RegionFetches:
    """Fetches updates and whole fragments into a cache, and relays those that do not fit.

    limit_bytes: limit on cached frames.
    """

    def __init__(self, routes: Routes, metrics: FrontMetrics, limit_bytes: int) -> None:
        self._routes = routes
        self._metrics = metrics
        self.cache = FetchCache(limit_bytes)
        self._versions = ReaderLimits()
        self._bringing: set[asyncio.Task[None]] = set()

    async def fetch(self, request: pb.FetchRequest) -> AsyncGenerator[Sent, None]:
        """Yields the replies that the core would send. Raises LinkLost, Refused, or a call's AioRpcError."""
        served = self._metrics.learner(request.session.learner, "down")
        if not request.header_only:
            for _ in range(TRIES):
                begun = False
                try:
                    header, item, wanted = await self._item(request)
                    yield pb.FetchReply(header=header)
                    begun = True
                    reader = (request.session.learner, item.place[:4], item.place[4:])
                    with self._versions.read(*reader, ending()):
                        async for message in item.read(wanted):
                            served.inc(len(message))
                            yield message
                    return
                except CorruptFetchError as error:
                    if begun:
                        text = f"fragment {request.fragment} changed during the fetch: fetch it again"
                        raise Refused(Status.UNAVAILABLE, text) from error
                except CacheFullError as error:
                    if begun:
                        why = f"this front has no free memory for fragment {request.fragment}"
                        text = f"{why}: try again later, or raise --cache-mib"
                        raise Refused(Status.RESOURCE_EXHAUSTED, text) from error
                    break
        async for reply in self._relay(request):
            yield reply

    def told(self, shard: UpstreamShard, log: int, session: pb.Session, versions: Iterable[tuple[int, int]]) -> None:
        """Records a shard's message (see `UpstreamShard.told`). If the log changed, drops the shard's items."""
        if not shard.told(log, session, versions):
            self.cache.clear(shard.fragments)
        self._metrics.vouched(session.learner)

    async def _item(self, request: pb.FetchRequest) -> tuple[pb.FetchHeader, CachedFetch, Sequence[int]]:
        """Returns the header for this learner, the item (possibly incomplete), and the indices of the wanted frames."""
        session, header = request.session, None
        shard = self._routes.owner(session, request.fragment)
        fragment = (session.run, session.generation, request.fragment)
        place = CacheKey(*fragment, request.whole, request.version)
        known = shard.sessions.known(session, self._routes.clock.monotonic()) and fragment in shard.counts
        there = self.cache.find(place) is not None or request.version <= shard.newest.get(fragment, 0)
        if request.whole or not known or not there:
            # The core checks the session. For a whole fragment, it sends the version and the learner's last receipts.
            header = await self._header(request)
            shard.counts[fragment] = header.frames
            place = place._replace(version=header.version, crc32c=header.crc32c if request.whole else 0)
        wanted = wanted_frames(request, shard.counts[fragment])
        item = self.cache.find(place) or self.cache.begin(place, shard.counts[fragment])
        if claimed := item.claim(wanted):
            task = asyncio.create_task(self._bring(request, item, claimed))  # continues even if the learner's call ends
            self._bringing.add(task)
            task.add_done_callback(self._bringing.discard)
        begun = await item.begun()
        return header or begun, item, wanted

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

    async def _bring(self, request: pb.FetchRequest, item: CachedFetch, claimed: Sequence[int]) -> None:
        """Fetches frames into an item.

        If the fetch fails, the readers that wait for these frames raise the same error.
        """
        shard = self._routes.owner(request.session, request.fragment)
        asked = pb.FetchRequest()
        asked.CopyFrom(request)
        asked.ClearField("frames")
        counter = self._metrics.whole if request.whole else self._metrics.updates

        def took(header: pb.FetchHeader, frame: WireFrame | pb.Frame) -> None:
            counter.inc(len(frame.payload))
            item.took(header, frame)

        try:
            if not await download(shard.link, asked, claimed, took):
                raise CorruptFetchError
        except (CorruptFetchError, CacheFullError) as error:
            self.cache.drop(item)  # the core now has a different version, or this front has no memory
            item.failed(claimed, type(error))
        except grpc.aio.AioRpcError as error:
            if error.code() in OF_THE_SESSION:  # concerns only this session, so another call fetches instead
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

    async def _relay(self, request: pb.FetchRequest) -> AsyncIterator[Sent]:
        """Yields the core's replies to this request without caching them."""
        served = self._metrics.learner(request.session.learner, "down")
        counter = self._metrics.whole if request.whole else self._metrics.updates
        link = self._routes.owner(request.session, request.fragment).link
        with (
            link.carriers.use() as connection,
            open_stream("Fetch", connection.stub.Fetch(request)) as call,
            link.transfers.of(call) as moved,
        ):
            async for reply in call:
                moved()
                size = sum(len(frame.payload) for frame in frames_in(reply))
                counter.inc(size)
                served.inc(size)
                yield reply

    async def end(self) -> None:
        """Cancels all fetches, and waits until they have ended."""
        for task in self._bringing:
            task.cancel()
        await asyncio.gather(*self._bringing, return_exceptions=True)


def _again(code: grpc.StatusCode, details: str, mark: tuple[tuple[str, str], ...] = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*mark), details)
