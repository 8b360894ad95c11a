"""Fuzzes every call of a real core in this process, with changes anywhere in the messages.

At the end of a row, the core is stopped and started again. No accepted data may prevent its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import numpy as np
import safetensors.numpy
from atoll_server.operators.run_checkpoints import RunCheckpoints
from atoll_server.operators.shard_calls import ShardCalls, dial_shards
from atoll_server.processes.core import Core
from atoll_server.service.learner_service import OuterService
from atoll_server.service.operator_service import OperatorService
from atoll_server.settings import CoreSettings
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.contract import PROTOCOL, tensor_message
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.messages.frame_messages import FRAMES_PER_MESSAGE
from google.protobuf.message import Message

from tests.fuzz.decoders import LIMITS, SPECS
from tests.fuzz.mutate import TEXT, mutate_bytes, mutate_message, sometimes
from tests.fuzz.payloads import unsound
from tests.fuzz.watch import in_room, place

LONGEST_S = 20.0  # limit on a call's duration
MAX_BYTES = 8 << 20  # limit per call; a request has at most 100 kB, and the core also uses memory in the background
DECLARED = {
    grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE,
}  # fmt: skip


def operator_service(core: Core) -> OperatorService:
    calls = ShardCalls(core.run.attached, dial_shards(core.settings.security))
    return OperatorService(core, calls, RunCheckpoints(core, calls))


class Aborted(Exception):
    """Raised by `context.abort`."""


class Context:
    """A servicer's view of a call."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return "fuzz"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: grpc.StatusCode, details: str, _: object = ()) -> None:
        assert code in DECLARED, f"{code}: {details}"
        assert "\n" not in details, details
        assert len(details) < 2000, details[:300]
        raise Aborted


class Calls:
    """One core with initial parameters, and a joined learner.

    initialised: False for a core that waits for its parameters.
    """

    def __init__(self, *, initialised: bool = True) -> None:
        self.row = 250 if initialised else 50  # so short because a core without parameters soon receives some
        self._loop = asyncio.new_event_loop()
        self._place = place()
        self._settings = CoreSettings.of(
            listen=("127.0.0.1:1",), directory=Path(self._place.name) / "run", limits=LIMITS
        )  # fmt: skip
        self._sequence = itertools.count(1)
        self._names = contextlib.ExitStack()  # fixes the core's random numbers, so that rows can be replayed
        drawn = random.Random(0)
        self._names.enter_context(mock.patch("secrets.token_bytes", drawn.randbytes))
        self._names.enter_context(mock.patch("uuid.uuid4", partial(_uuid, drawn)))
        self._loop.run_until_complete(self._begin(initialised))

    async def _begin(self, initialised: bool) -> None:
        self._core = Core(self._settings, {"fragments": 2})
        await self._core.start()
        self._outer, self._operator = OuterService(self._core), operator_service(self._core)
        self._join = pb.JoinRequest(
            protocol=PROTOCOL, learner="a", region="eu", nonce=7, tensors=[tensor_message(spec) for spec in SPECS]
        )
        reply = await self._outer.Join(self._join, Context())
        self._session = pb.Session(
            run=reply.run, learner="a", incarnation=reply.incarnation, generation=reply.generation, token=reply.token
        )
        self._number = self._core.run.registry.entries["a"].session
        self._file = safetensors.numpy.save({spec.name: np.ones(spec.shape, np.float32) for spec in SPECS})
        if initialised:
            await self._outer.Initialise(_stream(self._upload(self._file)), Context())

    def one(self, rng: random.Random) -> bool:
        """Makes one call, which is answered or refused."""
        answered = self._loop.run_until_complete(asyncio.wait_for(self._call(rng), LONGEST_S))
        assert not self._core.failed.done(), self._core.failed.exception()
        return answered

    def close(self) -> None:
        """Checks that the core starts again with its data."""
        try:
            self._loop.run_until_complete(asyncio.wait_for(self._restart(), LONGEST_S))
        finally:
            self._names.close()
            self._place.cleanup()
        self._loop.close()

    async def _restart(self) -> None:
        await self._core.stop()
        again = Core(self._settings, {})
        await again.start()
        assert again.run.versions() == self._core.run.versions()
        assert again.run.registry.entries.keys() == self._core.run.registry.entries.keys()
        await operator_service(again).Status(pb.StatusRequest(), Context())
        await again.stop()

    async def _call(self, rng: random.Random) -> bool:
        calls = (
            self._joined, self._initialise, self._push, self._push, self._push, self._fetch, self._report, self._follow,
            self._leave, self._operate, self._lease_units,
        )  # fmt: skip
        try:
            call = rng.choice(calls)(rng)
            with in_room(MAX_BYTES):
                await call
        except Aborted:
            return False
        else:
            return True
        finally:
            shard = self._core.run.shard
            if shard is not None and rng.random() < 0.01:
                shard.uploads.expire(1e18)
            if rng.random() < 0.4:  # a fenced, evicted or departed process calls again
                await self._again()

    async def _again(self) -> None:
        entry = self._core.run.registry.entries["a"]
        entry.evicted, entry.streams, entry.session, entry.account.left_at = "", {}, self._number, None
        entry.incarnation, entry.nonces = self._session.incarnation, [7]

    def _joined(self, rng: random.Random) -> Awaitable[Any]:
        request = mutate_message(rng, self._join)
        if rng.random() < 0.3:  # a different name, which the core must be able to store
            request.learner, request.nonce = rng.choice(("b", "c", *TEXT)), rng.getrandbits(64)
        return self._outer.Join(request, Context())

    def _initialise(self, rng: random.Random) -> Awaitable[Any]:
        file = mutate_bytes(rng, self._file) if rng.random() < 0.5 else self._file
        return self._outer.Initialise(_stream(self._changed(rng, self._upload(file))), Context())

    def _upload(self, file: bytes) -> list[pb.InitialiseRequest]:
        """Returns the messages for a file with the correct checksum."""
        digest = hashlib.sha256(file).digest()
        header = pb.InitialiseHeader(session=self._session, size_bytes=len(file), sha256=digest)
        chunks = [file[at : at + 5000] for at in range(0, len(file), 5000)]
        return [pb.InitialiseRequest(header=header), *(pb.InitialiseRequest(chunk=chunk) for chunk in chunks)]

    def _push(self, rng: random.Random) -> Awaitable[Any]:
        shard = self._core.run.shard
        if shard is None:
            nothing = pb.PushRequest(header=pb.PushHeader(session=self._session))
            return _all(self._outer.Push(_stream([nothing]), Context()))
        fragment = shard.layout.fragments[rng.randrange(len(shard.layout.fragments))]
        vector = (np.random.default_rng(rng.getrandbits(32)).standard_normal(fragment.length) * 1e-3).astype(np.float32)
        form = {"compressed": rng.random() < 0.5}
        payloads = [frame_codec.encode_frame(vector, span, Codec.INT4, **form) for span in fragment.frames]
        if rng.random() < 0.4:
            spans = fragment.frames
            payloads = [unsound(rng, p, span, Codec.INT4) for p, span in zip(payloads, spans, strict=True)]
        table = [(len(p), crc32c(p)) for p in payloads]
        header = pb.PushHeader(
            session=self._session, fragment=fragment.index, seq=next(self._sequence), cycle=0,
            base_version=shard.fragments[fragment.index].version, tokens=10, steps=1, codec=pb.CODEC_INT4,
            frames=len(payloads), size_bytes=sum(map(len, payloads)), digest=frame_codec.frames_digest(table),
        )  # fmt: skip
        frames = [pb.Frame(index=n, crc32c=table[n][1], payload=p) for n, p in enumerate(payloads)]
        together = rng.randint(1, FRAMES_PER_MESSAGE + 1)
        starts = range(0, len(frames), together)
        messages = [pb.PushRequest(frames=frames[start : start + together]) for start in starts]
        messages.insert(0, pb.PushRequest(header=header))
        replies = self._outer.Push(_stream(self._changed(rng, messages)), Context())
        return _all(replies, max_wait_s=0.2)  # a stream that ends early waits for other streams' frames

    def _fetch(self, rng: random.Random) -> Awaitable[Any]:
        request = pb.FetchRequest(session=self._session, fragment=rng.randrange(2), version=1, whole=rng.random() < 0.5)
        return _all(self._outer.Fetch(mutate_message(rng, request), Context()))

    def _report(self, rng: random.Random) -> Awaitable[Any]:
        progress = pb.Progress(
            session=self._session, steps=5, tokens=50, loss=1.0, step_time_s=0.1, stepping_s=1.0,
            declined=[pb.Declined(fragment=1, cycle=1, reason="r")], adopted=[pb.Adopted(fragment=0, version=1)],
        )  # fmt: skip
        return self._outer.Report(_stream(self._changed(rng, [progress, progress])), Context())

    def _follow(self, rng: random.Random) -> Awaitable[Any]:
        shard = self._core.run.shard
        log = 0 if shard is None else shard.follower_log.number
        request = pb.FollowRequest(session=self._session, log=log, sequence=0)
        return _all(self._outer.Follow(mutate_message(rng, request), Context()), max_wait_s=0.005)

    def _lease_units(self, rng: random.Random) -> Awaitable[Any]:
        dataset = pb.DatasetDeclaration(name="d", units=9, tokens=2, seed=1, epochs=2, fingerprint=b"f")
        request = pb.LeaseUnitsRequest(session=self._session, dataset=dataset, wanted=3)
        return self._outer.LeaseUnits(mutate_message(rng, request), Context())

    def _leave(self, rng: random.Random) -> Awaitable[Any]:
        return self._outer.Leave(
            mutate_message(rng, pb.LeaveRequest(session=self._session, last=pb.Progress(steps=6))), Context()
        )

    def _operate(self, rng: random.Random) -> Awaitable[Any]:
        receipts = pb.ListReceiptsRequest(learner="a", fate=pb.FATE_MERGED, limit=3, before="0:9")
        match rng.randrange(4):
            case 0:
                return self._operator.ListReceipts(mutate_message(rng, receipts), Context())
            case 1:
                return self._operator.Evict(mutate_message(rng, pb.EvictRequest(learner="b", reason="r")), Context())
            case 2:
                return self._operator.Status(pb.StatusRequest(), Context())
            case _:
                request = pb.ExportCheckpointRequest(initial=rng.random() < 0.5)
                return _all(self._operator.ExportCheckpoint(request, Context()))

    def _changed(self, rng: random.Random, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages of a stream: some changed, dropped, repeated, or out of order."""
        stream = [sometimes(rng, 0.3, mutate_message, message) for message in messages]
        match rng.randrange(8):
            case 0:
                del stream[rng.randrange(len(stream))]
            case 1:
                stream.insert(rng.randrange(len(stream) + 1), rng.choice(stream))
            case 2:
                rng.shuffle(stream)
        return stream


def _uuid(drawn: random.Random) -> uuid.UUID:
    return uuid.UUID(bytes=drawn.randbytes(16))


async def _stream(messages: Sequence[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


async def _all(replies: AsyncIterator[Any], max_wait_s: float | None = None) -> None:
    """Reads all replies, with a limit on the wait between two replies."""
    try:
        while True:
            await asyncio.wait_for(anext(replies), max_wait_s)
    except (StopAsyncIteration, TimeoutError):
        return
    finally:
        await replies.aclose()  # type: ignore[attr-defined]
