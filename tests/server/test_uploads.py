"""Uploads with racing streams: one contribution, one acknowledgement, and none before its row is committed."""

from __future__ import annotations

import asyncio
import errno

import numpy as np
import pytest
import zstandard
from atoll_server.access.refusals import Refused, Status
from atoll_server.settings import Limits
from atoll_server.shard.intake import Intake
from atoll_server.storage.disk import Disk
from atoll_server.uploads.upload_state import UploadState
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import MergeKind, TensorSpec, plan

from tests.bare_shard import Rows, bare_shard

LAYOUT = plan([TensorSpec("w", (64, 64), "float32", MergeKind.DIRECTION)], 1)
FRAGMENT = LAYOUT.fragments[0]
PAYLOAD = frame_codec.encode_frame(np.ones(FRAGMENT.length, np.float32), FRAGMENT.frames[0], Codec.INT4)


class World:
    """A shard with one fragment. committed, refused: the rows that the ledger received."""

    def __init__(self, directory, **limits) -> None:
        self.ledger, self.failures = Rows(), []
        limits = Limits(norm_window=8, **limits)
        self.shard = bare_shard(
            directory, LAYOUT, limits, self.ledger, self.failures, fragments=1, norm_limit=10.0, clip_norm=2.0
        )
        self.intake, self.uploads, self.spool = Intake(self.shard), self.shard.uploads, self.shard.spool

    @property
    def committed(self) -> list:
        return [row for row, fate in self.ledger.rows if fate is None]

    @property
    def refused(self) -> list:
        return [(row, fate.reason) for row, fate in self.ledger.rows if fate is not None]

    def offer(self, *, seq: int = 1, incarnation: int = 1, cycle: int = 0, now_in: int = 3):
        header = pb.PushHeader(
            session=pb.Session(learner="a", incarnation=incarnation), seq=seq, cycle=cycle, tokens=1, steps=1,
            codec=pb.CODEC_INT4, frames=1, size_bytes=len(PAYLOAD),
            digest=frame_codec.frames_digest([(len(PAYLOAD), crc32c(PAYLOAD))]),
        )  # fmt: skip
        self.shard.syncer.fragments[0].cycle = now_in
        return self.intake.offer(header, 0.0)

    async def take(self, upload, payload: bytes = PAYLOAD) -> None:
        frame = pb.Frame(index=0, crc32c=crc32c(payload), payload=payload)
        await self.intake.take(upload, [frame], 0.0)

    async def finishing(self):
        """Returns a complete upload during its commit, and the task that waits for its receipt."""
        self.ledger.may_commit.clear()
        upload = self.offer()
        await self.take(upload)
        waiting = asyncio.create_task(self.intake.receipt(upload))
        await self.ledger.at_commit.wait()
        return upload, waiting


def test_garbage_on_another_stream_does_not_affect_a_complete_upload(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        upload, waiting = await world.finishing()
        with pytest.raises(Refused):
            await world.take(upload, b"garbage")
        assert world.spool.used_bytes == len(PAYLOAD)
        world.ledger.may_commit.set()
        assert (await waiting).fate == pb.FATE_PENDING
        world.spool.delete(1, upload.key, len(PAYLOAD))
        assert (world.spool.used_bytes, world.failures) == (0, [])

    asyncio.run(run())


def test_a_stream_cut_with_the_last_frame_leaves_a_complete_upload(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        upload = world.offer()
        other = asyncio.create_task(upload.ended.wait())  # a stream that has sent its part
        cut = asyncio.create_task(world.take(upload))
        await asyncio.sleep(0)
        cut.cancel()  # while a worker writes the frame
        world.ledger.may_commit.set()
        await other
        assert (await world.intake.receipt(upload)).fate == pb.FATE_PENDING
        assert cut.cancelled(), "the stream must be cut"

    asyncio.run(run())


def test_a_frame_that_cannot_be_written_ends_the_upload_although_its_stream_is_cut(tmp_path):
    class Full(Disk):
        def create(self, path):
            raise OSError(errno.ENOSPC, "no space left")

    async def run() -> None:
        world = World(tmp_path)
        world.spool.disk = Full()
        upload = world.offer()
        cut = asyncio.create_task(world.take(upload))
        await asyncio.sleep(0)
        cut.cancel()
        await upload.ended.wait()
        assert upload.refused().status is Status.RESOURCE_EXHAUSTED
        assert world.offer() is not upload
        assert cut.cancelled(), "the stream must be cut"

    asyncio.run(run())


def test_an_unexpected_error_ends_the_core_and_does_not_block_later_starts(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        world.shard.fragments[0].norms.enter = {}.__getitem__
        upload = world.offer()
        await world.take(upload)
        with pytest.raises(Refused, match="the core failed"):
            await world.intake.receipt(upload)
        assert [type(failure) for failure in world.failures] == [TypeError]

    asyncio.run(run())


def test_after_a_failed_fsync_nothing_is_acknowledged_or_restarted(tmp_path):
    class Lying(Disk):
        def sync_directory(self, path):
            raise OSError(errno.EIO, "lost")

    async def run() -> None:
        world = World(tmp_path)
        world.spool.disk = Lying()
        upload = world.offer()
        await world.take(upload)
        with pytest.raises(Refused, match="the core failed"):
            await world.intake.receipt(upload)
        assert (world.committed, world.refused, len(world.failures)) == ([], [], 1)
        assert (upload.state, world.offer() is upload) == (UploadState.WHOLE, True), "the disk's state is unknown"
        world.uploads.expire(1e9)
        world.uploads.fence("a", 2)
        assert world.spool.used_bytes == len(PAYLOAD)

    asyncio.run(run())


def test_fencing_ends_a_growing_contribution_but_not_a_complete_one(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        upload, waiting = await world.finishing()
        world.uploads.fence("a", 2)
        world.ledger.may_commit.set()
        assert (await waiting).fate == pb.FATE_PENDING
        assert upload.state is UploadState.DURABLE
        growing = world.offer(incarnation=2)
        world.uploads.fence("a", 3)
        assert growing.state is UploadState.DROPPED
        with pytest.raises(Refused, match="was cancelled"):
            await world.intake.receipt(growing)

    asyncio.run(run())


def test_undeclared_frames_end_the_upload_for_all_its_streams(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        upload = world.offer()
        other = asyncio.create_task(world.intake.receipt(upload))
        await world.take(
            upload, frame_codec.encode_frame(np.full(FRAGMENT.length, 2, np.float32), FRAGMENT.frames[0], 3)
        )
        for stream in (other, world.intake.receipt(upload)):
            with pytest.raises(Refused, match="differ from the size or digest in its header") as refused:
                await stream
            assert refused.value.status is Status.INVALID_ARGUMENT
        assert (world.spool.used_bytes, world.ledger.rows) == (0, [])

    asyncio.run(run())


def test_nothing_is_acknowledged_before_its_row_is_committed(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        upload, waiting = await world.finishing()
        assert world.offer() is upload, "a repeated offer must get the upload, not a receipt"
        assert world.uploads.newest_receipt("a", 1, 0) is None
        world.ledger.may_commit.set()
        await waiting
        assert world.offer().fate == pb.FATE_PENDING

    asyncio.run(run())


def test_a_second_contribution_waits_while_the_first_becomes_durable(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        _, waiting = await world.finishing()
        with pytest.raises(Refused, match="must wait, since seq 1 is still pending") as refused:
            world.offer(seq=2)
        assert refused.value.status is Status.RESOURCE_EXHAUSTED  # so the learner sends it again
        world.ledger.may_commit.set()
        await waiting

    asyncio.run(run())


@pytest.mark.parametrize(("incarnation", "seq"), [(2, 1), (1, 2)])
def test_a_late_finish_does_not_hide_a_newer_receipt(tmp_path, incarnation, seq):
    async def run() -> None:
        world = World(tmp_path)
        _, waiting = await world.finishing()
        newer = pb.Receipt(learner="a", incarnation=incarnation, fragment=0, seq=seq, fate=pb.FATE_PENDING)
        world.uploads.note(b"digest of it", newer)
        world.ledger.may_commit.set()
        with pytest.raises(Refused, match="is durable, but a newer one exists") as refused:
            await waiting
        assert refused.value.status is Status.UNAVAILABLE
        assert world.uploads.newest_receipt("a", incarnation, 0) == newer

    asyncio.run(run())


def test_a_stream_of_a_dropped_upload_gets_an_error(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        upload = world.offer()
        world.uploads.expire(1e9)
        with pytest.raises(Refused, match=r"was cancelled: send it again.* kbit/s; .*--limit-upload-idle-s") as refused:
            await world.take(upload)
        assert refused.value.status is Status.UNAVAILABLE
        await world.take(world.offer())

    asyncio.run(run())


def test_a_repeated_frame_is_no_progress(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        upload = world.offer()
        await world.take(upload)
        uploading = world.shard.syncer.liveness["a"].uploading
        assert uploading.pop(0) == 0.0
        await world.take(upload)
        assert uploading == {}

    asyncio.run(run())


def test_a_contribution_answers_the_round_that_it_names(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        upload = world.offer(cycle=3)
        await world.take(upload)
        await world.intake.receipt(upload)
        assert world.committed[0].cycle == 3

    asyncio.run(run())


def test_a_contribution_to_a_future_round_answers_no_round_and_may_be_repeated(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        upload = world.offer(cycle=1 << 62)
        assert world.offer(cycle=2) is upload
        await world.take(upload)
        await world.intake.receipt(upload)
        assert world.committed[0].cycle == 0

    asyncio.run(run())


def test_an_unusual_norm_is_refused_with_a_receipt_and_frees_its_space(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        for _ in range(8):
            world.shard.fragments[0].norms.note("b", 1e-3, 1)
        upload = world.offer()
        await world.take(upload)
        receipt = await world.intake.receipt(upload)
        assert (receipt.fate, receipt.drop_outstanding) == (pb.FATE_REFUSED, True)
        assert world.offer() == receipt, "a repeated offer must get the same answer"
        ((row, reason),) = world.refused
        assert row.norms_sq[0] == pytest.approx(64 * 64, rel=0.1)
        assert "times the usual norm of 1 steps" in reason
        assert (world.spool.used_bytes, world.committed, world.failures) == (0, [], [])
        assert world.uploads.unwritten_bytes() == 0

    asyncio.run(run())


def test_a_refused_contribution_is_followed_by_another_in_the_next_round_only(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        for _ in range(8):
            world.shard.fragments[0].norms.note("b", 1e-3, 1)
        for seq in range(1, 4):
            upload = world.offer(seq=seq, incarnation=seq, now_in=seq)
            await world.take(upload)
            assert (await world.intake.receipt(upload)).fate == pb.FATE_REFUSED
            for more in range(20):  # whatever the round and the process
                with pytest.raises(Refused) as refused:
                    world.offer(seq=seq + 1 + more, incarnation=seq + more % 2, cycle=more % 4, now_in=seq)
                assert refused.value.status is Status.RESOURCE_EXHAUSTED
        assert len(world.refused) == 3, "each round must store one row"

    asyncio.run(run())


def test_clipped_contributions_are_kept_with_their_scale(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        for _ in range(8):
            world.shard.fragments[0].norms.note("b", 64 / 4, 1)
        upload = world.offer()
        await world.take(upload)
        await world.intake.receipt(upload)
        ((row, stored),) = [(held.row, held.stored) for held in world.shard.fragments[0].held.values()]
        assert (row.scale, stored.scale) == (pytest.approx(0.5, rel=0.05), row.scale)

    asyncio.run(run())


def test_values_that_are_not_finite_are_refused_with_a_receipt(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        content = bytearray(zstandard.decompress(PAYLOAD))
        content[-2:] = b"\xc0\x7f"  # the last scale is NaN
        world.ledger.may_commit.clear()
        upload = world.offer()
        await world.take(upload, zstandard.compress(bytes(content)))
        assert upload.state is UploadState.WHOLE, "the remaining frames must not be needed"
        world.ledger.may_commit.set()
        receipt = await world.intake.receipt(upload)
        assert receipt.fate == pb.FATE_REFUSED
        assert "NaN" in world.refused[0][1]
        assert world.spool.used_bytes == 0

    asyncio.run(run())


def test_only_a_learner_with_a_full_quota_waits(tmp_path):
    async def run() -> None:
        world = World(tmp_path, learner_spool_bytes=2 * len(PAYLOAD))
        world.shard.contributions.pending_bytes["a"] = 2 * len(PAYLOAD)
        with pytest.raises(Refused, match=r"that wait for a merge \(limit ") as caught:
            world.offer()
        assert caught.value.status is Status.RESOURCE_EXHAUSTED
        world.shard.contributions.pending_bytes["a"] = len(PAYLOAD)
        world.offer()

    asyncio.run(run())


def test_a_nearly_full_disk_makes_senders_wait(tmp_path):
    async def run() -> None:
        world = World(tmp_path)
        world.spool.room_bytes = len(PAYLOAD) - 1
        with pytest.raises(Refused, match="nearly full: free space there; senders wait") as caught:
            world.offer()
        assert caught.value.status is Status.RESOURCE_EXHAUSTED
        world.spool.room_bytes = len(PAYLOAD)
        world.offer()
        assert world.spool.room_bytes == 0

    asyncio.run(run())
