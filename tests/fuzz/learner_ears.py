"""Fuzzed: what a learner's agent hears from a core that may say anything."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
from atoll.adoption import Outstanding
from atoll.errors import LearnerError
from atoll.handover import Handover, Taken
from atoll.joining import FirstModel, Identity
from atoll.presence import Presence
from atoll.standing import Flight, Line
from atoll.stats import Counters
from atoll_wire import codec
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import Codec
from atoll_wire.layout import plan

from tests.fuzz.decoders import SPECS
from tests.fuzz.mutate import mutate_message, sometimes

LONGEST_S = 20.0


class Hostile:
    """A link whose core says what `says` holds. Stands for both of its connections."""

    address = "hostile"

    def __init__(self) -> None:
        self.control = self.data = self
        self.says: list[Any] = []

    async def Join(self, *_: Any, **__: Any) -> Any:
        return self.says[0]

    def Follow(self, _: Any) -> AsyncIterator[Any]:
        return self._stream()

    def Fetch(self, _: Any) -> AsyncIterator[Any]:
        return self._stream()

    def Push(self) -> Hostile:
        return self

    async def write(self, _: Any) -> None:
        return

    async def read(self) -> Any:
        return self.says.pop(0) if self.says else grpc.aio.EOF

    def cancel(self) -> None:
        return

    async def close(self) -> None:
        return

    async def _stream(self) -> AsyncIterator[Any]:
        for message in self.says:
            yield message


class Ears:
    """An agent that has joined and has a contribution in flight, anew for every input."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._layout = plan(SPECS, 2)
        self._vectors = [np.ones(f.length, np.float32) for f in self._layout.fragments]
        self._joined = pb.JoinReply(
            state=pb.JoinReply.STATE_READY, run="r", generation=1, epoch=1, incarnation=1, token=b"t",
            settings=pb.RunSettings(inner_steps=4, fragments=2, overlap_steps=2.0, codec=pb.CODEC_INT4),
            fingerprint=self._layout.fingerprint, versions=[1, 1], run_tokens=5, retry_s=0.0,
        )  # fmt: skip
        self._receipt = pb.Receipt(
            learner="a", incarnation=1, fragment=0, seq=1, fate=pb.FATE_MERGED, version=2, weight=0.5
        )
        self._coded = [
            [codec.encode_frame(v, span, Codec.INT4) for span in f.frames]
            for f, v in zip(self._layout.fragments, self._vectors, strict=True)
        ]

    def one(self, rng: random.Random) -> None:
        """One answer to one of the agent's calls."""
        try:
            self._loop.run_until_complete(asyncio.wait_for(self._hear(rng), LONGEST_S))
        except LearnerError as error:
            assert "\n" not in str(error)

    async def _hear(self, rng: random.Random) -> None:
        link, stopped = Hostile(), list[Exception]()
        identity, model = Identity("a", "", ["hostile"], 1.0), FirstModel(SPECS, b"", lambda _: None)
        presence = Presence(identity, model, Handover(), Counters(), lambda _: None, stopped.append, lambda _: link)  # type: ignore[arg-type,return-value]
        standing = presence.standing
        standing.layout, standing.settings = self._layout, self._joined.settings
        standing.session = pb.Session(run="r", learner="a", incarnation=1, generation=1, token=b"t")
        standing.lines = [
            Line(f.index, self._vectors[f.index].copy(), 1, 1, whole=False) for f in self._layout.fragments
        ]
        standing.connected.set()
        for line in standing.lines:
            line.flight, line.seq = Flight(self._taken(line.fragment), 1, tuple(self._coded[line.fragment]), True), 1
            presence._counters.pending += 1
            presence._handover.submitted()
        try:
            await rng.choice((self._join, self._follow, self._fetch, self._push))(rng, presence, link)
        finally:
            fetching = [line.fetching for line in standing.lines if line.fetching is not None]
            asking = [*presence._sender._tasks, *fetching]
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        for error in stopped:
            if not isinstance(error, LearnerError):
                raise error

    def _taken(self, fragment: int) -> Taken:
        return Taken(fragment, 1, Outstanding(self._vectors[fragment], 10, 1, 1))

    async def _join(self, rng: random.Random, presence: Presence, link: Hostile) -> None:
        reply = mutate_message(rng, self._joined)
        if reply.state in {pb.JoinReply.STATE_INITIALISE, pb.JoinReply.STATE_WAIT, pb.JoinReply.STATE_CONFIRM, 0}:
            return  # it asks again, at its leisure: nothing to decode
        link.says = [reply]
        await presence._join()

    async def _follow(self, rng: random.Random, presence: Presence, link: Hostile) -> None:
        happenings = [
            pb.Happening(epoch=1, sequence=1, current=pb.Current(versions=[2, 2], open=[pb.RoundOpened(cycle=3)])),
            pb.Happening(epoch=1, sequence=2, opened=pb.RoundOpened(fragment=0, cycle=2)),
            pb.Happening(epoch=1, sequence=3, published=pb.UpdatePublished(fragment=1, version=2, size_bytes=9)),
            pb.Happening(epoch=1, sequence=4, receipt=self._receipt),
            pb.Happening(epoch=1, sequence=5),
            pb.Happening(epoch=1, sequence=6, shutting_down=pb.ShuttingDown()),
        ]  # fmt: skip
        rng.shuffle(happenings)
        link.says = [sometimes(rng, 0.4, mutate_message, happening) for happening in happenings]
        await presence._follow()

    async def _fetch(self, rng: random.Random, presence: Presence, link: Hostile) -> None:
        line = rng.choice(presence.standing.lines)
        fragment, line.whole, line.target = self._layout.fragments[line.fragment], rng.random() < 0.5, 2
        kind = Codec.FLOAT32 if line.whole else Codec.INT4
        vector = self._vectors[line.fragment]
        payloads = [codec.encode_frame(vector, span, kind) for span in fragment.frames]
        after = vector.copy()
        if not line.whole:
            for span, payload in zip(fragment.frames, payloads, strict=True):
                codec.decode_add(payload, span, kind, np.ones(len(span.segments), np.float32), after)
        receipt = pb.Receipt()
        receipt.CopyFrom(self._receipt)
        receipt.fragment = line.fragment
        header = pb.FetchHeader(
            fragment=line.fragment, version=2, codec=int(kind), frames=len(payloads), size_bytes=1,
            crc32c=codec.vector_crc32c(after), receipts=[receipt],
        )  # fmt: skip
        frames = [pb.Frame(index=n, crc32c=codec.crc32c(p), payload=p) for n, p in enumerate(payloads)]
        says = [pb.FetchReply(header=header), *(pb.FetchReply(frame=frame) for frame in frames)]
        link.says = [sometimes(rng, 0.4, mutate_message, message) for message in says]
        before = line.anchor
        if not await presence._fetcher._step(line):
            assert line.anchor is before, "what is not sound is not taken over"

    async def _push(self, rng: random.Random, presence: Presence, link: Hostile) -> None:
        line = presence.standing.lines[0]
        replies = [pb.PushReply(have=pb.Have(frames=[0])), pb.PushReply(receipt=self._receipt)]
        link.says = [sometimes(rng, 0.6, mutate_message, reply) for reply in replies]
        assert line.flight is not None, "it was just made"
        await presence._sender._push(line, line.flight)
