"""Receives contributions. The methods follow the path of a contribution: offer, write, judge, keep or refuse, receipt.

`uploads` contains the state of uploads, and `payload_writer` writes their files. This module has no state.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial

import numpy as np
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec.frame_codec import FrameError, NotFiniteError
from atoll_wire.contract import Fate
from atoll_wire.messages.frame_messages import WireFrame

from atoll_server.access.refusals import Refused, Status
from atoll_server.data.merged_units import UnitRange
from atoll_server.learners.plausibility import Declared, credited
from atoll_server.ledger import shard_ledger
from atoll_server.ledger.rows import ContributionRow, FateRow
from atoll_server.merging.merge import LARGEST_NORM, norms_sq
from atoll_server.rounds import syncer_events as ev
from atoll_server.shard.contributions import receipt_of
from atoll_server.shard.shard import Shard
from atoll_server.storage import crash_points
from atoll_server.storage.payload_writer import ChecksumError
from atoll_server.storage.spool import StoredPayload
from atoll_server.telemetry import entries
from atoll_server.uploads.upload_state import UploadState
from atoll_server.uploads.uploads import Upload

DIVERGED = "this learner's training has diverged; lower its learning rate"


class Intake:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def offer(self, header: pb.PushHeader, now: float) -> Upload | pb.Receipt:
        """Returns a contribution's upload, or the receipt if the contribution already has one. now: monotonic seconds.

        Raises Refused if the contribution is not valid, is too old, or must wait.
        """
        shard = self._shard
        fragment = shard.fragments[header.fragment]
        pending_bytes = shard.contributions.pending_bytes[header.session.learner]
        return shard.uploads.offer(
            header, fragment.version, fragment.rounds, shard.context.run.max_staleness, pending_bytes, now
        )

    async def take(self, upload: Upload, frames: Sequence[pb.Frame | WireFrame], now: float) -> None:
        """Checks and writes the frames of one message. Raises Refused if a frame cannot be accepted.

        The last frame completes the upload, as does a frame with values that are not finite. A frame with a wrong
        checksum may be sent again. Any other invalid frame drops the upload.
        """
        if upload.state is UploadState.DROPPED:
            raise upload.refused()
        for frame in frames:
            if frame.index >= upload.part.frames:
                fix = f"send only the {upload.part.frames} declared frames"
                text = f"frame {frame.index} of {upload.key} does not exist: {fix}"
                raise Refused(Status.INVALID_ARGUMENT, text)
        writing = asyncio.create_task(self._write(upload, frames, now))
        refused = await asyncio.shield(writing)  # the last frame is written even if its stream breaks now
        if refused is not None:
            raise refused

    async def _write(self, upload: Upload, frames: Sequence[pb.Frame | WireFrame], now: float) -> Refused | None:
        """Writes the frames. Returns the error for the stream that sent the frames, or None."""
        shard, uploads = self._shard, self._shard.uploads
        try:
            new = await shard.work.on_frames(upload.part.write, frames)
        except ChecksumError as error:
            return Refused(Status.DATA_LOSS, str(error))
        except NotFiniteError as error:
            new, whole = True, uploads.came_bad(upload, f"{error}: {DIVERGED}")
        except FrameError as error:
            return uploads.drop(upload, Refused(Status.INVALID_ARGUMENT, str(error)))
        except OSError as error:
            text = f"the spool cannot be written ({error.strerror}): check the core's disk and its free space"
            return uploads.drop(upload, Refused(Status.RESOURCE_EXHAUSTED, text))
        else:
            whole = uploads.came(upload, now, new=new)
        if new:
            shard.syncer.uploading(upload.key.learner, upload.key.fragment, now)
        if whole:
            shard.work.spawn(self._finish(upload))
        return None

    # ------------------------------------------------------------------------------ judged, then kept or refused

    async def _finish(self, upload: Upload) -> None:
        """Judges a complete upload, makes the contribution or its refusal durable and ends the upload."""
        shard = self._shard
        try:
            row, refusal = self._judge(upload)
            receipt = await (self._refuse(row, refusal) if refusal else self._keep(row, upload))
        except Exception as error:  # a failed disk or a bug, after which the durable state is unknown
            shard.work.fail(error)
            upload.stop(Refused(Status.UNAVAILABLE, "the core failed and is stopping: try again later"))
            return
        shard.uploads.finish(upload, receipt)

    def _judge(self, upload: Upload) -> tuple[ContributionRow, str]:
        """Returns the upload's row for the ledger and the reason for its refusal (empty if accepted)."""
        header, key, part = upload.header, upload.key, upload.part
        row = ContributionRow(
            key,
            header.cycle,
            header.base_version,
            header.tokens,
            header.steps,
            int(part.codec),
            part.frames,
            part.size_bytes,
            part.digest,
            (),
            1.0,
            self._shard.context.clock.wall(),
            tuple(UnitRange(each.lease, each.after, each.upto) for each in header.units),
        )
        if upload.bad_values:
            return row, upload.bad_values
        counts = self._weighed(key, Declared(header.tokens, header.steps))
        row = replace(row, tokens=counts.tokens, steps=counts.steps)
        norms = norms_sq(part.fragment, [part.squares[index] for index in range(part.frames)])
        norm = math.sqrt(math.fsum(norms))
        if not norms.max(initial=0.0) <= LARGEST_NORM**2:
            return row, f"its norm is {norm:.3g}: {DIVERGED}"
        verdict = self._shard.fragments[key.fragment].norms.enter(key.learner, norm, counts.steps, self._present())
        return replace(row, norms_sq=tuple(map(float, norms)), scale=verdict.scale), verdict.refusal

    def _weighed(self, key: ev.ContributionKey, said: Declared) -> Declared:
        """Returns how many of a contribution's declared tokens and steps count."""
        registry, wall = self._shard.context.registry, self._shard.context.clock.wall()
        entry = registry.entries[key.learner]
        dead = key.incarnation != entry.incarnation and entry.account.past
        spent = entry.account.past[0] if dead else entry.account.current  # past[0]: sums of all dead incarnations
        rates = registry.rates(wall)
        tokens = spent.tokens
        if not dead:  # tokens that were held back at the last report may now count
            tokens, _ = spent.tokens_counted(spent.said_tokens, rates.most(key.learner), wall)
        reported = Declared(tokens, spent.steps)
        unheard_s = max(0.0, wall - (spent.grown_at or spent.joined_at))
        rate, usual = rates.of(key.learner), rates.usual(key.learner)
        counts = credited(said, reported, self._shard.contributions.given(key), unheard_s, rate, usual)
        if counts != said:
            clamped = entries.Clamped(key.learner, said.tokens, said.steps, counts.tokens, counts.steps)
            self._shard.context.record(clamped)
        return counts

    def _present(self) -> Set[str]:
        """Returns the learners that are expected to contribute."""
        now = self._shard.context.clock.monotonic()
        return {name for name, observed in self._shard.syncer.liveness.items() if observed.expected(now)}

    async def _keep(self, row: ContributionRow, upload: Upload) -> pb.Receipt:
        """Makes the payload durable, then its ledger row, and then passes the contribution to the syncer."""
        shard, key, norms = self._shard, row.key, np.array(row.norms_sq, np.float64)
        stored: StoredPayload = await shard.work.on_frames(upload.part.finish, norms, row.scale)
        operation = partial(shard_ledger.add_contribution, generation=shard.context.generation, row=row)
        await shard.context.writer.commit(operation)
        crash_points.point("contribution.committed")
        shard.contributions.accept(row)
        shard.contributions.hold(row, stored)
        shard.context.record(entries.Acknowledged(key, row.cycle))
        shard.dispatch(ev.Contributed(key, row.cycle, row.base_version, row.tokens, row.steps))
        return pb.Receipt(
            learner=key.learner, incarnation=key.incarnation, fragment=key.fragment, seq=key.seq, fate=pb.FATE_PENDING
        )

    async def _refuse(self, row: ContributionRow, reason: str) -> pb.Receipt:
        """Refuses a complete contribution. The receipt becomes durable, and the payload is not kept."""
        shard = self._shard
        fate = FateRow(row.key, Fate.REFUSED, shard.fragments[row.key.fragment].version, reason=reason, dropped=True)
        operation = partial(shard_ledger.add_contribution, generation=shard.context.generation, row=row, fate=fate)
        await shard.context.writer.commit(operation)
        crash_points.point("contribution.refused")
        shard.contributions.accept(row)
        shard.contributions.end(row, fate)
        shard.context.record(entries.ArrivalRefused(fate, row.cycle))
        shard.dispatch(ev.Declined(row.key.learner, row.key.fragment, row.cycle, "its contribution was refused"))
        return receipt_of(fate)

    # ------------------------------------------------------------------------------ acknowledged

    async def receipt(self, upload: Upload) -> pb.Receipt:
        """Waits until an upload has ended. Returns its receipt, or raises Refused if it has none."""
        await upload.ended.wait()
        return self._shard.uploads.receipt(upload)
