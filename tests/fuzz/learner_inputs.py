"""Fuzzes a learner's agent with messages that a core may send."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import grpc.aio
import numpy as np
from atoll.agent import sending
from atoll.agent.core_view import FragmentTrack, InFlight, ShardView
from atoll.agent.join_request import Identity, ModelDescription
from atoll.agent.run_session import RunSession
from atoll.agent.shard_session import ShardSession
from atoll.errors import LearnerError
from atoll.fragments.adoption import Track
from atoll.fragments.exchange import Submission, ThreadExchange
from atoll.fragments.segments import FragmentShape
from atoll.stats import Counters
from atoll.transfers.call_errors import remedy
from atoll.transfers.partial_fetch import PartialFetch, UnsoundError
from atoll.transfers.retry_loop import Failure
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.connections.link_speed import LinkSpeed
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import plan
from atoll_wire.messages.frame_messages import FRAMES_PER_MESSAGE
from atoll_wire.process.clock import SYSTEM

from tests.fuzz.decoders import SPECS
from tests.fuzz.hostile import Hostile, status
from tests.fuzz.mutate import mutate_message, sometimes
from tests.fuzz.payloads import unsound
from tests.fuzz.watch import in_room

LONGEST_S = 20.0
MAX_BYTES = 1 << 21  # limit on memory per answer; a fragment has 7 kB
PATIENT = 3  # most consecutive Joins without a pause
_sleep = asyncio.sleep


class Ears:
    """A joined agent with contributions in flight, created again for every input."""

    row = 1

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._layout = plan(SPECS, 2)
        self._vectors = [np.ones(f.length, np.float32) for f in self._layout.fragments]
        self._joined = pb.JoinReply(
            state=pb.JoinReply.STATE_READY, run="r", generation=1, epoch=1, incarnation=1, token=b"t",
            settings=pb.RunSettings(inner_steps=4, fragments=2, overlap_steps=2.0, codec=pb.CODEC_INT4),
            fingerprint=self._layout.fingerprint, versions={0: 1, 1: 1}, run_tokens=5, retry_s=0.0,
            shards=[pb.ShardPlace(fragments=[0, 1])],
        )  # fmt: skip
        self._receipt = pb.Receipt(
            learner="a", incarnation=1, fragment=0, seq=1, fate=pb.FATE_MERGED, version=2, weight=0.5
        )
        taken = [self._taken(fragment.index) for fragment in self._layout.fragments]
        self._coded = [
            sending._messages(LinkSpeed(None, SYSTEM), each, run, compressed=bool(number % 2))
            for number, (each, run) in enumerate(zip(taken, self._layout.runs, strict=True))
        ]

    def one(self, rng: random.Random) -> bool:
        """Answers one of the agent's calls. The agent accepts the answer, or ends with one line for the user."""
        try:
            return self._loop.run_until_complete(asyncio.wait_for(self._hear(rng), LONGEST_S))
        except LearnerError as error:
            assert "\n" not in str(error)
            return False
        except grpc.aio.AioRpcError:  # `RunSession.live` and the loops of Sender and Fetcher retry
            return False

    def close(self) -> None:
        """Closes the event loop."""
        self._loop.close()

    async def _hear(self, rng: random.Random) -> bool:
        link, stopped = Hostile(), list[Exception]()
        identity, model = Identity("a", "", ["hostile"], 1.0), ModelDescription(SPECS, b"", _save)
        session = RunSession(
            identity, model, ThreadExchange(SYSTEM), Counters(), lambda _: None, stopped.append, SYSTEM, lambda *_: link
        )  # type: ignore[arg-type,return-value]
        core, shard = session.core, ShardView("", link)  # type: ignore[arg-type]
        core.layout, core.settings = self._layout, self._joined.settings
        core.session = pb.Session(run="r", learner="a", incarnation=1, generation=1, token=b"t")
        shard.tracks = {
            f.index: FragmentTrack(f.whole, shard, self._vectors[f.index].copy(), 1, 1, whole=False)
            for f in self._layout.fragments
        }
        core.place([shard])
        shard.joined(core.session)
        for track in shard.tracks.values():
            sent = pb.Session(learner="a", incarnation=1)
            track.in_flight = InFlight(self._taken(track.fragment), 1, *self._coded[track.fragment], sent)
            session._counters.pending += 1
            session._exchange.submitted(track.in_flight.taken)
        hear = rng.choice((self._join, self._follow, self._fetch, self._push))(rng, session, link)
        try:
            heard = await hear
        except grpc.aio.AioRpcError as error:
            await session._note(error, 0.0)  # raises errors that the user must see
            heard = False
        finally:
            running = [track.fetching for track in core.tracks.values() if track.fetching is not None]
            asking = [*session._sender._tasks, *running]
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        for error in stopped:
            if not isinstance(error, LearnerError):
                raise error
        return heard and not stopped

    def _taken(self, fragment: int) -> Submission:
        f = self._layout.fragments[fragment]
        track = Track(FragmentShape.of(f.whole, Codec.INT4), 1, self._vectors[fragment], 1)
        return Submission(fragment, 1, track.take(lambda: np.zeros(f.length, np.float32), 10, 1))

    def _says(self, rng: random.Random, chance: float, messages: Sequence[Any]) -> list[Any]:
        """Returns the messages of a stream: some changed, one missing or repeated, or with a status among them."""
        says = [sometimes(rng, chance, mutate_message, message) for message in messages]
        match rng.randrange(10):
            case 0:
                says.insert(rng.randrange(len(says) + 1), status(rng))
            case 1:
                del says[rng.randrange(len(says))]
            case 2:
                says.insert(rng.randrange(len(says) + 1), rng.choice(says))
        return says

    async def _join(self, rng: random.Random, session: RunSession, link: Hostile) -> bool:
        replies = [self._joined]
        for _ in range(rng.choice((0, 0, 1, 20))):
            states = (pb.JoinReply.STATE_INITIALISE, pb.JoinReply.STATE_WAIT, pb.JoinReply.STATE_CONFIRM)
            other = pb.JoinReply(state=rng.choice(states), token=b"t", retry_s=1.0)
            replies = [*([other] * rng.choice((1, 20))), *replies]
        link.says = [*self._says(rng, 0.3, replies), self._joined]
        pauses = 0

        async def pause(seconds: float) -> None:
            nonlocal pauses
            assert 0 <= seconds <= 60
            pauses += seconds > 0
            await _sleep(0)

        session.core.shards[0].connected.clear()
        with mock.patch("asyncio.sleep", pause), in_room(MAX_BYTES):
            await session._join()
        hasty = link.joins - link.uploads - pauses  # uploads that the core requests take time
        assert hasty <= PATIENT, f"{link.joins} joins with {pauses} pauses: the agent floods the core"
        assert session.core.settings.codec in set(Codec), "the agent must know the codec"
        return True

    async def _follow(self, rng: random.Random, session: RunSession, link: Hostile) -> bool:
        notifications = [
            pb.Notification(
                log=1, sequence=1, current=pb.FullState(versions={0: 2, 1: 2}, open=[pb.RoundOpened(cycle=3)])
            ),
            pb.Notification(log=1, sequence=2, opened=pb.RoundOpened(fragment=0, cycle=2)),
            pb.Notification(log=1, sequence=3, published=pb.UpdatePublished(fragment=1, version=2, size_bytes=9)),
            pb.Notification(log=1, sequence=4, receipt=self._receipt),
            pb.Notification(log=1, sequence=5),
            pb.Notification(log=1, sequence=6, shutting_down=pb.ShuttingDown()),
        ]
        rng.shuffle(notifications)
        link.says = self._says(rng, 0.4, notifications)
        with in_room(MAX_BYTES):
            await ShardSession(
                session.core, session.core.shards[0], session._exchange, session._counters, session._fetcher,
                session._sender, lambda _: None, SYSTEM,
            ).follow()  # fmt: skip
        return True

    async def _fetch(self, rng: random.Random, session: RunSession, link: Hostile) -> bool:
        """Fetches with correct checksums, so that invalid codes are decoded."""
        track = rng.choice(list(session.core.tracks.values()))
        fragment, track.whole, track.target = self._layout.fragments[track.fragment], rng.random() < 0.5, 2
        kind = Codec.FLOAT32 if track.whole else Codec.INT4
        vector, form = self._vectors[track.fragment], {"compressed": rng.random() < 0.5}
        payloads = [frame_codec.encode_frame(vector, span, kind, **form) for span in fragment.frames]
        if rng.random() < 0.5:
            spans = fragment.frames
            payloads = [unsound(rng, p, span, kind) for p, span in zip(payloads, spans, strict=True)]
        frames = [pb.Frame(index=n, crc32c=crc32c(p), payload=p) for n, p in enumerate(payloads)]
        anchor, checksum = _decoded(
            track, PartialFetch(fragment.whole, Codec.INT4, 0 if track.whole else 2), kind, frames
        )
        receipt = pb.Receipt()
        receipt.CopyFrom(self._receipt)
        receipt.fragment = track.fragment
        header = pb.FetchHeader(
            fragment=track.fragment, version=2, codec=int(kind), frames=len(payloads), size_bytes=1, crc32c=checksum,
            receipts=[receipt],
        )  # fmt: skip
        together = rng.randint(1, FRAMES_PER_MESSAGE + 1)
        starts = range(0, len(frames), together)
        says = [pb.FetchReply(frames=frames[start : start + together]) for start in starts]
        says.insert(0, pb.FetchReply(header=header))
        link.says, link.forever = self._says(rng, 0.2, says), rng.random() < 0.05
        before, whole = track.anchor, track.whole
        with in_room(MAX_BYTES):
            sound = await session._fetcher._step(track)
        assert sound or track.anchor is before, "an invalid fetch must not change the anchor"
        assert not sound or anchor is not None, "a valid fetch must decode"
        assert not sound or whole or track.version == 2, "an update must lead to the next version"
        return sound

    async def _push(self, rng: random.Random, session: RunSession, link: Hostile) -> bool:
        track = session.core.tracks[0]
        replies = [pb.PushReply(received=pb.ReceivedFrames(frames=[0])), pb.PushReply(receipt=self._receipt)]
        link.says = self._says(rng, 0.6, replies)
        assert track.in_flight is not None, "`_hear` set it"
        try:
            with in_room(MAX_BYTES):
                return await session._sender._push(track, track.in_flight)
        except grpc.aio.AioRpcError as error:
            session._sender._failed(track, track.in_flight, Failure(error, remedy(error), session.core.session, 0))
            return False


def _save(path: Path) -> None:
    path.write_bytes(b"initial parameters")


def _decoded(track: FragmentTrack, right: PartialFetch, kind: Codec, frames: list[pb.Frame]) -> tuple[Any, int]:
    """Returns the frames' values and their checksum, or None if they have no values."""
    try:
        for frame in frames:
            right.took(pb.FetchHeader(version=2, codec=int(kind)), frame)
    except UnsoundError:
        return None, 0
    decoded = right.decoded(None if track.whole else track.anchor)
    return (None, 0) if decoded is None else (decoded.values, decoded.checksum)
