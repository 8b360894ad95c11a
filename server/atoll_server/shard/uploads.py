"""Contributions on their way in: admission, reservations, frames, and the acknowledgement.

Frames of one contribution may come over several streams at a time; whichever brings the last one makes the upload
whole, and all of them are given the same receipt.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from atoll_wire import outer_pb2 as pb
from atoll_wire.arrivals import Arrivals
from atoll_wire.codec import FrameError, NotFiniteError
from atoll_wire.frames import WireFrame
from atoll_wire.layout import Layout
from atoll_wire.spans import Codec

from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.plausibility import Declared
from atoll_server.merging.merge import LARGEST_NORM, norms_sq
from atoll_server.merging.norm_guard import Guard
from atoll_server.rounds.events import Key
from atoll_server.rounds.fragment_rounds import FragmentRounds
from atoll_server.settings import Limits
from atoll_server.shard.admission import check_age, check_header, declared
from atoll_server.storage.rows import ContributionRow
from atoll_server.storage.spool import ChecksumError, Spool, SpoolFull, Stored, Upload

LEAST_PATIENCE_S = 5.0  # with the next frame of a stream; at most as long as its reservation lasts


@dataclass(frozen=True, slots=True)
class Decided:
    """The newest contribution of a learner to a fragment: its digest, and its receipt so far."""

    digest: bytes
    receipt: pb.Receipt


class Books(Protocol):
    """Where a contribution that is whole is entered: the engine."""

    async def keep(self, row: ContributionRow, stored: Stored) -> None:
        """Makes the row durable and tells the syncer; awaited before anybody is acknowledged."""

    async def refuse(self, row: ContributionRow, reason: str) -> pb.Receipt:
        """Makes the row durable with its end; returns the receipt."""

    def fail(self, error: BaseException) -> None:
        """Ends the process: after a failed fsync nothing that the disk says can be believed."""

    def pending_bytes(self, learner: str) -> int:
        """Of its acknowledged contributions that have no fate yet."""

    def weighed(self, key: Key, said: Declared) -> Declared:
        """What counts of the tokens and steps that a contribution declares."""

    def present(self) -> Set[str]:
        """Learners that may be expected to contribute."""


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
        guard: Guard,
        books: Books,
    ) -> None:
        self._layout, self._codec, self._generation = layout, run_codec, generation
        self._spool, self._limits, self._workers, self._guard, self._books = spool, limits, workers, guard, books
        self._growing: dict[Key, Upload] = {}
        self._growing_bytes: Counter[str] = Counter()  # declared by each learner's
        self._headers: dict[Key, pb.PushHeader] = {}  # of the growing ones
        self._ended: dict[Key, asyncio.Event] = {}  # of the growing ones
        self._finishing: dict[Key, asyncio.Task[pb.Receipt]] = {}
        self._newest: dict[tuple[str, int], Decided] = {}  # of each learner and fragment, whatever incarnation
        self._begun_in: dict[Key, int] = {}  # of the growing ones: the fragment's round when they were offered
        self._refused_in: dict[tuple[str, int], int] = {}  # by learner and fragment: the newest that was refused

    def offer(
        self, header: pb.PushHeader, version: int, rounds: FragmentRounds, max_staleness: int, now: float
    ) -> Upload | pb.Receipt:
        """Admits a contribution, or answers with the receipt that its key has already. Raises Refused.

        version, rounds: of its fragment now.
        """
        key = Key(header.session.learner, header.session.incarnation, header.fragment, header.seq)
        growing = self._growing.get(key)
        if growing is not None:
            if declared(self._headers[key]) != declared(header):
                raise Refused(Status.ALREADY_EXISTS, f"contribution {key} was begun with another header: use a new seq")
            growing.arrivals.again(now)
            growing.touched_at = now
            return growing
        newest = self._newest.get((key.learner, key.fragment))
        if newest is not None and newest.receipt.incarnation != key.incarnation:
            newest = None  # a dead incarnation's: what it had acknowledged is merged all the same
        if newest is not None and newest.receipt.seq >= key.seq:
            if newest.receipt.seq > key.seq:
                text = f"contribution {key} is older than {newest.receipt.seq}, the newest"
                raise Refused(Status.INVALID_ARGUMENT, text)
            if newest.digest != header.digest:
                raise Refused(Status.ALREADY_EXISTS, f"contribution {key} exists with another digest: use a new seq")
            return newest.receipt
        waits_for = [k.seq for k in self._finishing if k[:3] == key[:3]]
        if newest is not None and newest.receipt.fate == pb.FATE_PENDING:
            waits_for.append(newest.receipt.seq)
        if waits_for:
            raise Refused(Status.INVALID_ARGUMENT, f"contribution {key} must wait: {waits_for[0]} is still pending")
        if self._refused_in.get((key.learner, key.fragment)) == rounds.cycle:
            text = f"contribution {key} must wait: the one before it was refused; the next round takes another"
            raise Refused(Status.RESOURCE_EXHAUSTED, text)
        if header.cycle > rounds.cycle:
            header.cycle = 0  # it answers a round that a restart of this core forgot: no round's answer
        check_header(header, self._layout.fragments[key.fragment], self._codec)
        check_age(header, version, rounds.staleness(header.base_version), max_staleness)
        upload = self._admit(header, key, now)
        self._begun_in[key] = rounds.cycle
        return upload

    def _admit(self, header: pb.PushHeader, key: Key, now: float) -> Upload:
        self._give_up(k for k in self._growing if (k.learner, k.fragment) == (key.learner, key.fragment))
        mine = self._growing_bytes[key.learner] + self._books.pending_bytes(key.learner)
        if mine and mine + header.size_bytes > self._limits.learner_spool_bytes:
            text = f'learner "{key.learner}" has {mine} bytes here that wait for their merge: try again later'
            raise Refused(Status.RESOURCE_EXHAUSTED, text)
        try:
            self._spool.reserve(header.size_bytes)
        except SpoolFull as error:
            raise Refused(Status.RESOURCE_EXHAUSTED, str(error)) from error
        fragment = self._layout.fragments[header.fragment]
        path = self._spool.path(self._generation, key)
        declared = (header.frames, header.size_bytes, header.digest)
        arrivals = Arrivals(LEAST_PATIENCE_S, self._limits.upload_idle_s)
        upload = Upload(key, fragment, self._codec, *declared, path, now, arrivals, self._spool.kept, self._spool.disk)
        self._growing[key], self._headers[key], self._ended[key] = upload, header, asyncio.Event()
        self._growing_bytes[key.learner] += header.size_bytes
        return upload

    def fence(self, learner: str, incarnation: int) -> None:
        """A learner was started again: what its dead process left unfinished is dropped."""
        self._give_up(k for k in self._growing if k.learner == learner and k.incarnation < incarnation)

    def _give_up(self, keys: Iterable[Key]) -> None:
        for key in list(keys):
            self._drop(key)

    async def take(self, upload: Upload, frames: Sequence[pb.Frame | WireFrame], now: float) -> bool:
        """Checks and writes the frames of a message; whether any was new. Raises Refused; garbage ends the upload.

        The last one makes it whole, and so do values that are not finite: `complete` then gives it its receipt.
        """
        if not upload.whole() and self._growing.get(upload.key) is not upload:
            raise upload.given_up()
        for frame in frames:
            if frame.index >= upload.frames:
                text = f"frame {frame.index} of {upload.key}: there are {upload.frames}"
                raise Refused(Status.INVALID_ARGUMENT, text)
        taking = asyncio.get_running_loop().run_in_executor(self._workers, upload.take, frames)
        taking.add_done_callback(partial(self._taken, upload))
        try:
            new = await asyncio.shield(taking)
        except ChecksumError as error:
            raise Refused(Status.DATA_LOSS, str(error)) from error
        except NotFiniteError:
            return True
        except (OSError, FrameError) as error:
            raise upload.given_up() from error
        if new:
            upload.touched_at = now
            upload.arrivals.saw(now)
        return new

    def _taken(self, upload: Upload, taking: asyncio.Future[bool]) -> None:
        """What follows from frames, also when the stream that brought them was cut meanwhile."""
        match error := None if taking.cancelled() else taking.exception():
            case NotFiniteError():
                upload.refusal = f"{error}: this island's training has diverged"
            case OSError():
                text = f"the spool cannot be written ({error.strerror}): make room"
                upload.dropped = Refused(Status.RESOURCE_EXHAUSTED, text)
            case FrameError():
                upload.dropped = Refused(Status.INVALID_ARGUMENT, f"{upload.key}: {error}")
        if upload.dropped is not None and self._growing.get(upload.key) is upload:
            self._drop(upload.key)
        self._finish_if_whole(upload)

    async def ended(self, upload: Upload) -> None:
        """Waits, for a stream that has sent its part, until others have brought the rest or it was given up."""
        ended = self._ended.get(upload.key)
        if ended is not None:
            await ended.wait()

    async def complete(self, upload: Upload) -> pb.Receipt:
        """The receipt of a whole upload, once it is durable; every stream of the upload may call it."""
        self._finish_if_whole(upload)  # the last frame may be here a moment before this loop is told
        task = self._finishing.get(upload.key)
        if task is None:
            receipt = self.newest_receipt(upload.key.learner, upload.key.incarnation, upload.key.fragment)
            if receipt is None or receipt.seq != upload.key.seq:
                raise upload.given_up()
            return receipt
        receipt = await asyncio.shield(task)  # a stream that is cut must not take the others' with it
        return self.newest_receipt(receipt.learner, receipt.incarnation, receipt.fragment) or receipt

    def _finish_if_whole(self, upload: Upload) -> None:
        """At once, and once: the stream that brought the last frame may be cut before it asks for the receipt."""
        if upload.whole() and self._growing.get(upload.key) is upload and upload.key not in self._finishing:
            task = asyncio.create_task(self._finish(upload), name=f"finish {upload.key}")
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # for whoever still listens
            self._finishing[upload.key] = task

    async def _finish(self, upload: Upload) -> pb.Receipt:
        key = upload.key
        try:
            receipt = await self._enter(upload)
        except FrameError as error:
            upload.dropped = Refused(Status.INVALID_ARGUMENT, str(error))
            del self._finishing[key]
            self._drop(key)
            raise upload.given_up() from error
        except Exception as error:  # of the disk, or ours: nobody may listen, and it would be in the way for ever
            self._books.fail(error)
            raise Refused(Status.UNAVAILABLE, "the core failed: it stops; try again later") from error
        self.note(upload.digest, receipt)  # it is durable, and nothing can have decided on it since
        del self._finishing[key]
        if receipt.fate == pb.FATE_REFUSED:
            # Each has a row in the ledger for ever: at most one in a round, however soon the next is sent.
            self._refused_in[key.learner, key.fragment] = self._begun_in[key]
            self._drop(key)
        else:
            self._forget(key)
        return receipt

    async def _enter(self, upload: Upload) -> pb.Receipt:
        """Judges a whole upload; makes it, or its refusal, durable. Raises FrameError for what was never declared."""
        header, key = self._headers[upload.key], upload.key
        row = ContributionRow(
            key, header.cycle, header.base_version, header.tokens, header.steps, int(self._codec),
            upload.frames, upload.size_bytes, upload.digest, (), 1.0, time.time(),
        )  # fmt: skip
        if upload.refusal:
            return await self._books.refuse(row, upload.refusal)
        declared = self._books.weighed(key, Declared(header.tokens, header.steps))
        row = replace(row, tokens=declared.tokens, steps=declared.steps)
        norms = norms_sq(upload.fragment, [upload.squares[index] for index in range(upload.frames)])
        norm = math.sqrt(math.fsum(norms))
        upload.check()
        if not norms.max(initial=0.0) <= LARGEST_NORM**2:
            return await self._books.refuse(row, f"its norm is {norm:.3g}: this island's training has diverged")
        verdict = self._guard.enter(key.fragment, key.learner, norm, declared.steps, self._books.present())
        row = replace(row, norms_sq=tuple(map(float, norms)), scale=verdict.scale)
        if verdict.refusal:
            return await self._books.refuse(row, verdict.refusal)
        stored = await asyncio.get_running_loop().run_in_executor(self._workers, upload.finish, norms, row.scale)
        await self._books.keep(row, stored)
        return pb.Receipt(
            learner=key.learner, incarnation=key.incarnation, fragment=key.fragment, seq=key.seq, fate=pb.FATE_PENDING
        )

    def note(self, digest: bytes, receipt: pb.Receipt) -> None:
        """A contribution was made durable: the newest of its learner and fragment, unless a newer one is known."""
        place, old = (receipt.learner, receipt.fragment), self._newest.get((receipt.learner, receipt.fragment))
        if old is None or _order(old.receipt) <= _order(receipt):
            self._newest[place] = Decided(digest, receipt)

    def newest_receipt(self, learner: str, incarnation: int, fragment: int) -> pb.Receipt | None:
        """What became of an incarnation's newest contribution to a fragment."""
        newest = self._newest.get((learner, fragment))
        return newest.receipt if newest is not None and newest.receipt.incarnation == incarnation else None

    def decide(self, receipt: pb.Receipt) -> None:
        """Notes the fate of a contribution, for its learner to ask again."""
        newest = self._newest.get((receipt.learner, receipt.fragment))
        if newest is not None and _order(newest.receipt) == _order(receipt):
            self.note(newest.digest, receipt)

    def expire(self, now: float) -> None:
        """Gives back the room of uploads that nobody goes on with."""
        patience_s = self._limits.upload_idle_s
        late = [upload for upload in self._growing.values() if now - upload.touched_at > patience_s]
        for upload in late:
            frame_bytes = upload.size_bytes // upload.frames
            kbit = 8e-3 * frame_bytes / patience_s
            text = (
                f"no frame of {upload.key} came for {patience_s:.0f} s, and it was given up: send it again. A frame of "
                f"{frame_bytes} bytes needs {kbit:.0f} kbit/s: on a slower link begin the run "
                "with --codec int4"
            )
            upload.dropped = upload.dropped or Refused(Status.UNAVAILABLE, text)
        self._give_up([upload.key for upload in late])

    def _drop(self, key: Key) -> None:
        if key in self._finishing:
            return  # it is whole: what else came under its name does not matter
        upload = self._growing.get(key)
        if upload is not None:
            self._forget(key)
            self._spool.release(upload.size_bytes)
            asyncio.get_running_loop().run_in_executor(self._workers, upload.discard)

    def _forget(self, key: Key) -> None:
        self._growing_bytes[key.learner] -= self._growing.pop(key).size_bytes
        del self._headers[key], self._begun_in[key]
        self._ended.pop(key).set()

    def unwritten_bytes(self) -> int:
        """Reserved by uploads that are still to arrive."""
        return sum(upload.size_bytes - upload.received_bytes for upload in self._growing.values())


def _order(receipt: pb.Receipt) -> tuple[int, int]:
    return receipt.incarnation, receipt.seq
