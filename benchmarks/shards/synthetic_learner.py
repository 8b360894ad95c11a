"""A learner without a model: it sends random work, and holds one fragment at a time.

It speaks the wire protocol as the real agent does (Join, Follow, Report, Push, Fetch), over one connection per shard.
The anchors of all fragments would take the memory of the whole model. The learner therefore checks the frames of every
update, and keeps only each fragment's version.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any

import grpc.aio
import numpy as np
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.connections.calls import open_stream, unary_reply
from atoll_wire.connections.link import FIXED_WINDOW_OPTIONS, OPTIONS
from atoll_wire.contract import PROTOCOL, tensor_message
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import Layout, TensorSpec, plan
from atoll_wire.messages import frame_messages
from atoll_wire.messages.frame_messages import FrameStub
from atoll_wire.security.transport import LOCAL

TOKENS_A_STEP = 64
SCALE = 1e-3  # standard deviation of the sent values
REPORT_S = 0.25


class SyntheticLearner:
    """One learner. step_s: seconds per pretended inner step. checked_bytes: payload bytes with a correct checksum."""

    def __init__(self, name: str, address: str, tensors: Sequence[TensorSpec], step_s: float) -> None:
        self.name = name
        self.step_s = step_s
        self.checked_bytes = self.sent_bytes = 0
        self.versions: dict[int, int] = {}
        self._address = address
        self._tensors = tensors
        self._session = pb.Session()
        self._layout: Layout
        self._settings = pb.RunSettings()
        self._steps_at: dict[int, int] = {}  # by fragment: steps at its last contribution
        self._seq: dict[int, int] = {}
        self._fragment = asyncio.Semaphore(1)  # one fragment in memory at a time
        self._rng = np.random.default_rng(sum(name.encode()))
        self._began = 0.0
        self._tasks = set[asyncio.Task[None]]()
        self.error: BaseException | None = None  # the first error of a contribution or an adoption

    @property
    def steps(self) -> int:
        """The number of pretended inner steps so far."""
        return int((asyncio.get_running_loop().time() - self._began) / self.step_s)

    async def live(self) -> None:
        """Joins, and takes part until cancelled."""
        async with contextlib.AsyncExitStack() as stack:
            stub = FrameStub(await stack.enter_async_context(dialled(self._address)))
            reply = await self._join(stub)
            self._layout = plan(self._tensors, reply.settings.fragments)
            assert self._layout.fingerprint == reply.fingerprint
            self._settings, self._began = reply.settings, asyncio.get_running_loop().time()
            work = []
            for number, place in enumerate(reply.shards):
                there = stub
                if place.address:
                    there = FrameStub(await stack.enter_async_context(dialled(place.address)))
                work.append(self._stay(there, number))
            await asyncio.gather(*work)

    async def headers(self) -> dict[int, tuple[int, int]]:
        """Returns the version and the checksum of each fragment, as its shard computes them."""
        found = {}
        async with contextlib.AsyncExitStack() as stack:
            stub = FrameStub(await stack.enter_async_context(dialled(self._address)))
            reply = await self._join(stub)
            for place in reply.shards:
                there = stub
                if place.address:
                    there = FrameStub(await stack.enter_async_context(dialled(place.address)))
                for fragment in place.fragments:
                    request = pb.FetchRequest(session=self._session, fragment=fragment, whole=True, header_only=True)
                    with open_stream("Fetch", there.Fetch(request, wait_for_ready=True)) as call:
                        async for told in call:
                            assert isinstance(told, pb.FetchReply)
                            found[fragment] = (told.header.version, told.header.crc32c)
        return found

    async def _join(self, stub: Any) -> pb.JoinReply:  # noqa: ANN401
        nonce, proof = secrets.randbits(63) | 1, b""
        while True:
            request = pb.JoinRequest(
                protocol=PROTOCOL,
                learner=self.name,
                nonce=nonce,
                tensors=[tensor_message(tensor) for tensor in self._tensors],
                proof=proof,
                frozen_digest=hashlib.sha256().digest(),
            )
            try:
                reply: pb.JoinReply = await unary_reply(stub.Join(request, timeout=600.0))
            except grpc.aio.AioRpcError as error:
                if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}:
                    raise  # learners at one address share a quota of joins
                await asyncio.sleep(1.0)
                continue
            if reply.state == pb.JoinReply.STATE_READY:
                self._session = pb.Session(
                    run=reply.run,
                    learner=self.name,
                    incarnation=reply.incarnation,
                    generation=reply.generation,
                    token=reply.token,
                )
                return reply
            proof = reply.token
            await asyncio.sleep(0.5)

    async def _stay(self, stub: Any, shard: int) -> None:  # noqa: ANN401
        """Follows a shard and reports to it. Tries again while the shard does not serve the run yet."""
        while True:
            try:
                await asyncio.gather(self._follow(stub, shard), self._report(stub, shard))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.5)

    async def _follow(self, stub: Any, shard: int) -> None:  # noqa: ANN401
        with open_stream("Follow", stub.Follow(pb.FollowRequest(session=self._session, shard=shard))) as call:
            async for told in call:
                match told.WhichOneof("what"):
                    case "current":
                        self.versions.update(told.current.versions)
                        for opened in told.current.open:
                            self._spawn(self._contribute(stub, opened))
                    case "opened":
                        self._spawn(self._contribute(stub, told.opened))
                    case "published":
                        self._spawn(self._adopt(stub, told.published))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self.error is None:
            self.error = error

    async def _report(self, stub: Any, shard: int) -> None:  # noqa: ANN401
        with open_stream("Report", stub.Report()) as call:
            while True:
                steps = self.steps
                seen = pb.Progress(
                    steps=steps,
                    tokens=steps * TOKENS_A_STEP,
                    step_time_s=self.step_s,
                    stepping_s=steps * self.step_s,
                    shard=shard,
                )
                seen.session.CopyFrom(self._session)
                await call.write(seen)
                await asyncio.sleep(REPORT_S)

    async def _contribute(self, stub: Any, opened: pb.RoundOpened) -> None:  # noqa: ANN401
        async with self._fragment:
            index, fragment = opened.fragment, self._layout.fragments[opened.fragment]
            codec = Codec(self._settings.codec)
            messages, table = await asyncio.to_thread(self._frames, index, codec)
            self._seq[index] = self._seq.get(index, 0) + 1
            steps = max(1, self.steps - self._steps_at.get(index, 0))
            self._steps_at[index] = self.steps
            header = pb.PushHeader(
                session=self._session,
                fragment=index,
                seq=self._seq[index],
                cycle=opened.cycle,
                base_version=self.versions.get(index, 0),
                tokens=steps * TOKENS_A_STEP,
                steps=steps,
                codec=self._settings.codec,
                frames=len(fragment.frames),
                size_bytes=sum(length for length, _ in table),
                digest=frame_codec.frames_digest(table),
            )
            with open_stream("Push", stub.Push()) as call:
                await call.write(pb.PushRequest(header=header))
                for message in messages:
                    await call.write(message)
                await call.done_writing()
                async for reply in call:
                    if reply.HasField("receipt"):
                        assert reply.receipt.fate == pb.FATE_PENDING, reply.receipt
            self.sent_bytes += header.size_bytes

    def _frames(self, index: int, codec: Codec) -> tuple[list[bytes], tuple[tuple[int, int], ...]]:
        """Returns random frames of a fragment as messages, and each payload's length and CRC-32C."""
        messages, table = list[bytes](), list[tuple[int, int]]()
        for span in self._layout.fragments[index].frames:
            values = self._rng.standard_normal(span.length, np.float32) * np.float32(SCALE)
            payload = frame_codec.compress(frame_codec.quantise_frame(values, span, codec))
            table.append((len(payload), crc32c(payload)))
            messages.append(frame_messages.encode(span.index, table[-1][1], payload))
        return messages, tuple(table)

    async def _adopt(self, stub: Any, published: pb.UpdatePublished) -> None:  # noqa: ANN401
        """Fetches an update, and checks its frames and its size."""
        async with self._fragment:
            request = pb.FetchRequest(session=self._session, fragment=published.fragment, version=published.version)
            seen, size, expected = 0, 0, -1
            fragment = self._layout.fragments[published.fragment]
            with open_stream("Fetch", stub.Fetch(request)) as call:
                async for reply in call:
                    if isinstance(reply, pb.FetchReply) and reply.HasField("header"):
                        expected = reply.header.size_bytes  # of the form that this link gets, compressed or not
                        continue
                    for frame in frame_messages.frames_in(reply):
                        assert crc32c(frame.payload) == frame.crc32c
                        codec = Codec(self._settings.codec)
                        frame_codec.check_frame(frame.payload, fragment.frames[frame.index], codec)
                        seen, size = seen + 1, size + len(frame.payload)
            assert (seen, size) == (len(fragment.frames), expected)
            self.checked_bytes += size
            self.versions[published.fragment] = published.version


@contextlib.asynccontextmanager
async def dialled(address: str) -> Any:  # noqa: ANN401
    async with LOCAL.dial(address, [*OPTIONS, *FIXED_WINDOW_OPTIONS]) as channel:
        yield channel
