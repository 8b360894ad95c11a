"""Keeps a shard's unfinished uploads and the newest receipt of each learner for each fragment.

One contribution's frames may arrive over several streams at a time, which share one `Upload`. Only the event loop uses
this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from atoll_wire import outer_pb2 as pb
from atoll_wire.codec.frame_codec import FrameError
from atoll_wire.connections.arrival_estimator import ArrivalEstimator
from atoll_wire.layout.layout import Layout

from atoll_server.access.refusals import Refused, Status
from atoll_server.rounds.round_state import RoundState
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.shard_context.context import ShardContext
from atoll_server.shard_context.work import Work
from atoll_server.storage.payload_writer import PayloadWriter
from atoll_server.storage.spool import Spool, SpoolFull
from atoll_server.uploads.admission import check_age, check_header, declared
from atoll_server.uploads.upload_state import UploadEvent, UploadState, after

SHORTEST_WAIT_S = 5.0  # minimum timeout for a stream's next frame; the maximum is `upload_idle_s`


@dataclass(frozen=True, slots=True)
class LatestReceipt:
    """A learner's newest contribution to a fragment: its digest, and its receipt so far."""

    digest: bytes
    receipt: pb.Receipt


@dataclass(slots=True, eq=False)
class Upload:
    """One contribution during its upload.

    cycle: the fragment's cycle when the upload began. touched_at: time of the last new frame or stream, in monotonic
    seconds.
    """

    key: ContributionKey
    header: pb.PushHeader
    cycle: int
    part: PayloadWriter
    arrivals: ArrivalEstimator  # arrival times of its frames
    touched_at: float
    state: UploadState = UploadState.GROWING
    streams: int = 0  # number of streams that wait for a frame
    bad_values: str = ""  # reason for the refusal in the receipt; empty while all values are finite
    error: Refused | None = None  # the error for its streams if there is no receipt
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # set once durable or dropped, or after the core failed

    @contextmanager
    def heard(self) -> Iterator[float]:
        """Context manager for a stream that waits for its next frame. Yields the timeout in seconds."""
        max_wait_s = self.arrivals.max_wait_s() * (self.streams + 1)  # gaps are measured over all streams
        self.streams += 1
        try:
            yield max_wait_s
        finally:
            self.streams -= 1

    def move(self, saw: UploadEvent) -> None:
        """Moves to the next state. Raises TransitionError if there is none."""
        self.state = after(self.state, saw)

    def stop(self, error: Refused) -> None:
        """Ends the streams with an error after the core has failed. The upload keeps its state and gets no receipt."""
        self.error = error
        self.ended.set()

    def refused(self) -> Refused:
        """Returns a new copy of the error for a stream of this upload, which has no receipt."""
        if self.error is None:
            return Refused(Status.UNAVAILABLE, f"the upload of {self.key} was cancelled: send it again")
        return Refused(self.error.status, self.error.detail)


class Uploads:
    """One shard's uploads in one generation."""

    def __init__(self, context: ShardContext, layout: Layout, spool: Spool, work: Work) -> None:
        self._layout = layout
        self._codec = context.run.codec
        self._generation = context.generation
        self._limits = context.settings.limits
        self._spool = spool
        self._work = work
        self._underway: dict[ContributionKey, Upload] = {}  # growing or whole
        self._newest: dict[tuple[str, int], LatestReceipt] = {}  # by learner and fragment; over all incarnations
        self._refused_in: dict[tuple[str, int], int] = {}  # by learner and fragment: cycle of the newest refusal

    # ------------------------------------------------------------------------------ admission

    def offer(
        self,
        header: pb.PushHeader,
        version: int,
        rounds: RoundState,
        max_staleness: int,
        pending_bytes: int,
        now: float,
    ) -> Upload | pb.Receipt:
        """Returns a contribution's upload, or the receipt if the contribution already has one.

        version, rounds: the fragment's current version and round state. max_staleness: outer steps. pending_bytes: size
        of the learner's contributions that wait for their merge. now: monotonic seconds. Raises Refused if the
        contribution is not valid, is too old, or must wait.
        """
        key = ContributionKey(header.session.learner, header.session.incarnation, header.fragment, header.seq)
        known = self._known(header, key, now)
        if known is not None:
            return known
        self._check_turn(key, rounds.cycle)
        if header.cycle > rounds.cycle:
            header.cycle = 0  # this core lost the round in a restart, so the contribution answers no round
        check_header(header, self._layout.fragments[key.fragment], self._codec)
        check_age(header, version, rounds.staleness(header.base_version), max_staleness)
        for other in self._growing():
            if (other.key.learner, other.key.fragment) == (key.learner, key.fragment):
                self._end(other, UploadEvent.GIVEN_UP)
        self._reserve(key.learner, header.size_bytes, pending_bytes)
        path, spool = self._spool.path(self._generation, key), self._spool
        part = PayloadWriter(
            key,
            self._layout.fragments[key.fragment],
            self._codec,
            header.size_bytes,
            header.digest,
            path,
            spool.kept,
            spool.disk,
        )
        arrivals = ArrivalEstimator(SHORTEST_WAIT_S, self._limits.upload_idle_s)
        upload = self._underway[key] = Upload(key, header, rounds.cycle, part, arrivals, now)
        return upload

    def _known(self, header: pb.PushHeader, key: ContributionKey, now: float) -> Upload | pb.Receipt | None:
        """Returns the upload or receipt of a known key, or None for a new key.

        Raises Refused if the key belongs to a different contribution or the learner has a newer contribution.
        """
        upload = self._underway.get(key)
        if upload is not None:
            if declared(upload.header) != declared(header):
                raise Refused(Status.ALREADY_EXISTS, f"contribution {key} began with a different header: use a new seq")
            upload.arrivals.again(now)
            upload.touched_at = now
            return upload
        newest = self._decided(key)
        if newest is None or newest.receipt.seq < key.seq:
            return None
        if newest.receipt.seq > key.seq:
            text = f"contribution {key} is older than the newest one (seq {newest.receipt.seq}): use a new seq"
            raise Refused(Status.INVALID_ARGUMENT, text)
        if newest.digest != header.digest:
            raise Refused(Status.ALREADY_EXISTS, f"contribution {key} exists with a different digest: use a new seq")
        return newest.receipt

    def _check_turn(self, key: ContributionKey, cycle: int) -> None:
        """Raises Refused if the learner's previous contribution is still pending or was refused in this round."""
        waits_for = [
            upload.key.seq
            for upload in self._underway.values()
            if upload.state is UploadState.WHOLE and upload.key[:3] == key[:3]
        ]
        newest = self._decided(key)
        if newest is not None and newest.receipt.fate == pb.FATE_PENDING:
            waits_for.append(newest.receipt.seq)
        if waits_for:
            text = f"contribution {key} must wait, since seq {waits_for[0]} is still pending: wait for its receipt"
            raise Refused(Status.RESOURCE_EXHAUSTED, text)
        if self._refused_in.get((key.learner, key.fragment)) == cycle:
            text = f"contribution {key} must wait, since this round refused the previous one: send it in the next round"
            raise Refused(Status.RESOURCE_EXHAUSTED, text)

    def _reserve(self, learner: str, size_bytes: int, pending_bytes: int) -> None:
        """Reserves space before the first frame. Raises Refused if there is no space."""
        underway = sum(upload.part.size_bytes for upload in self._underway.values() if upload.key.learner == learner)
        mine = underway + pending_bytes
        if mine and mine + size_bytes > self._limits.learner_spool_bytes:
            text = f'learner "{learner}" has {mine} bytes of contributions that wait for a merge'
            limit = f"limit {self._limits.learner_spool_bytes}, --limit-learner-spool-bytes"
            raise Refused(Status.RESOURCE_EXHAUSTED, f"{text} ({limit}): try again later")
        try:
            self._spool.reserve(size_bytes)
        except SpoolFull as error:
            raise Refused(Status.RESOURCE_EXHAUSTED, str(error)) from error

    # ------------------------------------------------------------------------------ transitions

    def came(self, upload: Upload, now: float, *, new: bool) -> bool:
        """Records written frames. Returns whether they made the upload whole. new: whether any frame was new."""
        if new:
            upload.touched_at = now
            upload.arrivals.saw(now)
        if upload.state is not UploadState.GROWING or not upload.part.complete:
            return False
        try:
            upload.part.check()
        except FrameError as error:
            self.drop(upload, Refused(Status.INVALID_ARGUMENT, str(error)))
            return False
        upload.move(UploadEvent.ALL_FRAMES)
        return True

    def came_bad(self, upload: Upload, why: str) -> bool:
        """Records values that are not finite. Returns whether this made the upload whole.

        The upload will be refused with a receipt. why: the reason in the receipt.
        """
        if upload.state is not UploadState.GROWING:
            return False
        upload.bad_values = why
        upload.move(UploadEvent.BAD_VALUES)
        return True

    def drop(self, upload: Upload, error: Refused) -> Refused:
        """Ends a growing upload. Has no effect on a whole upload. Returns `error`."""
        if upload.state is UploadState.GROWING:
            upload.error = error
            self._end(upload, UploadEvent.GIVEN_UP)
        return error

    def finish(self, upload: Upload, receipt: pb.Receipt) -> None:
        """Ends a whole upload. Its streams get the receipt.

        Called after the upload's row is committed and before its contribution can be merged.
        """
        self.note(upload.part.digest, receipt)
        if receipt.fate == pb.FATE_REFUSED:
            # The ledger keeps each refusal forever, so at most one per round is allowed.
            self._refused_in[receipt.learner, receipt.fragment] = upload.cycle
            self._end(upload, UploadEvent.REFUSED)
        else:
            self._end(upload, UploadEvent.KEPT)

    def _end(self, upload: Upload, saw: UploadEvent) -> None:
        upload.move(saw)
        del self._underway[upload.key]
        if upload.state is UploadState.DROPPED:
            self._spool.release(upload.part.size_bytes)
            self._work.on_frames(upload.part.discard)
        upload.ended.set()

    def fence(self, learner: str, incarnation: int) -> None:
        """Drops a learner's growing uploads from incarnations before this one."""
        for upload in self._growing():
            if upload.key.learner == learner and upload.key.incarnation < incarnation:
                self._end(upload, UploadEvent.GIVEN_UP)

    def expire(self, now: float) -> None:
        """Drops uploads that have received no new frame for too long. now: monotonic seconds."""
        max_wait_s = self._limits.upload_idle_s
        for upload in self._growing():
            if now - upload.touched_at > max_wait_s:
                frame_bytes = upload.part.size_bytes // upload.part.frames
                kbit = 8e-3 * frame_bytes / max_wait_s
                text = (
                    f"no frame of {upload.key} arrived for {max_wait_s:.0f} s, so the upload was cancelled: send it "
                    f"again. A frame of {frame_bytes} bytes needs {kbit:.0f} kbit/s; for a slower link, raise the "
                    "core's --limit-upload-idle-s"
                )
                self.drop(upload, Refused(Status.UNAVAILABLE, text))

    def _growing(self) -> list[Upload]:
        return [upload for upload in self._underway.values() if upload.state is UploadState.GROWING]

    # ------------------------------------------------------------------------------ receipts

    def receipt(self, upload: Upload) -> pb.Receipt:
        """Returns an ended upload's current receipt, which may no longer be pending.

        Raises Refused if the upload was dropped or the learner has a newer contribution to the fragment.
        """
        key = upload.key
        newest = self.newest_receipt(key.learner, key.incarnation, key.fragment)
        if newest is not None and newest.seq == key.seq:
            return newest
        if upload.state is UploadState.DURABLE:
            raise Refused(
                Status.UNAVAILABLE, f"contribution {key} is durable, but a newer one exists: request the newer receipt"
            )
        raise upload.refused()

    def note(self, digest: bytes, receipt: pb.Receipt) -> None:
        """Keeps a durable contribution's receipt, unless there is a newer one for its learner and fragment."""
        place, old = (receipt.learner, receipt.fragment), self._newest.get((receipt.learner, receipt.fragment))
        if old is None or _order(old.receipt) <= _order(receipt):
            self._newest[place] = LatestReceipt(digest, receipt)

    def newest_receipt(self, learner: str, incarnation: int, fragment: int) -> pb.Receipt | None:
        """Returns the receipt for an incarnation's newest contribution to a fragment, or None."""
        newest = self._newest.get((learner, fragment))
        return newest.receipt if newest is not None and newest.receipt.incarnation == incarnation else None

    def _decided(self, key: ContributionKey) -> LatestReceipt | None:
        """Returns the newest receipt, or None if it belongs to another incarnation."""
        newest = self._newest.get((key.learner, key.fragment))
        return newest if newest is not None and newest.receipt.incarnation == key.incarnation else None

    def decide(self, receipt: pb.Receipt) -> None:
        """Keeps a merged or refused contribution's receipt, so that the learner can request it again."""
        newest = self._newest.get((receipt.learner, receipt.fragment))
        if newest is not None and _order(newest.receipt) == _order(receipt):
            self.note(newest.digest, receipt)

    def has(self, learner: str, incarnation: int) -> bool:
        """Returns whether an upload of this process is underway."""
        return any((key.learner, key.incarnation) == (learner, incarnation) for key in self._underway)

    def unwritten_bytes(self) -> int:
        """Returns the bytes that uploads have reserved but not yet received."""
        return sum(upload.part.size_bytes - upload.part.received_bytes for upload in self._underway.values())


def _order(receipt: pb.Receipt) -> tuple[int, int]:
    return receipt.incarnation, receipt.seq
