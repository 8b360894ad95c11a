"""Handles learners' Joins and the upload of the initial parameters by one learner."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import MERGE_KINDS, PROTOCOL, tensor_spec
from atoll_wire.layout.layout import Layout, LayoutError, TensorSpec, first_difference, plan, remedy
from atoll_wire.layout.tensor_data import tensors_as_data
from atoll_wire.layout.tensor_header import TensorFileError
from atoll_wire.model_file import unshared_tensors
from atoll_wire.security.certificate import allows_name, brief

from atoll_server.access.refusals import Refused, Status
from atoll_server.checkpoints.parameter_source import open_source
from atoll_server.checkpoints.restore import INITIAL, Restored, initial_states
from atoll_server.checkpoints.tensor_file import open_tensors
from atoll_server.learners.learner_registry import LearnerProcess, LearnerRegistry, RegistryEntry
from atoll_server.run import initial_parameters
from atoll_server.run.initial_parameters import Lease, LeaseTurns, StagedFile
from atoll_server.run.known_run import Waiting
from atoll_server.run.registrar import Registrar
from atoll_server.settings import CoreSettings, Limits
from atoll_server.storage.disk import Disk
from atoll_server.telemetry import entries

log = structlog.get_logger()

MAX_DIMENSIONS = 8

Underway: TypeAlias = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


class Joining:
    """Handles one run's Joins. begin: called when the initial parameters are durable. underway: `Core.underway`."""

    def __init__(
        self, run: Registrar, settings: CoreSettings, disk: Disk, begin: Callable[[Restored], None], underway: Underway
    ) -> None:
        self._run = run
        self._settings = settings
        self._disk = disk
        self._begin = begin
        self._underway = underway
        self._lease: Lease | None = None
        self._turns = LeaseTurns()
        self._initialising = asyncio.Lock()
        self._loading: asyncio.Task[None] | None = None  # loads the `--init` model

    async def join(self, request: pb.JoinRequest, by: str, fleet: str = "") -> pb.JoinReply:
        """Joins a learner to the run. The reply's state tells the learner what to do next.

        by: the caller. fleet: the names in the learner's certificate if it is the certificate of a fleet. Raises
        Refused if the learner may not join.
        """
        tensors = declared_tensors(request, self._settings.limits)
        if request.protocol != PROTOCOL:
            raise Refused(
                Status.FAILED_PRECONDITION,
                f"the learner uses protocol {request.protocol}, but this core uses {PROTOCOL}: use the same version "
                "of Atoll on both sides",
            )
        run = self._run
        if request.run and request.run != run.run_id:
            raise Refused(
                Status.FAILED_PRECONDITION,
                f"this core serves run {run.run_id}, not {request.run}: correct the server address or restart "
                "the learner",
            )
        entry, state = await self._let_in(request, tensors, fleet)
        if state == pb.JoinReply.STATE_CONFIRM:
            assert entry.challenge is not None, "the registry set the challenge just now"
            return pb.JoinReply(state=state, run=run.run_id, token=entry.challenge[1])
        token, incarnation = run.token(entry), entry.incarnation
        await run.joined(entry, by, state)
        assert run.layout is not None, "the first Join decides the layout"
        return pb.JoinReply(
            state=state,
            run=run.run_id,
            generation=run.generation,
            epoch=run.epoch,
            incarnation=incarnation,
            token=token,
            settings=run.settings_message(),
            fingerprint=run.layout.fingerprint,
            versions=run.versions(),
            run_tokens=run.registry.tokens(),
            voided_tokens=run.registry.voided_tokens(),
            retry_s=1.0,
            log=run.shard.follower_log.number if run.shard is not None else 0,
            shards=run.places() if run.shard is not None else (),
            earlier_tokens=entry.account.earlier("said_tokens"),
            earlier_steps=entry.account.earlier("said_steps"),
        )

    async def _let_in(
        self, request: pb.JoinRequest, tensors: tuple[TensorSpec, ...], fleet: str
    ) -> tuple[RegistryEntry, pb.JoinReply.State]:
        """Admits a learner.

        Returns its registry entry and the state for the reply. Raises Refused if it may not join.
        """
        run, now = self._run, self._run.clock.monotonic()
        async with self._initialising:
            check_fleet(run.registry, request.learner, fleet, request.nonce)
            free = self._waiting() and self._loading is None and self._free_for(request.learner, now)
            layout = await asyncio.to_thread(self._planned, tensors) if free else self._same_model(request, tensors)
            entry = run.registry.join(
                request.learner,
                request.region,
                request.nonce,
                request.incarnation,
                request.process_age_s,
                request.proof,
                secrets.token_bytes(16),
                run.clock.wall(),
                now,
            )
            if entry.nonce != request.nonce:
                return entry, pb.JoinReply.STATE_CONFIRM
            if free:
                run.propose(layout, request.frozen_digest.hex())
                if self._lease is None or self._lease.entry is not entry or self._over(self._lease, now):
                    turn_s = self._turns.took(entry.name, self._settings.limits.turn_s)
                    self._lease = Lease(entry, now + self._settings.limits.lease_s, now + turn_s)
            process = LearnerProcess(entry, entry.incarnation)
            if self._waiting() and self._settings.init is not None:
                await self._load(self._settings.init)
                process.check_current()
            if not self._waiting():
                return entry, pb.JoinReply.STATE_READY
            if free:
                return entry, pb.JoinReply.STATE_INITIALISE
            self._turns.waits(entry.name, now)
            return entry, pb.JoinReply.STATE_WAIT

    def _waiting(self) -> bool:
        return isinstance(self._run.state, Waiting)

    def _held_here(self, layout: Layout) -> int:
        """Returns the number of parameters that this process will hold."""
        owned = self._run.attached.fragments(layout, self._run.number)
        return sum(layout.fragments[index].length for index in owned)

    def _free_for(self, name: str, now: float) -> bool:
        """Returns whether a learner holds the lease or may get it now."""
        if self._lease is None or self._over(self._lease, now):
            return self._turns.of(name, now)
        return self._lease.entry.name == name

    def _over(self, lease: Lease, now: float) -> bool:
        return lease.over(now, self._turns.wanted(lease.entry.name, now))

    def _planned(self, tensors: tuple[TensorSpec, ...]) -> Layout:
        if missing := self._run.attached.waited_for():
            text = f"the run cannot begin without {missing}: start each missing shard"
            raise Refused(Status.UNAVAILABLE, text)
        try:
            layout = plan(tensors, self._run.settings.fragments)
            self._run.attached.fragments(layout, self._run.number)
            return layout
        except LayoutError as error:
            raise Refused(Status.FAILED_PRECONDITION, str(error)) from error

    def _same_model(self, request: pb.JoinRequest, tensors: tuple[TensorSpec, ...]) -> Layout:
        """Returns the run's layout. Raises Refused if the learner's model differs."""
        assert self._run.layout is not None, "a run with a lease or a shard has a layout"
        ours = self._run.layout.tensors
        difference = first_difference(ours, tensors)
        if difference is not None:
            raise Refused(
                Status.FAILED_PRECONDITION,
                f'learner "{request.learner[:80]}" has a different model: {difference}: {remedy(ours, tensors)}',
            )
        if request.frozen_digest.hex() != self._run.frozen_digest:
            raise Refused(
                Status.FAILED_PRECONDITION,
                f'learner "{request.learner[:80]}" has different values in frozen parameters: load the run\'s values, '
                "or name tensors that learners change themselves, such as a teacher's, in Learner(unshared=)",
            )
        return self._run.layout

    # ------------------------------------------------------------------------------ initial parameters

    async def stage(self, process: LearnerProcess, header: pb.InitialiseHeader) -> StagedFile:
        """Begins an upload of the initial parameters.

        Raises Refused if the caller does not hold the lease or the model does not fit in memory or on the disk.
        """
        lease = self._held(process)
        assert self._run.layout is not None, "a run with a lease has a layout"
        directory = self._settings.directory
        initial_parameters.check_room(self._settings, header.size_bytes, self._held_here(self._run.layout), self._disk)
        made = StagedFile(directory, header.size_bytes, header.sha256, self._disk)
        await asyncio.to_thread(made.begin)
        lease.upload = made
        return made

    def came(self, process: LearnerProcess, staging: StagedFile) -> None:
        """Renews the lease after bytes have arrived. Raises Refused if the process no longer holds the lease."""
        until = self._run.clock.monotonic() + self._settings.limits.lease_s
        self._held(process, staging).came(staging.received, until)

    def _held(self, process: LearnerProcess, staging: StagedFile | None = None) -> Lease:
        """Returns the caller's lease.

        Raises Refused if the caller has no lease or `staging` is not its newest upload.
        """
        process.check_current()
        if not self._waiting():
            raise Refused(Status.UNAVAILABLE, "the run already has its initial parameters: join again and fetch them")
        lease = self._lease
        if lease is None or lease.entry is not process.entry:
            raise Refused(Status.UNAVAILABLE, "another learner is sending the initial parameters: join again and wait")
        if staging is not None and lease.upload is not staging:
            raise Refused(
                Status.UNAVAILABLE, "a newer call of this learner is sending the initial parameters: this call ends"
            )
        return lease

    async def accept(self, process: LearnerProcess, staging: StagedFile) -> None:
        """Accepts the initial parameters, which become version 0 of every fragment.

        Learners can fetch the parameters only after they are checked, durable and committed. Raises Refused if the file
        is not valid or the caller no longer holds the lease.
        """
        async with self._initialising:
            lease, entry = self._held(process, staging), process.entry
            try:
                entry.account.bytes_whole += await self._accept(staging, process)
            except Refused:
                lease.until = -math.inf  # the next waiting learner gets the lease
                raise

    async def _load(self, path: Path) -> None:
        """Loads the `--init` model. Concurrent Joins share one task, which continues even if they are cancelled."""
        if self._loading is None:
            self._loading = self._underway(self._from_file(path))
        try:
            await asyncio.shield(self._loading)
        finally:
            if self._loading.done():
                self._loading = None

    async def _from_file(self, path: Path) -> None:
        layout, directory = self._run.layout, self._settings.directory
        assert layout is not None, "the first to join decides the layout"
        try:
            source = await asyncio.to_thread(open_source, path)
            initial_parameters.check_room(self._settings, source.size_bytes, self._held_here(layout), self._disk)
            staging = await asyncio.to_thread(initial_parameters.stage_source, source, directory, self._disk)
            try:
                await self._accept(staging)
            finally:
                await asyncio.to_thread(staging.close)
        except TensorFileError as error:
            raise Refused(Status.INVALID_ARGUMENT, str(error)) from error
        except OSError as error:
            text = f"--init {path} cannot be copied into {directory} ({error.strerror}): check the file and the disk"
            refused = entries.InitialParametersRefused(text, by_disk=True)
            self._run.record(refused)
            raise Refused(Status.RESOURCE_EXHAUSTED, text) from error

    async def _accept(self, staging: StagedFile, process: LearnerProcess | None = None) -> int:
        """Accepts a staged file. Returns its size in bytes. process: the file's sender; None for the `--init` model."""
        layout, directory = self._run.layout, self._settings.directory
        assert layout is not None, "the first to join decides the layout"
        file = await asyncio.to_thread(staging.check, layout.tensors)
        owned = self._run.attached.fragments(layout, self._run.number)
        try:
            states = await asyncio.to_thread(initial_states, layout, file, owned)
        except TensorFileError as error:
            raise Refused(Status.INVALID_ARGUMENT, str(error)) from error
        if process is not None:
            process.check_current()  # the last check before the parameters become durable
        await asyncio.to_thread(staging.publish, directory)
        await self._run.begin(layout, tensors_as_data(layout.tensors), staging.sha256, owned)
        file = open_tensors(directory / INITIAL, self._disk)
        self._begin(Restored(layout, file, states, {}, []))
        self._lease = None
        if process is None and (stale := unshared_tensors.warning(unshared_tensors.listed(file.metadata))):
            log.warning("the initial parameters include tensors that an earlier run did not share", detail=stale)
        accepted = entries.InitialParameters(layout.parameters, len(layout.fragments))
        self._run.record(accepted)
        return file.data.nbytes


def check_fleet(registry: LearnerRegistry, name: str, fleet: str, nonce: int) -> None:
    """Raises Refused for a new process if its fleet, which shares one key, contains an evicted learner.

    The evicted learner has the same key, so the core cannot tell it from another new process of the fleet. The fleet's
    running processes may join again, because only they know the nonce of their first Join.
    fleet: the names in the learner's certificate; empty if it is not the certificate of a fleet.
    """
    entry = registry.entries.get(name)
    if not fleet or (entry is not None and (entry.evicted or entry.nonce == nonce)):
        return
    gone = next((each for each in registry.entries.values() if each.evicted and allows_name(fleet, each.name)), None)
    if gone is not None:
        text = f'the certificate "{brief(fleet)}" is not for new processes such as "{name[:80]}", since it is also for'
        fix = f"issue a certificate without this name, or readmit the learner (atoll evict {gone.name} --undo)"
        raise Refused(Status.PERMISSION_DENIED, f'{text} the evicted learner "{gone.name}": {fix}')


def declared_tensors(request: pb.JoinRequest, limits: Limits) -> tuple[TensorSpec, ...]:
    """Returns the trainable tensors that a learner declares. Raises Refused if any is invalid or exceeds a limit."""
    if not 0 < len(request.tensors) <= limits.tensors:
        raise Refused(
            Status.INVALID_ARGUMENT,
            f"the model has {len(request.tensors)} trainable tensors instead of 1 to {limits.tensors} "
            "(--limit-tensors): change which tensors require gradients",
        )
    if (tied := sum(len(tensor.tied_names) for tensor in request.tensors)) > limits.tensors:
        raise Refused(
            Status.INVALID_ARGUMENT,
            f"the model has {tied} names of tied tensors, but at most {limits.tensors} are accepted "
            "(--limit-tensors): tie fewer tensors",
        )
    for tensor in request.tensors:
        names = (tensor.name, *tensor.tied_names)
        if max(len(name.encode()) for name in names) > limits.tensor_name_bytes or len(tensor.shape) > MAX_DIMENSIONS:
            raise Refused(
                Status.INVALID_ARGUMENT,
                f'tensor "{tensor.name[:80]}" has a name longer than {limits.tensor_name_bytes} bytes, or more '
                f"than {MAX_DIMENSIONS} dimensions: shorten the name, or reshape the tensor",
            )
        if tensor.kind not in MERGE_KINDS:
            raise Refused(
                Status.INVALID_ARGUMENT,
                f'tensor "{tensor.name}" does not declare its kind of merge: '
                "use the same version of Atoll on both sides",
            )
    parameters = sum(math.prod(tensor.shape) for tensor in request.tensors)
    if parameters > limits.parameters:
        raise Refused(
            Status.INVALID_ARGUMENT,
            f"the model has {parameters} trainable parameters, but at most {limits.parameters} are accepted: "
            "train fewer, or raise the core's --limit-parameters",
        )
    return tuple(map(tensor_spec, request.tensors))
