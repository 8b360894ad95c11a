"""Contributions on their way in: admission, reservations, frames, and the acknowledgement.

Frames of one contribution may come over several streams at a time; whichever brings the last one makes the upload
whole, and all of them are given the same receipt.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from atoll_wire import codec
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import Codec, FrameError
from atoll_wire.layout import Layout

from atoll_server.events import Key
from atoll_server.ledger import ContributionRow
from atoll_server.merge import LARGEST_NORM, norms_sq
from atoll_server.refusal import Refused, Status
from atoll_server.settings import Limits
from atoll_server.spool import ChecksumError, Spool, SpoolError, SpoolFull, Stored, Upload

MOST_TOKENS, MOST_STEPS = 1 << 50, 1 << 40  # of one contribution; beyond them a weight would lose its meaning
MOST_NUMBER = 1 << 62  # of seq: what the ledger can hold


@dataclass(frozen=True, slots=True)
class Decided:
    """The newest contribution of a learner to a fragment: its digest, and its receipt so far."""

    digest: bytes
    receipt: pb.Receipt


class Uploads:
    """All uploads that are not yet whole, and the newest receipt of each learner and fragment."""

    def __init__(
        self,
        layout: Layout,
        run_codec: Codec,
        generation: int,
        spool: Spool,
        limits: Limits,
        workers: Executor,
        keep: Callable[[ContributionRow, Stored], Awaitable[None]],
        fail: Callable[[BaseException], None],
    ) -> None:
        """keep: makes the row durable and tells the syncer; awaited before anybody is acknowledged.

        fail: ends the process: after a failed fsync nothing that the disk says can be believed.
        """
        self._layout, self._codec, self._generation = layout, run_codec, generation
        self._spool, self._limits, self._workers = spool, limits, workers
        self._keep, self._fail = keep, fail
        self._growing: dict[Key, Upload] = {}
        self._headers: dict[Key, pb.PushHeader] = {}  # of the growing ones
        self._ended: dict[Key, asyncio.Event] = {}  # of the growing ones
        self._finishing: dict[Key, asyncio.Task[pb.Receipt]] = {}
        self._newest: dict[tuple[str, int], Decided] = {}  # of each learner and fragment, whatever incarnation

    def offer(
        self, header: pb.PushHeader, version: int, cycle: int, max_staleness: int, now: float
    ) -> Upload | pb.Receipt:
        """Admits a contribution, or answers with the receipt that its key has already. Raises Refused.

        version, cycle: of its fragment now.
        """
        key = Key(header.session.learner, header.session.incarnation, header.fragment, header.seq)
        growing = self._growing.get(key)
        if growing is not None:
            if _declared(self._headers[key]) != _declared(header):
                raise Refused(Status.ALREADY_EXISTS, f"contribution {key} was begun with another header: use a new seq")
            return growing
        newest = self._newest.get((key.learner, key.fragment))
        if newest is not None and newest.receipt.incarnation != key.incarnation:
            newest = None  # a dead incarnation's: what it had acknowledged is merged all the same
        if newest is not None and newest.receipt.seq >= key.seq:
            if newest.receipt.seq > key.seq:
                raise Refused(
                    Status.INVALID_ARGUMENT, f"contribution {key} is older than {newest.receipt.seq}, the newest"
                )
            if newest.digest != header.digest:
                raise Refused(Status.ALREADY_EXISTS, f"contribution {key} exists with another digest: use a new seq")
            return newest.receipt
        waits_for = [k.seq for k in self._finishing if (k.learner, k.incarnation, k.fragment) == _line(key)]
        if newest is not None and newest.receipt.fate == pb.FATE_PENDING:
            waits_for.append(newest.receipt.seq)
        if waits_for:
            raise Refused(Status.INVALID_ARGUMENT, f"contribution {key} must wait: {waits_for[0]} is still pending")
        if header.cycle > cycle:
            header.cycle = 0  # it answers a round that a restart of this core forgot: no round's answer
        self._check(header, key, version, max_staleness)
        return self._admit(header, key, now)

    def _check(self, header: pb.PushHeader, key: Key, version: int, max_staleness: int) -> None:
        fragment = self._layout.fragments[header.fragment]
        most = sum(codec.max_payload_bytes(span, self._codec) for span in fragment.frames)
        if int(header.codec) != int(self._codec):
            raise Refused(
                Status.INVALID_ARGUMENT, f"contribution {key} uses codec {header.codec}, the run {self._codec.name}"
            )
        if header.frames != len(fragment.frames) or not 0 < header.size_bytes <= most:
            raise Refused(
                Status.INVALID_ARGUMENT,
                f"contribution {key} declares {header.frames} frames and {header.size_bytes} bytes; fragment "
                f"{header.fragment} has {len(fragment.frames)} frames of at most {most} bytes in all",
            )
        if not (0 < header.tokens <= MOST_TOKENS and 0 < header.steps <= MOST_STEPS) or len(header.digest) != 32:
            raise Refused(
                Status.INVALID_ARGUMENT,
                f"contribution {key} declares {header.tokens} tokens, {header.steps} steps and a digest of "
                f"{len(header.digest)} bytes: at least one token, one step and 32 bytes are needed",
            )
        if header.seq > MOST_NUMBER:
            raise Refused(Status.INVALID_ARGUMENT, f"contribution {key} has a seq above {MOST_NUMBER}")
        if header.base_version > version:
            raise Refused(
                Status.INVALID_ARGUMENT,
                f"base version {header.base_version} of fragment {header.fragment} does not exist, the newest is "
                f"{version}: fetch the fragment whole",
            )
        if version - header.base_version > max_staleness:
            raise Refused(
                Status.OUT_OF_RANGE,
                f"contribution {key} is {version - header.base_version} versions old, the run takes {max_staleness}: "
                "fetch the fragment whole and drop the outstanding work",
            )

    def _admit(self, header: pb.PushHeader, key: Key, now: float) -> Upload:
        self._give_up(k for k in self._growing if (k.learner, k.fragment) == (key.learner, key.fragment))
        try:
            self._spool.reserve(header.size_bytes)
        except SpoolFull as error:
            raise Refused(Status.RESOURCE_EXHAUSTED, str(error)) from error
        fragment = self._layout.fragments[header.fragment]
        path = self._spool.path(self._generation, key, ".part")
        declared = (header.frames, header.size_bytes, header.digest)
        upload = Upload(key, fragment, self._codec, *declared, path, now, self._spool.disk)
        self._growing[key], self._headers[key], self._ended[key] = upload, header, asyncio.Event()
        return upload

    def fence(self, learner: str, incarnation: int) -> None:
        """A learner was started again: what its dead process left unfinished is dropped."""
        self._give_up(k for k in self._growing if k.learner == learner and k.incarnation < incarnation)

    def _give_up(self, keys: Iterable[Key]) -> None:
        for key in list(keys):
            self._drop(key)

    async def take(self, upload: Upload, frame: pb.Frame, now: float) -> bool:
        """Checks and writes one frame; whether it was a new one. Raises Refused; garbage ends the upload."""
        if frame.index >= upload.frames:
            raise Refused(Status.INVALID_ARGUMENT, f"frame {frame.index} of {upload.key}: there are {upload.frames}")
        loop = asyncio.get_running_loop()
        try:
            new = await loop.run_in_executor(self._workers, upload.take, frame.index, frame.crc32c, frame.payload)
        except ChecksumError as error:
            raise Refused(Status.DATA_LOSS, str(error)) from error
        except OSError as error:
            self._drop(upload.key)
            raise Refused(
                Status.RESOURCE_EXHAUSTED, f"the spool cannot be written ({error.strerror}): make room"
            ) from error
        except FrameError as error:
            self._drop(upload.key)
            raise Refused(Status.INVALID_ARGUMENT, f"frame {frame.index} of {upload.key}: {error}") from error
        if new:
            upload.touched_at = now
        return new

    async def ended(self, upload: Upload) -> None:
        """Waits, for a stream that has sent its part, until others have brought the rest or it was given up."""
        ended = self._ended.get(upload.key)
        if ended is not None:
            await ended.wait()

    async def complete(self, upload: Upload) -> pb.Receipt:
        """Makes a whole upload durable and returns its receipt; every stream of the upload may call it."""
        task = self._finishing.get(upload.key)
        if task is None:
            if upload.key not in self._growing:  # another stream brought the last frame, or a bad one
                receipt = self.newest_receipt(upload.key.learner, upload.key.incarnation, upload.key.fragment)
                if receipt is None or receipt.seq != upload.key.seq:
                    raise Refused(Status.UNAVAILABLE, f"the upload of {upload.key} was given up: send it again")
                return receipt
            task = asyncio.create_task(self._finish(upload), name=f"finish {upload.key}")
            self._finishing[upload.key] = task
        # A stream that is cut must not take the others' acknowledgement with it.
        receipt = await asyncio.shield(task)
        return (
            self.newest_receipt(receipt.learner, receipt.incarnation, receipt.fragment) or receipt
        )  # decided already?

    async def _finish(self, upload: Upload) -> pb.Receipt:
        key = upload.key
        try:
            row, stored = await self._make_durable(upload)
            await self._keep(row, stored)
        except (OSError, SpoolError) as error:
            self._fail(error)
            raise Refused(Status.UNAVAILABLE, "the core's disk failed: it stops; try again later") from error
        except FrameError as error:
            del self._finishing[key]
            self._drop(key)
            raise Refused(Status.INVALID_ARGUMENT, str(error)) from error
        receipt = pb.Receipt(
            learner=key.learner, incarnation=key.incarnation, fragment=key.fragment, seq=key.seq, fate=pb.FATE_PENDING
        )
        self.note(upload.digest, receipt)  # it is durable, and nothing can have decided on it yet
        del self._growing[key], self._headers[key], self._finishing[key]
        self._ended.pop(key).set()
        return receipt

    async def _make_durable(self, upload: Upload) -> tuple[ContributionRow, Stored]:
        loop, header, key = asyncio.get_running_loop(), self._headers[upload.key], upload.key
        norms = norms_sq(upload.fragment, [upload.squares[index] for index in range(upload.frames)])
        if not norms.max(initial=0.0) <= LARGEST_NORM**2:
            raise FrameError(f"{key} has a tensor of norm {math.sqrt(norms.max()):.3g}: the training has diverged")
        await loop.run_in_executor(self._workers, upload.finish)
        stored = await loop.run_in_executor(
            self._workers, self._spool.open, self._generation, key, self._codec, np.asarray(norms, np.float64)
        )
        row = ContributionRow(
            key, header.cycle, header.base_version, header.tokens, header.steps, int(self._codec),
            upload.frames, upload.size_bytes, upload.digest, tuple(float(n) for n in norms),
        )  # fmt: skip
        return row, stored

    def note(self, digest: bytes, receipt: pb.Receipt) -> None:
        """A contribution was made durable: the newest of its learner and fragment, unless a newer one is known."""
        place, old = (receipt.learner, receipt.fragment), self._newest.get((receipt.learner, receipt.fragment))
        if old is None or (old.receipt.incarnation, old.receipt.seq) <= (receipt.incarnation, receipt.seq):
            self._newest[place] = Decided(digest, receipt)

    def newest_receipt(self, learner: str, incarnation: int, fragment: int) -> pb.Receipt | None:
        """What became of an incarnation's newest contribution to a fragment."""
        newest = self._newest.get((learner, fragment))
        return newest.receipt if newest is not None and newest.receipt.incarnation == incarnation else None

    def decide(self, receipt: pb.Receipt) -> None:
        """Notes the fate of a contribution, for its learner to ask again."""
        newest = self._newest.get((receipt.learner, receipt.fragment))
        if newest is not None and (newest.receipt.incarnation, newest.receipt.seq) == (
            receipt.incarnation,
            receipt.seq,
        ):
            self.note(newest.digest, receipt)

    def expire(self, now: float) -> None:
        """Gives back the room of uploads that nobody goes on with."""
        patience_s = self._limits.upload_idle_s
        self._give_up(key for key, upload in self._growing.items() if now - upload.touched_at > patience_s)

    def _drop(self, key: Key) -> None:
        if key in self._finishing:
            return  # it is whole: what else came under its name does not matter
        upload = self._growing.pop(key, None)
        self._headers.pop(key, None)
        if key in self._ended:
            self._ended.pop(key).set()
        if upload is not None:
            self._spool.release(upload.size_bytes)
            asyncio.get_running_loop().run_in_executor(self._workers, upload.discard)


def _declared(header: pb.PushHeader) -> pb.PushHeader:
    """What a header says of the contribution; the session and the round may have changed when it is sent again."""
    declared = pb.PushHeader()
    declared.CopyFrom(header)
    declared.ClearField("session")
    declared.ClearField("cycle")
    return declared


def _line(key: Key) -> tuple[str, int, int]:
    return key.learner, key.incarnation, key.fragment
