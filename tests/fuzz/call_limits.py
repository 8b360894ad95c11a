"""Fuzzes the intake of contributions without gRPC: headers, and frames with correct checksums."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
from atoll_server.access.refusals import Refused
from atoll_server.ledger.rows import FateRow
from atoll_server.shard.intake import Intake
from atoll_server.storage.spool import RECORD
from atoll_server.uploads.admission import check_header
from atoll_server.uploads.upload_state import UploadState
from atoll_server.uploads.uploads import Upload
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.contract import Fate
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import FRAME_PARAMETERS, FragmentLayout, MergeKind, TensorSpec, plan

from tests.bare_shard import Rows, bare_shard
from tests.fuzz.decoders import LIMITS, SPECS
from tests.fuzz.mutate import mutate_bytes, mutate_message, sometimes
from tests.fuzz.payloads import unsound
from tests.fuzz.watch import in_room, place

LONGEST_S = 20.0
MAX_BYTES = 1 << 20  # limit on memory, without received bytes and this module's copies
# One fragment has two frames. They arrive in any order, twice, or never.
LAYOUT = plan([*SPECS, TensorSpec("cut", (FRAME_PARAMETERS + 5000,), "float32", MergeKind.DIRECTION)], 2)
LARGE, SMALL = sorted(LAYOUT.fragments, key=lambda fragment: -fragment.length)
VERSION, CYCLE = 5, 7


class CallLimits:
    """A shard's intake, which receives contributions without gRPC."""

    row = 250

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._place = place()
        self._failures: list[BaseException] = []
        limits = LIMITS.model_copy(update={"norm_window": 8})
        self._shard = bare_shard(Path(self._place.name), LAYOUT, limits, Rows(), self._failures)
        for fragment in self._shard.fragments.values():
            fragment.state.version = fragment.rounds.version = VERSION
            fragment.rounds.ages = {VERSION: float(VERSION)}
        self._intake, self._uploads, self._spool = Intake(self._shard), self._shard.uploads, self._shard.spool
        self._cycles, self._sequence = itertools.count(CYCLE), itertools.count(1)
        rng = np.random.default_rng(0)
        self._sound = []
        for fragment in LAYOUT.fragments:
            vector = (rng.standard_normal(fragment.length) * 1e-3).astype(np.float32)
            self._sound.append([frame_codec.encode_frame(vector, span, Codec.INT4) for span in fragment.frames])

    def one(self, rng: random.Random) -> bool:
        """Sends one contribution, which is acknowledged, refused, or incomplete."""
        fragment = SMALL if rng.random() < 0.9 else LARGE
        payloads = list(self._sound[fragment.index])
        for index, span in enumerate(fragment.frames):
            if rng.random() < 0.5 / len(payloads):
                payloads[index] = unsound(rng, payloads[index], span, Codec.INT4)
        header, frames = self._messages(rng, fragment, payloads)
        streams = rng.choice((1, 1, 1, 2))
        came_bytes = sum(len(frame.payload) for frame in frames) * streams
        with in_room(MAX_BYTES + 2 * came_bytes + 32 * fragment.length):
            work = asyncio.wait_for(self._feed(header, frames, streams), LONGEST_S)
            return self._loop.run_until_complete(work)

    def _messages(
        self, rng: random.Random, fragment: FragmentLayout, payloads: list[bytes]
    ) -> tuple[pb.PushHeader, list[pb.Frame]]:
        """Returns a learner's messages with some changes."""
        table = [(len(payload), crc32c(payload)) for payload in payloads]
        session = pb.Session(learner=rng.choice(("a", "b")), incarnation=1)
        header = pb.PushHeader(
            session=session, fragment=fragment.index, seq=next(self._sequence), cycle=CYCLE, base_version=VERSION,
            tokens=10, steps=1, codec=pb.CODEC_INT4, frames=len(payloads), size_bytes=sum(map(len, payloads)),
            digest=frame_codec.frames_digest(table),
        )  # fmt: skip
        header = sometimes(rng, 0.3, mutate_message, header)
        header.session.CopyFrom(session)  # the registry checks the session before the intake
        frames = [pb.Frame(index=n, crc32c=table[n][1], payload=payload) for n, payload in enumerate(payloads)]
        frames = [sometimes(rng, 0.05, mutate_message, frame) for frame in frames]
        for frame in frames:
            if rng.random() < 0.05:
                frame.payload = mutate_bytes(rng, frame.payload)
            if rng.random() < 0.9:
                frame.crc32c = crc32c(frame.payload)
        match rng.randrange(8):
            case 0:
                del frames[rng.randrange(len(frames))]
            case 1:
                frames.append(rng.choice(frames))
            case 2:
                rng.shuffle(frames)
        return header, frames

    async def _feed(self, header: pb.PushHeader, frames: list[pb.Frame], streams: int) -> bool:
        """Feeds a contribution to the intake, like `OuterService.Push`. A second stream continues a cut one."""
        if header.fragment >= len(LAYOUT.fragments):
            return False
        taken = False
        for stream in range(streams):
            mine = frames[: len(frames) // 2] if stream < streams - 1 else frames
            try:
                taken = await self._push(header, mine)
            except Refused as refused:
                refused.detail.encode()
                taken = False
        self._sound_state()
        return taken

    async def _push(self, header: pb.PushHeader, frames: list[pb.Frame]) -> bool:
        self._shard.syncer.fragments[header.fragment].cycle = next(self._cycles)
        upload = self._intake.offer(header, 0.0)
        if isinstance(upload, pb.Receipt):
            return True
        check_header(header, LAYOUT.fragments[header.fragment], Codec.INT4)
        for at in range(0, len(frames), 2):  # two frames per message
            if upload.state is not UploadState.GROWING:
                break
            await self._intake.take(upload, frames[at : at + 2], 0.0)
            self._within(upload)
        if upload.state is UploadState.GROWING:
            return False
        receipt = await self._intake.receipt(upload)
        if receipt.fate == pb.FATE_PENDING:
            self._acknowledged(upload)
        return True

    def _within(self, upload: Upload) -> None:
        """Checks that the file is not larger than declared."""
        part = upload.part
        assert part.received_bytes <= part.size_bytes
        with contextlib.suppress(FileNotFoundError):  # no frame arrived, or the complete file has its final name
            assert part.path.stat().st_size <= part.size_bytes + RECORD.size * part.frames

    def _acknowledged(self, upload: Upload) -> None:
        """Checks that an acknowledged contribution can be merged: each frame decodes, with the recorded norm."""
        key, fragment = upload.key, upload.part.fragment
        held = self._shard.held(key)
        out = np.empty(fragment.length, np.float32)
        for span in fragment.frames:
            frame_codec.decode_frame(held.stored.payload(span.index), span, Codec.INT4, out)
        assert np.isfinite(out).all()
        found = float((out.astype(np.float64) ** 2).sum())
        assert math.isclose(found, math.fsum(held.row.norms_sq), rel_tol=1e-6, abs_tol=1e-300)
        self._shard._decide(FateRow(key, Fate.MERGED, VERSION))
        self._spool.delete(1, key, upload.part.size_bytes)

    def _sound_state(self) -> None:
        if self._failures:
            raise self._failures[0]
        underway: Any = self._uploads._underway.values()
        room = sum(upload.part.size_bytes for upload in underway)
        assert self._spool.used_bytes == room, "only unfinished uploads may reserve space"
        assert len(underway) <= 2 * len(LAYOUT.fragments), "a learner may have one upload per fragment"

    def close(self) -> None:
        """Drops incomplete uploads, and checks that no file remains."""

        async def give_up() -> None:
            self._uploads.expire(1e18)

        self._loop.run_until_complete(give_up())
        self._loop.run_until_complete(self._shard.stop())
        assert self._spool.used_bytes == 0
        left = [path for path in Path(self._place.name).rglob("*") if path.is_file()]
        assert not left, left
        self._loop.close()
        self._place.cleanup()
