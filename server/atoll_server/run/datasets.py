"""Leases the units of the run's datasets to learners. The registrar does this for all shards.

Every lease and every decision about a unit is durable before a learner can see it. The merged work on units is not
stored here: shards derive it from their ledgers and send it as sums (`MergedUnits`).
"""

from __future__ import annotations

import math
import re
import secrets
from functools import partial
from typing import Any

from atoll_wire import outer_pb2 as pb
from atoll_wire.unit_order import MAX_UNITS, unit_at

from atoll_server.access.refusals import Refused, Status
from atoll_server.data.accounts import EVICTED, FENCED, GONE, LEFT, SILENT, Changes, Dataset, Declared, Lease
from atoll_server.learners.learner_registry import LearnerProcess
from atoll_server.ledger import data_ledger
from atoll_server.run.registrar import Registrar
from atoll_server.settings import Limits
from atoll_server.storage import crash_points

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_DATASETS = 64
MAX_EPOCHS = 1 << 20
MAX_POSITIONS = 1 << 60  # units of all epochs
MAX_FINGERPRINT = 64  # bytes
MAX_WANTED = 512  # limit on the units in one reply, which takes milliseconds to compute
MAX_HELD = 1 << 16  # undecided units of one learner, in all its leases
MAX_ORDINAL = 1 << 62
LEASE_BITS = 62
MAX_NAMED = 5  # learners that a reply names
RETRY_S = 1.0
LOOK_S = 0.25  # shortest time between checks of all leases for requests; housekeeping checks once per second


class Datasets:
    """The datasets of one run, whose accounts are in the registrar's ledger."""

    def __init__(self, run: Registrar, limits: Limits) -> None:
        self._run = run
        self._silence_s = limits.units_silence_s
        self._accounts = run.data
        self._heard_at: dict[int, float] = {}  # by lease: the last request for units, in wall-clock seconds
        self._looked_at = -math.inf
        self._ended_at: dict[int, float] = {}  # by lease: when this process saw that it had ended, in monotonic seconds

    def as_data(self) -> list[Any]:
        """Returns the accounts for a checkpoint, whose parameters are read later and thus contain all this work."""
        for lease in self._accounts.leases.values():
            self._take_facts(lease)
        return data_ledger.as_data(self._accounts)

    # ------------------------------------------------------------------------------ leasing

    async def lease(self, process: LearnerProcess, request: pb.LeaseUnitsRequest) -> pb.LeaseUnitsReply:
        """Leases units to a learner and resends units that it has not received.

        Raises Refused if the request is invalid, or its dataset differs from the run's dataset with this name.
        """
        self._run.running()
        declared = declared_dataset(request.dataset)
        if max(request.lease, request.received, request.finished) > MAX_ORDINAL or request.finished > request.received:
            raise _invalid(request, "has impossible numbers")
        if self._is_out_of(declared.name) and self._run.clock.monotonic() - self._looked_at >= LOOK_S:
            await self.look()
            process.check_current()
        lease = self._known(declared, process, request)
        # From here on, nothing may be refused: the accounts change, and their rows must be stored.
        changes = Changes()
        if lease is None:
            lease = self._begun(declared, process, changes)
        received = request.received if request.lease == lease.id else 0
        if request.lease == lease.id:
            lease.finished = max(lease.finished, request.finished)
        self._heard_at[lease.id] = self._run.clock.wall()
        if received == lease.handed and self._held(lease.learner) < MAX_HELD:
            self._accounts.hand_out(lease, min(max(1, request.wanted), MAX_WANTED), changes)
        reply = self._reply(lease, received)
        rows = data_ledger.rows_of(changes)
        await self._run.writer.commit(partial(data_ledger.write, rows=rows))  # also waits for an earlier call's rows
        crash_points.point("units.leased")
        process.check_current()
        return reply

    def _held(self, learner: str) -> int:
        """Returns the number of a learner's undecided units, including those under leases of its earlier processes."""
        return sum(len(each.units) for each in self._accounts.leases.values() if each.learner == learner)

    def _is_out_of(self, name: str) -> bool:
        """Returns whether all units of a dataset are handed out.

        If so, only a decision can make a unit available again.
        """
        dataset = self._accounts.named(name)
        return dataset is not None and not dataset.pool and dataset.next == dataset.declared.positions

    def _known(self, declared: Declared, process: LearnerProcess, request: pb.LeaseUnitsRequest) -> Lease | None:
        """Returns the process's living lease, or None if it must begin one. Changes nothing.

        If the request does not name this lease, the reply that began the lease was lost, or the call is an old one.
        Raises Refused if the run has a different dataset with this name or the request does not match the lease.
        """
        dataset = self._accounts.named(declared.name)
        if dataset is None:
            if len(self._accounts.datasets) >= MAX_DATASETS:
                text = f"the run has {MAX_DATASETS} datasets (the limit): use one of them"
                raise Refused(Status.FAILED_PRECONDITION, text)
            return None
        for what in ("units", "tokens", "seed", "epochs", "fingerprint"):
            known, other = getattr(dataset.declared, what), getattr(declared, what)
            if known != other:
                text = (
                    f'dataset "{declared.name}" of the run has {what} {known}, but this learner declares {other}: use '
                    "the other learners' data and arguments, or another name"
                )
                raise Refused(Status.FAILED_PRECONDITION, text)
        if (lease := self._living(dataset, process)) is None:
            return None
        received = request.received if request.lease == lease.id else 0
        if received > lease.handed or any(each not in lease.units for each in range(received + 1, lease.handed + 1)):
            raise _invalid(
                request,
                f"reports {received} of {lease.handed} units as received, which contradicts earlier requests",
            )
        return lease

    def _living(self, dataset: Dataset, process: LearnerProcess) -> Lease | None:
        place = (dataset.id, process.entry.name, process.incarnation)
        mine = (each for each in self._accounts.leases.values() if not each.ended)
        return next((each for each in mine if (each.dataset, each.learner, each.incarnation) == place), None)

    def _begun(self, declared: Declared, process: LearnerProcess, changes: Changes) -> Lease:
        """Begins a lease. Adds the dataset if it is new."""
        dataset = self._accounts.named(declared.name) or self._accounts.add(declared, changes)
        lease = Lease(secrets.randbits(LEASE_BITS) | 1, dataset.id, process.entry.name, process.incarnation)
        self._accounts.open_lease(lease, changes)
        self._run.attached.await_lease(lease.id, lease.learner, lease.incarnation)
        return lease

    def _reply(self, lease: Lease, received: int) -> pb.LeaseUnitsReply:
        """Returns the units of a lease that its process has not received."""
        dataset, reply = self._accounts.datasets[lease.dataset], pb.LeaseUnitsReply(lease=lease.id, retry_s=RETRY_S)
        declared = dataset.declared
        for ordinal in range(received + 1, min(lease.handed, received + MAX_WANTED) + 1):
            epoch, place = divmod(lease.units[ordinal].position, declared.units)
            reply.units.append(unit_at(place, declared.units, declared.seed, epoch))
            reply.epochs.append(epoch)
        if reply.units:
            reply.state = pb.LeaseUnitsReply.STATE_LEASED
        elif self._accounts.all_finished(dataset):
            reply.state = pb.LeaseUnitsReply.STATE_FINISHED
        else:
            reply.state = pb.LeaseUnitsReply.STATE_WAIT
            others = (each for each in self._accounts.leases.values() if each is not lease and each.units)
            held_by = {each.learner for each in others if each.dataset == dataset.id}
            reply.held_by.extend(sorted(held_by)[:MAX_NAMED])
        return reply

    # ------------------------------------------------------------------------------ deciding

    async def look(self) -> None:
        """Ends the leases of lost learners and decides units. The changes are durable when this returns."""
        over = self._decide(changes := Changes())
        if changes:
            await self._run.writer.commit(partial(data_ledger.write, rows=data_ledger.rows_of(changes)))
            crash_points.point("units.decided")
        for lease in over:  # not earlier: if a crash undoes the decisions, the shards' sums are needed again
            self._forget(lease)

    def _decide(self, changes: Changes) -> list[Lease]:
        """Decides units. Returns the leases that are over."""
        over = []
        wall = self._run.clock.wall()
        self._looked_at = now = self._run.clock.monotonic()
        for lease in list(self._accounts.leases.values()):
            if not lease.ended and (why := self._lost(lease, wall)):
                self._accounts.end(lease, why, changes)
            self._take_facts(lease)
            self._conclude(lease, now)
            self._accounts.decide(lease, changes)
            if lease.id not in self._accounts.leases:
                over.append(lease)
        return over

    def _lost(self, lease: Lease, wall: float) -> str:
        """Returns why a lease ends now, or an empty string. wall: wall-clock seconds."""
        entry = self._run.registry.entries[lease.learner]
        if entry.incarnation != lease.incarnation:
            return FENCED
        if entry.evicted:
            return EVICTED
        if entry.account.left_at is not None:
            return LEFT if entry.account.left_itself else GONE
        heard_at = max(entry.account.heard_at, self._run.registry.since, self._heard_at.get(lease.id, 0.0))
        return SILENT if wall - heard_at > self._silence_s else ""

    def _take_facts(self, lease: Lease) -> None:
        """Updates a lease with the shards' sums of the merged work on its units."""
        here = self._run.running().contributions
        lease.by_fragment.update(here.merged_units(lease.learner, lease.incarnation, lease.id))
        for shard in self._run.attached.all():
            if (sums := shard.leases.get(lease.id)) is not None:
                lease.by_fragment.update(sums.by_fragment)

    def _conclude(self, lease: Lease, now: float) -> None:
        """Finds out whether more work on an ended lease's units can be merged. now: monotonic seconds."""
        if lease.ended:
            ended_at = self._ended_at.setdefault(lease.id, now)
            run, entry = self._run, self._run.registry.entries[lease.learner]
            left = lease.ended == LEFT or (entry.account.left_at is not None and entry.account.left_itself)
            over = left or entry.incarnation > lease.incarnation  # otherwise, the process may continue with its work
            here = over and not run.running().may_merge(lease.learner, lease.incarnation)
            facts = run.attached.facts(lease.id)
            if facts is not None:  # after a restart, other shards may have merged more than this process knows
                lease.settled = here and all(each.settled for each in facts)
                lease.overdue = lease.ended in {SILENT, EVICTED, GONE} or now - ended_at > self._silence_s

    def _forget(self, lease: Lease) -> None:
        self._heard_at.pop(lease.id, None)
        self._ended_at.pop(lease.id, None)
        self._run.attached.lease_over(lease.id)
        if (shard := self._run.shard) is not None:
            shard.contributions.forget_units(lease.learner, lease.incarnation, lease.id)


def declared_dataset(message: pb.DatasetDeclaration) -> Declared:
    """Returns a dataset as a learner declares it. Raises Refused if the declaration is invalid."""
    if not NAME.fullmatch(message.name):
        text = f'dataset name "{message.name[:80]}" is not allowed: use 1 to 64 letters, digits, ".", "_" or "-"'
        raise Refused(Status.INVALID_ARGUMENT, text)
    possible = 0 < message.units <= MAX_UNITS and 0 < message.epochs <= MAX_EPOCHS
    if not possible or message.units * message.epochs > MAX_POSITIONS or message.tokens > MAX_UNITS:
        text = (
            f'dataset "{message.name}" declares {message.units} units, {message.tokens} tokens per unit and '
            f"{message.epochs} epochs: use 1 to {MAX_UNITS} units, 1 to {MAX_EPOCHS} epochs, at most {MAX_POSITIONS} "
            f"units in all epochs, and at most {MAX_UNITS} tokens per unit"
        )
        raise Refused(Status.INVALID_ARGUMENT, text)
    if len(message.fingerprint) > MAX_FINGERPRINT:
        text = f'the fingerprint of dataset "{message.name}" is too long: use at most {MAX_FINGERPRINT} bytes'
        raise Refused(Status.INVALID_ARGUMENT, text)
    fingerprint = message.fingerprint.hex()
    return Declared(message.name, message.units, message.tokens, message.seed, message.epochs, fingerprint)


def _invalid(request: pb.LeaseUnitsRequest, what: str) -> Refused:
    text = (
        f'a request for units of dataset "{request.dataset.name}" {what}: use the same version of Atoll on both sides'
    )
    return Refused(Status.INVALID_ARGUMENT, text)
