"""Published updates and whole fragments on their way in, up to anchors that are ready to be adopted.

Updates are added one at a time and in order, and the result must have the checksum that the core published;
whatever does not fit (a gap, an update that is gone, another checksum) is mended by fetching the fragment whole.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import grpc
import grpc.aio
import structlog
from atoll_wire import codec, memory
from atoll_wire import outer_pb2 as pb
from atoll_wire.blocks import F32
from atoll_wire.checksums import Payload
from atoll_wire.codec import Codec, FrameError
from atoll_wire.frames import WireFrame
from atoll_wire.layout import Fragment
from atoll_wire.links import hung_up
from atoll_wire.streams import download

from atoll.adoption import Fate
from atoll.errors import NONSENSE, LearnerError
from atoll.handover import Handover, Prepared
from atoll.sending import Sender
from atoll.standing import Line, Standing
from atoll.stats import Counters
from atoll.transport import Cure, backoff_s, cure, detail, one_line

log = structlog.get_logger()

MANY = 3  # failures of one fetch in a row: by then somebody should know
MOST_UPDATES = 8  # more than these cost more bytes than the fragment whole


class Fetcher:
    """Brings each fragment up to the newest version heard of."""

    def __init__(
        self,
        standing: Standing,
        handover: Handover,
        counters: Counters,
        stop: Callable[[Exception], None],
        sender: Sender,
    ) -> None:
        self._standing, self._handover, self._counters = standing, handover, counters
        self._stop, self._sender = stop, sender
        self._rng = random.Random()  # noqa: S311 - jitter
        self._at_once = asyncio.Semaphore(2)  # bounds memory: fragments being brought up at a time

    def heard_of(self, line: Line, version: int) -> None:
        """A version exists; begins to fetch if that is news. A lower one is of a core that lost nothing durable."""
        line.target = max(line.target, version)
        self.begin(line)

    def begin(self, line: Line) -> None:
        """Fetches what the line lacks, in a task of its own."""
        if line.behind() and line.fetching is None:
            line.fetching = asyncio.get_running_loop().create_task(self._bring(line))
            line.fetching.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def all_here(self) -> None:
        """Waits for the first anchors. Raises what stopped a fetch. Cancelled, it leaves the fetches to go on."""
        while running := [line.fetching for line in self._standing.lines if line.fetching is not None]:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()

    async def _bring(self, line: Line) -> None:
        attempt = 0
        try:
            while line.behind() and not self._standing.leaving:
                await self._standing.connected.wait()
                session = self._standing.session
                try:
                    async with self._at_once:
                        sound = await self._step(line)
                    if not sound:
                        self._counters.mismatches += 1
                        line.whole = True
                        await asyncio.sleep(backoff_s(attempt, self._rng))
                    attempt = 0 if sound else attempt + 1
                except grpc.aio.AioRpcError as error:
                    await self._failed(line, session, error, attempt)
                    attempt += 1
                except asyncio.CancelledError:
                    if self._standing.leaving or not hung_up():
                        raise
                    attempt += 1
        finally:
            line.fetching = None

    async def _failed(self, line: Line, session: pb.Session, error: grpc.aio.AioRpcError, attempt: int) -> None:
        match cure(error):
            case Cure.FETCH_WHOLE | Cure.GIVE_UP | Cure.DROP_WORK if not line.whole:
                line.whole = True
            case Cure.STOP:
                raise LearnerError(detail(error))
            case Cure.JOIN_AGAIN:
                self._standing.lose(session)
            case _:
                self._counters.last_error = one_line(error)
                if attempt == MANY:
                    log.warning("a fetch fails again and again", fragment=line.fragment, error=one_line(error))
                await asyncio.sleep(backoff_s(attempt, self._rng))

    async def _step(self, line: Line) -> bool:
        """One update, or the fragment whole. False when what came is not what was published."""
        if line.target - line.version > MOST_UPDATES:
            line.whole = True
        whole, fragment = line.whole, self._standing.fragment(line.fragment)
        request = pb.FetchRequest(
            session=self._standing.session, fragment=line.fragment, version=line.version + 1, whole=whole
        )
        expected = pb.CODEC_FLOAT32 if whole else self._standing.settings.codec
        link, setbacks = self._standing.link, line.setbacks
        payloads = list[Payload](b"" for _ in fragment.frames)

        def took(_: pb.FetchHeader, frame: WireFrame | pb.Frame) -> None:
            payloads[frame.index] = frame.payload

        header = await download(link, request, len(fragment.frames), took)
        if header is None or header.codec != expected or (header.version != request.version and not whole):
            return False
        return await self._take_in(line, fragment, header, payloads, setbacks, whole=whole)

    async def _take_in(
        self,
        line: Line,
        fragment: Fragment,
        header: pb.FetchHeader,
        payloads: Sequence[Payload],
        setbacks: int,
        *,
        whole: bool,
    ) -> bool:
        base = None if whole else line.anchor
        anchor, checksum = await asyncio.to_thread(_anchor, base, fragment, Codec(header.codec), payloads)
        size = sum(map(len, payloads))
        if whole:
            self._counters.bytes_whole += size
        else:
            self._counters.bytes_down += size
        if anchor is None or checksum != header.crc32c:
            log.error("anchor does not have the published checksum: fetching it whole", fragment=line.fragment)
            return False
        if line.setbacks != setbacks:
            return True  # meanwhile the core came back without this version
        fate = self._fate(line, header, whole=whole)
        line.anchor, line.version = anchor, header.version
        if line.setbacks != setbacks:
            line.whole = True
        else:
            line.target = max(line.target, header.version)
            if whole:
                line.whole = line.drop = False
        self._handover.offer(Prepared(line.fragment, line.version, anchor, fate))
        return True

    def _fate(self, line: Line, header: pb.FetchHeader, *, whole: bool) -> Fate:
        """What this version means for the contribution in flight; a refusal may be heard of here first."""
        session = self._standing.session
        for receipt in header.receipts:
            flight = line.flight
            if flight is None or (receipt.learner, receipt.incarnation, receipt.seq) != (
                session.learner, session.incarnation, flight.seq
            ):  # fmt: skip
                continue
            if receipt.fate == pb.FATE_MERGED:
                if not flight.messages:
                    raise LearnerError(f"the core merged a contribution that was not sent: {NONSENSE}")
                self._sender.end(line, merged=True)
                return Fate(flight.taken.outstanding.coded, whole and line.drop)
            self._sender.decided(receipt)
        return Fate(drop=whole and line.drop)


def _anchor(
    base: F32 | None, fragment: Fragment, codec_used: Codec, payloads: Sequence[Payload]
) -> tuple[F32 | None, int]:
    """base + update, or the fragment itself, and its checksum; a new array, since the old one is still trained from."""
    anchor, checksum = memory.empty(fragment.length), 0
    try:
        for span, payload in zip(fragment.frames, payloads, strict=True):
            if base is None:
                codec.decode_frame(payload, span, codec_used, anchor)
            else:
                codec.content_advance(codec.decompress(payload, span, codec_used), span, codec_used, base, anchor)
            checksum = codec.vector_crc32c(anchor[span.place], checksum)
    except FrameError:
        return None, 0
    return anchor, checksum
