"""Fuzzed: every call of a core, on a real core in this process; its requests are changed anywhere, at any message."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import safetensors.numpy
from atoll.joining import PROTOCOL, tensor_message
from atoll_server.core import Core
from atoll_server.operators import OperatorService
from atoll_server.service import OuterService
from atoll_server.settings import CoreSettings, Limits
from atoll_wire import codec
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import Codec
from google.protobuf.message import Message

from tests.fuzz.decoders import SPECS
from tests.fuzz.mutate import mutate_bytes, mutate_message, sometimes

LONGEST_S = 20.0  # of a call: a hang
DECLARED = {
    grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE,
}  # fmt: skip
LIMITS = Limits(learners=32, parameters=1 << 20, model_bytes=1 << 24, spool_bytes=1 << 26, happenings=64, tensors=64)


class Aborted(Exception):
    """By `context.abort`."""


class Context:
    """What a servicer sees of a call."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert code in DECLARED, f"{code}: {details}"
        assert "\n" not in details, details
        assert len(details) < 2000, details[:300]
        raise Aborted


class Calls:
    """One core with first parameters, and a learner that joined; `initialised` False: a core that waits for them."""

    def __init__(self, *, initialised: bool = True) -> None:
        self._loop = asyncio.new_event_loop()
        self._place = tempfile.TemporaryDirectory()
        self._sequence = itertools.count(1)
        self._loop.run_until_complete(self._begin(initialised))

    async def _begin(self, initialised: bool) -> None:
        settings = CoreSettings.of(listen=("127.0.0.1:1",), directory=Path(self._place.name) / "run", limits=LIMITS)
        self._core = Core(settings, {"fragments": 2})
        await self._core.start()
        self._outer, self._operator = OuterService(self._core), OperatorService(self._core)
        self._join = pb.JoinRequest(
            protocol=PROTOCOL, learner="a", region="eu", nonce=7, tensors=[tensor_message(spec) for spec in SPECS]
        )
        reply = await self._outer.Join(self._join, Context())
        self._session = pb.Session(
            run=reply.run, learner="a", incarnation=reply.incarnation, generation=reply.generation, token=reply.token
        )
        file = safetensors.numpy.save({spec.name: np.ones(spec.shape, np.float32) for spec in SPECS})
        import hashlib

        header = pb.InitialiseHeader(
            session=self._session, size_bytes=len(file), sha256=hashlib.sha256(file).digest()
        )  # fmt: skip
        chunks = [file[at : at + 5000] for at in range(0, len(file), 5000)]
        self._first = [pb.InitialiseRequest(header=header), *(pb.InitialiseRequest(chunk=chunk) for chunk in chunks)]
        if initialised:
            await self._outer.Initialise(_stream(self._first), Context())

    def one(self, rng: random.Random) -> None:
        """One call."""
        self._loop.run_until_complete(asyncio.wait_for(self._call(rng), LONGEST_S))
        assert not self._core.failed.done(), self._core.failed.exception()

    async def _call(self, rng: random.Random) -> None:
        calls = (
            self._joined, self._initialise, self._push, self._push, self._push, self._fetch, self._report, self._follow,
            self._leave, self._operate,
        )  # fmt: skip
        try:
            await rng.choice(calls)(rng)
        except Aborted:
            return
        finally:
            if self._core.engine is not None and rng.random() < 0.01:
                self._core.engine.uploads.expire(1e18)
            if rng.random() < 0.05:  # a name that was taken over, evicted, or left speaks again
                await self._again()

    async def _again(self) -> None:
        entry = self._core.roster.entries["a"]
        entry.evicted, entry.streams, entry.token, entry.account.left_at = "", 0, self._session.token, None
        entry.incarnation, entry.nonces = self._session.incarnation, [7]

    async def _joined(self, rng: random.Random) -> None:
        await self._outer.Join(mutate_message(rng, self._join), Context())

    async def _initialise(self, rng: random.Random) -> None:
        await self._outer.Initialise(_stream(self._changed(rng, self._first)), Context())

    async def _push(self, rng: random.Random) -> None:
        engine = self._core.engine
        if engine is None:
            await _all(
                self._outer.Push(_stream([pb.PushRequest(header=pb.PushHeader(session=self._session))]), Context())
            )
            return
        fragment = engine.layout.fragments[rng.randrange(len(engine.layout.fragments))]
        vector = (np.random.default_rng(rng.getrandbits(32)).standard_normal(fragment.length) * 1e-3).astype(np.float32)
        payloads = [codec.encode_frame(vector, span, Codec.INT4) for span in fragment.frames]
        if rng.random() < 0.4:
            payloads = [mutate_bytes(rng, payload) for payload in payloads]
        table = [(len(p), codec.crc32c(p)) for p in payloads]
        header = pb.PushHeader(
            session=self._session, fragment=fragment.index, seq=next(self._sequence), cycle=0,
            base_version=engine.states[fragment.index].version, tokens=10, steps=1, codec=pb.CODEC_INT4,
            frames=len(payloads), size_bytes=sum(map(len, payloads)), digest=codec.frames_digest(table),
        )  # fmt: skip
        frames = [
            pb.PushRequest(frame=pb.Frame(index=n, crc32c=table[n][1], payload=p)) for n, p in enumerate(payloads)
        ]
        messages = [pb.PushRequest(header=header), *frames]
        replies = self._outer.Push(_stream(self._changed(rng, messages)), Context())
        await _all(replies, patience_s=0.2)  # a stream that ends early waits for others to bring the rest

    async def _fetch(self, rng: random.Random) -> None:
        request = pb.FetchRequest(session=self._session, fragment=rng.randrange(2), version=1, whole=rng.random() < 0.5)
        await _all(self._outer.Fetch(mutate_message(rng, request), Context()))

    async def _report(self, rng: random.Random) -> None:
        progress = pb.Progress(
            session=self._session, steps=5, tokens=50, loss=1.0, step_time_s=0.1, stepping_s=1.0,
            declined=[pb.Declined(fragment=1, cycle=1, reason="r")], adopted=[pb.Adopted(fragment=0, version=1)],
        )  # fmt: skip
        await self._outer.Report(_stream(self._changed(rng, [progress, progress])), Context())

    async def _follow(self, rng: random.Random) -> None:
        request = pb.FollowRequest(session=self._session, epoch=self._core.epoch, sequence=0)
        await _all(self._outer.Follow(mutate_message(rng, request), Context()), patience_s=0.005)

    async def _leave(self, rng: random.Random) -> None:
        await self._outer.Leave(
            mutate_message(rng, pb.LeaveRequest(session=self._session, last=pb.Progress(steps=6))), Context()
        )

    async def _operate(self, rng: random.Random) -> None:
        receipts = pb.ListReceiptsRequest(learner="a", fate=pb.FATE_MERGED, limit=3, before=9)
        match rng.randrange(4):
            case 0:
                await self._operator.ListReceipts(mutate_message(rng, receipts), Context())
            case 1:
                await self._operator.Evict(mutate_message(rng, pb.EvictRequest(learner="b", reason="r")), Context())
            case 2:
                await self._operator.Status(pb.StatusRequest(), Context())
            case _:
                request = pb.ExportCheckpointRequest(initial=rng.random() < 0.5)
                await _all(self._operator.ExportCheckpoint(request, Context()))

    def _changed(self, rng: random.Random, messages: Sequence[Message]) -> list[Message]:
        """The messages of a stream: some changed, dropped, repeated, or out of order."""
        stream = [sometimes(rng, 0.3, mutate_message, message) for message in messages]
        match rng.randrange(8):
            case 0:
                del stream[rng.randrange(len(stream))]
            case 1:
                stream.insert(rng.randrange(len(stream) + 1), rng.choice(stream))
            case 2:
                rng.shuffle(stream)
        return stream


async def _stream(messages: Sequence[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


async def _all(replies: AsyncIterator[Any], patience_s: float | None = None) -> None:
    """Takes in what comes, for so long at most between two replies."""
    try:
        while True:
            await asyncio.wait_for(anext(replies), patience_s)
    except (StopAsyncIteration, TimeoutError):
        return
    finally:
        await replies.aclose()  # type: ignore[attr-defined]
