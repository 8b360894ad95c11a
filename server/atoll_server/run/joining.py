"""Who may join a run, and its first parameters: one learner is given the lease to send them, and all count at once."""

from __future__ import annotations

import asyncio
import math
import secrets
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import MERGE_KINDS, PROTOCOL, tensor_spec
from atoll_wire.layout import Layout, LayoutError, TensorSpec, first_difference, plan

from atoll_server.access.refusals import Refused, Status
from atoll_server.checkpoints import unshared_tensors
from atoll_server.checkpoints.restore import INITIAL, Restored, initial_states
from atoll_server.checkpoints.tensor_file import TensorFileError, open_tensors
from atoll_server.learners.registry import Entry, Speaker
from atoll_server.rounds import events as ev
from atoll_server.run import first_parameters
from atoll_server.run.core import Core
from atoll_server.run.first_parameters import Lease, Staging, Turns
from atoll_server.storage import crash_points, ledger

log = structlog.get_logger()

MOST_DIMENSIONS = 8


class Joining:
    """The way into one core's run."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lease: Lease | None = None
        self._turns = Turns()
        self._initialising = asyncio.Lock()
        self._loading: asyncio.Task[None] | None = None  # of `--init`

    async def join(self, request: pb.JoinRequest) -> pb.JoinReply:
        """Makes a learner known; says whether it fetches, initialises, or waits. Raises Refused, state untouched."""
        tensors = self._tensors(request)
        if request.protocol != PROTOCOL:
            raise Refused(
                Status.FAILED_PRECONDITION,
                f"protocol {request.protocol} is not spoken here, {PROTOCOL} is: use the same atoll on both sides",
            )
        if request.run and request.run != self._core.run_id:
            raise Refused(
                Status.FAILED_PRECONDITION, f"run {request.run} is not here: this core holds {self._core.run_id}"
            )
        entry, state = await self._let_in(request, tensors)
        if state == pb.JoinReply.STATE_CONFIRM:
            assert entry.challenge is not None, "it was asked to confirm just now"
            return pb.JoinReply(state=state, run=self._core.run_id, token=entry.challenge[1])
        token = entry.token
        entry.dirty, incarnation = False, entry.incarnation
        await self._core.writer.commit(partial(ledger.put_learner, row=self._core.row(entry)))
        crash_points.point("join.row committed")
        Speaker(entry, incarnation).still()
        if self._core.engine is not None:
            self._core.engine.uploads.fence(entry.name, incarnation)
            self._core.engine.contributions.joined(entry.name)
            self._core.engine.dispatch(ev.Joined(entry.name, incarnation))
        assert self._core.layout is not None, "the first to join decides the layout"
        log.info("joined", learner=entry.name, incarnation=incarnation, region=entry.region, state=state)
        return pb.JoinReply(
            state=state, run=self._core.run_id, generation=self._core.generation, epoch=self._core.epoch,
            incarnation=incarnation, token=token, settings=self._core.settings_message(),
            fingerprint=self._core.layout.fingerprint, versions=self._core.versions(),
            run_tokens=self._core.roster.tokens(), struck_tokens=self._core.roster.struck_tokens(), retry_s=1.0,
            log=self._core.happenings.number,
        )  # fmt: skip

    async def _let_in(
        self, request: pb.JoinRequest, tensors: tuple[TensorSpec, ...]
    ) -> tuple[Entry, pb.JoinReply.State]:
        """Checks a model against the run's, and its name; before there are parameters, settles who sends them."""
        core, now = self._core, time.monotonic()
        async with self._initialising:
            free = core.engine is None and self._loading is None and self._free_for(request.learner, now)
            layout = await asyncio.to_thread(self._planned, tensors) if free else self._same_model(request, tensors)
            entry = core.roster.join(
                request.learner, request.region, request.nonce, request.incarnation, request.process_age_s,
                request.proof, secrets.token_bytes(16), core.clock.now(), now,
            )  # fmt: skip
            if entry.nonce != request.nonce:
                return entry, pb.JoinReply.STATE_CONFIRM
            if free:
                core.layout, core.frozen_digest = layout, request.frozen_digest.hex()
                if self._lease is None or self._lease.entry is not entry or self._over(self._lease, now):
                    turn_s = self._turns.took(entry.name, core.settings.limits.turn_s)
                    self._lease = Lease(entry, now + core.settings.limits.lease_s, now + turn_s)
            speaker = Speaker(entry, entry.incarnation)
            if core.engine is None and core.settings.init is not None:
                await self._load(core.settings.init)
                speaker.still()
            if core.engine is not None:
                return entry, pb.JoinReply.STATE_READY
            if free:
                return entry, pb.JoinReply.STATE_INITIALISE
            self._turns.waits(entry.name, now)
            return entry, pb.JoinReply.STATE_WAIT

    def _free_for(self, name: str, now: float) -> bool:
        """Whether a learner is given the lease, or has it."""
        if self._lease is None or self._over(self._lease, now):
            return self._turns.of(name, now)
        return self._lease.entry.name == name

    def _over(self, lease: Lease, now: float) -> bool:
        return lease.over(now, self._turns.wanted(lease.entry.name, now))

    def _tensors(self, request: pb.JoinRequest) -> tuple[TensorSpec, ...]:
        limits = self._core.settings.limits
        if not 0 < len(request.tensors) <= limits.tensors:
            raise Refused(Status.INVALID_ARGUMENT, f"{len(request.tensors)} tensors: 1 to {limits.tensors} are taken")
        if (tied := sum(len(tensor.tied_names) for tensor in request.tensors)) > limits.tensors:
            raise Refused(Status.INVALID_ARGUMENT, f"{tied} names of tied tensors: at most {limits.tensors} are taken")
        for tensor in request.tensors:
            names = (tensor.name, *tensor.tied_names)
            if (
                max(len(name.encode()) for name in names) > limits.tensor_name_bytes
                or len(tensor.shape) > MOST_DIMENSIONS
            ):
                raise Refused(
                    Status.INVALID_ARGUMENT, f'tensor "{tensor.name[:80]}" has too long a name or too many dimensions'
                )
            if tensor.kind not in MERGE_KINDS:
                raise Refused(Status.INVALID_ARGUMENT, f'tensor "{tensor.name}" does not say how it is merged')
        parameters = sum(math.prod(tensor.shape) for tensor in request.tensors)
        if parameters > limits.parameters:
            raise Refused(
                Status.INVALID_ARGUMENT, f"{parameters} trainable parameters: at most {limits.parameters} are taken"
            )
        return tuple(map(tensor_spec, request.tensors))

    def _planned(self, tensors: tuple[TensorSpec, ...]) -> Layout:
        try:
            return plan(tensors, self._core.run.fragments)
        except LayoutError as error:
            raise Refused(Status.FAILED_PRECONDITION, str(error)) from error

    def _same_model(self, request: pb.JoinRequest, tensors: tuple[TensorSpec, ...]) -> Layout:
        """The run's layout, if this model has it."""
        assert self._core.layout is not None, "a lease or an engine comes with a layout"
        difference = first_difference(self._core.layout.tensors, tensors)
        if difference is not None:
            raise Refused(
                Status.FAILED_PRECONDITION, f'learner "{request.learner[:80]}" has another model: {difference}'
            )
        if request.frozen_digest.hex() != self._core.frozen_digest:
            raise Refused(
                Status.FAILED_PRECONDITION,
                f'learner "{request.learner[:80]}" has other values in its frozen parameters: load those of this run, '
                "or name what changes in each learner (a teacher) in Learner(unshared=)",
            )
        return self._core.layout

    # ------------------------------------------------------------------------------ first parameters

    async def stage(self, speaker: Speaker, header: pb.InitialiseHeader) -> Staging:
        """Begins to take the first parameters from the holder of the lease. Raises Refused."""
        lease = self._held(speaker)
        assert self._core.layout is not None, "a lease comes with a layout"
        directory = self._core.settings.directory
        first_parameters.check_room(self._core.settings, header.size_bytes, self._core.layout, self._core.disk)
        made = await asyncio.to_thread(Staging, directory, header.size_bytes, header.sha256, self._core.disk)
        lease.upload = made
        return made

    def came(self, speaker: Speaker, staging: Staging) -> None:
        """Bytes arrived: the holder is alive, if it still is the holder. Raises Refused."""
        until = time.monotonic() + self._core.settings.limits.lease_s
        self._held(speaker, staging).came(staging.received, until)

    def _held(self, speaker: Speaker, staging: Staging | None = None) -> Lease:
        """The lease of whoever speaks. staging: its upload, which must be its newest. Raises Refused."""
        speaker.still()
        if self._core.engine is not None:
            raise Refused(Status.UNAVAILABLE, "the run has its first parameters: join again and fetch them")
        lease = self._lease
        if lease is None or lease.entry is not speaker.entry:
            raise Refused(Status.UNAVAILABLE, "another learner sends the first parameters: join again and wait")
        if staging is not None and lease.upload is not staging:
            raise Refused(Status.UNAVAILABLE, "the first parameters are sent anew, over another call: this one ends")
        return lease

    async def accept(self, speaker: Speaker, staging: Staging) -> None:
        """Version 0, all at once: checked, durable, committed, then visible. Accepted exactly once."""
        async with self._initialising:
            lease, entry = self._held(speaker, staging), speaker.entry
            try:
                await self._accept(staging, speaker)
            except Refused:
                lease.until = -math.inf  # whoever waits is next
                raise
            entry.account.bytes_whole += self._core.engine.initial.data.nbytes if self._core.engine is not None else 0

    async def _load(self, path: Path) -> None:
        """Once, however often learners ask meanwhile, and however soon they hang up: a large file takes its time."""
        if self._loading is None:
            self._loading = self._core.underway(self._from_file(path))
        try:
            await asyncio.shield(self._loading)
        finally:
            if self._loading.done():
                self._loading = None

    async def _from_file(self, path: Path) -> None:
        core, layout = self._core, self._core.layout
        assert layout is not None, "the first to join decides the layout"
        directory = core.settings.directory
        try:
            size = (await asyncio.to_thread(path.stat)).st_size
            first_parameters.check_room(core.settings, size, layout, core.disk)
            staging = await asyncio.to_thread(first_parameters.stage_file, path, directory, core.disk)
            try:
                await self._accept(staging)
            finally:
                await asyncio.to_thread(staging.close)
        except OSError as error:
            text = f"--init {path} cannot be copied into {directory} ({error.strerror}): look at the file and the disk"
            log.error("first parameters refused", detail=text)
            raise Refused(Status.RESOURCE_EXHAUSTED, text) from error

    async def _accept(self, staging: Staging, speaker: Speaker | None = None) -> None:
        """speaker: who sent it; None: it is the file of `--init`."""
        layout, directory = self._core.layout, self._core.settings.directory
        assert layout is not None, "the first to join decides the layout"
        file = await asyncio.to_thread(staging.check, layout)
        try:
            states = await asyncio.to_thread(initial_states, layout, file)
        except TensorFileError as error:
            raise Refused(Status.INVALID_ARGUMENT, str(error)) from error
        if speaker is not None:
            speaker.still()  # from here on it is under way to being durable
        await asyncio.to_thread(staging.publish, directory)
        meta = {
            "tensors": first_parameters.tensors_as_data(layout.tensors), "fragments": len(layout.fragments),
            "fingerprint": layout.fingerprint.hex(), "frozen_digest": self._core.frozen_digest,
            "initial_sha256": staging.sha256.hex(),
            "settings": self._core.run.changed(fragments=len(layout.fragments)).model_dump(mode="json"),
        }  # fmt: skip
        await self._core.writer.commit(partial(_put_meta, meta=meta))
        crash_points.point("initial.committed")
        self._core.initial_sha256 = staging.sha256.hex()
        self._core.run = self._core.run.changed(fragments=len(layout.fragments))
        file = open_tensors(directory / INITIAL, self._core.disk)
        self._core.begin(Restored(layout, file, states, {}, []), None)
        self._lease = None
        if speaker is None and (stale := unshared_tensors.warning(unshared_tensors.listed(file.metadata))):
            log.warning("the run begins with tensors that the run before did not share", detail=stale)
        log.info("first parameters accepted", parameters=layout.parameters, fragments=len(layout.fragments))


def _put_meta(db: sqlite3.Connection, meta: dict[str, Any]) -> None:
    for key, value in meta.items():
        ledger.put_meta(db, key, value)
