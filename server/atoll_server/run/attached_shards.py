"""A run's shards that are separate processes, as the registrar knows them.

Each shard process keeps one call to the registrar open (`atoll.shards.v1.Registry.Attach`). The registrar sends its
decisions, and the shard sends summaries. The registrar keeps the address and the last summary of a shard that is not
attached.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atoll_wire import outer_pb2 as pb
from atoll_wire import shards_pb2 as sh
from atoll_wire.contract import PROTOCOL
from atoll_wire.layout.layout import Layout
from atoll_wire.layout.sharding import MAX_SHARDS, divide
from atoll_wire.process.clock import SYSTEM, Clock

from atoll_server.access.refusals import Refused, Status
from atoll_server.data.merged_units import MergedUnits
from atoll_server.learners.learner_counters import ShardSums
from atoll_server.learners.learner_registry import LearnerRegistry, RegistryEntry
from atoll_server.run.outbox import Outbox
from atoll_server.shard_context.run_view import RunView

CONFIRM_S = 2.0  # seconds that an operator's action waits for all attached shards to make it durable
AWAY_S = 20.0  # seconds that a shard may be missing while the run begins
QUIET_S = 4.0  # before the run begins, another directory may replace a shard that sent nothing for this long


class LeaseFacts(NamedTuple):
    """A shard's sums for a lease of data units. settled: as in LeaseSums."""

    by_fragment: dict[int, MergedUnits]
    settled: bool


@dataclass(slots=True)
class AttachedShard:
    """One shard process. outbox: None while not attached. heard_at: time of the last message, in monotonic seconds.

    directory: identifies the shard's directory, so that no second directory can take its place. staged: digest of the
    initial parameters that the shard holds. pending, missed: by learner, see LearnerSums. leases: sums of data units.
    """

    number: int
    address: str = ""
    directory: bytes = b""
    fragments: tuple[int, ...] = ()
    staged: bytes = b""
    outbox: Outbox | None = None
    heard_at: float = 0.0
    summary: sh.Summary = field(default_factory=sh.Summary)
    pending: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    leases: dict[int, LeaseFacts] = field(default_factory=dict)

    def versions(self) -> dict[int, int]:
        """Returns the versions in the last summary."""
        return {each.fragment: each.version for each in self.summary.fragments}


class AttachedShards:
    """The run's shards in other processes. own: the position of the registrar's own shard in `JoinReply.shards`.

    count: the number of shards that hold fragments; 0 until it is known, which requires that a shard has attached.
    """

    def __init__(self, own: int | None, count: int, clock: Clock = SYSTEM) -> None:
        """own: 0 if the registrar has shard 0; None if it has no fragments."""
        self._alone = own is None
        self.count = count
        self.clock = clock
        self.shards: dict[int, AttachedShard] = {}
        self.layout: Layout | None = None
        self._changed = asyncio.Event()
        self._stage: sh.Stage | None = None
        self._begun: sh.Begun | None = None
        self._keep: dict[int, sh.Keep] = {}
        self._leases: dict[int, sh.AwaitedLease] = {}

    # ------------------------------------------------------------------------------ the division

    @property
    def own(self) -> int:
        """The number of the registrar's own shard. If it is the last number, the registrar holds no fragments."""
        return self.count if self._alone else 0

    @property
    def remote(self) -> range:
        """The numbers of all other shards."""
        return range(0 if self._alone else 1, self.count)

    def fragments(self, layout: Layout, number: int) -> tuple[int, ...]:
        """Returns the fragments of a shard. Raises LayoutError if the run has more shards than fragments."""
        return () if number >= self.count else divide(layout, self.count)[number]

    def missing(self) -> list[int]:
        """Returns the numbers of the shards that are not attached."""
        return [number for number in self.remote if not self._here(number)]

    def _here(self, number: int) -> bool:
        return number in self.shards and self.shards[number].outbox is not None

    def waited_for(self) -> str:
        """Returns, as text, the shards that must still attach before the run can begin; empty if none is missing."""
        if self._alone and not self.count:
            return "at least one shard"
        missing = self.missing()
        return f"shard{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.count}" if missing else ""

    def runs(self, layout: Layout) -> None:
        """Sets the layout of a run that has parameters. The layout determines the division."""
        self.layout = layout
        for number in self.remote:
            self.shards.setdefault(number, AttachedShard(number)).fragments = self.fragments(layout, number)

    def places(self, own: pb.ShardPlace) -> list[pb.ShardPlace]:
        """Returns the places of all shards. own: the registrar's place. Raises Refused while an address is unknown."""
        places = {self.own: own}
        for number in self.remote:
            shard = self.shards[number]
            if not shard.address:
                text = f"shard {number} of the run has not been attached yet: start it, then try again"
                raise Refused(Status.UNAVAILABLE, text)
            places[number] = pb.ShardPlace(address=shard.address, fragments=shard.fragments)
        return [places[number] for number in sorted(places)]

    # ------------------------------------------------------------------------------ attaching

    def admit(self, hello: sh.Hello, run: str, generation: int, *, epoch: int, begun: bool) -> AttachedShard:
        """Returns the shard that a process may act for. Ends the call of the process's predecessor.

        run, generation, epoch: values of the registrar. begun: whether the run has parameters. Raises Refused.
        """
        if hello.protocol != PROTOCOL:
            text = f"the shard uses protocol {hello.protocol}, but this registrar uses {PROTOCOL}: use the same version"
            raise Refused(Status.FAILED_PRECONDITION, text)
        known = begun or not self._alone or any(self._boxes())  # whether the number of shards is known
        if not 1 <= hello.shards <= MAX_SHARDS or (known and hello.shards != self.count):
            text = f"the shard was started as one of {hello.shards}, but the run has {self.count}: correct its --shard"
            raise Refused(Status.FAILED_PRECONDITION, text)
        if hello.shard >= hello.shards or (not hello.shard and not self._alone):
            text = f"shard {hello.shard} of {hello.shards} cannot be attached here: correct its --shard or --registrar"
            raise Refused(Status.FAILED_PRECONDITION, text)
        if hello.run and hello.run != run:
            text = f"the shard holds a part of run {hello.run}, but this is run {run}: correct --registrar or --dir"
            raise Refused(Status.FAILED_PRECONDITION, text)
        if (hello.generation, hello.epoch) > (generation, epoch):
            text = (
                f"the shard is at generation {hello.generation} and epoch {hello.epoch}, ahead of this registrar "
                f"({generation} and {epoch}): restore a newer backup of the registrar, or a checkpoint"
            )
            raise Refused(Status.FAILED_PRECONDITION, text)
        shard = self.shards.setdefault(hello.shard, AttachedShard(hello.shard))
        if shard.directory and shard.directory != hello.directory and (begun or self._fresh(shard)):
            text = (
                f"a different directory holds shard {hello.shard} of this run: start the shard with that --dir, or "
                "restore its backup"
            )
            raise Refused(Status.ALREADY_EXISTS, text)
        if begun and not hello.generation and not hello.staged:
            text = f"the directory of shard {hello.shard} is empty, but the run has parameters: restore its backup"
            raise Refused(Status.FAILED_PRECONDITION, text)
        self._end(shard)
        self.count = hello.shards
        shard.address, shard.directory, shard.staged = hello.address, hello.directory, hello.staged
        shard.heard_at = self.clock.monotonic()
        if self.layout is not None:
            shard.fragments = self.fragments(self.layout, hello.shard)
        return shard

    def _fresh(self, shard: AttachedShard) -> bool:
        return shard.outbox is not None and self.clock.monotonic() - shard.heard_at < QUIET_S

    def _end(self, shard: AttachedShard) -> None:
        if shard.outbox is not None:
            shard.outbox.end()
            shard.outbox = None

    def welcome(
        self, shard: AttachedShard, welcome: sh.Welcome, members: Iterable[RegistryEntry], view: RunView
    ) -> Outbox:
        """Returns the outbox of a newly attached shard, with everything that the shard must know."""
        self._end(shard)
        box = shard.outbox = Outbox()
        box.put("welcome", sh.FromRegistrar(welcome=welcome))
        for entry in members:
            box.put(("member", entry.name), _member(entry))
        box.put("view", _view(view))
        for lease in self._leases.values():
            box.put(("lease", lease.lease), sh.FromRegistrar(lease=lease))
        if shard.number in self._keep:
            box.put("keep", sh.FromRegistrar(keep=self._keep[shard.number]))
        if self._begun is not None:
            begun = sh.Begun(settings=self._begun.settings, stage=self._for(self._begun.stage, shard))
            box.put("begun", sh.FromRegistrar(begun=begun))
        elif self._stage is not None:
            box.put("stage", sh.FromRegistrar(stage=self._for(self._stage, shard)))
        self._changed.set()
        return box

    def detach(self, shard: AttachedShard, box: Outbox) -> None:
        """Records that a shard's call has ended, unless a newer call has replaced it."""
        if shard.outbox is box:
            shard.outbox = None
        self._changed.set()

    # ------------------------------------------------------------------------------ from shards

    def heard(self, shard: AttachedShard, box: Outbox, message: sh.FromShard, registry: LearnerRegistry) -> None:
        """Applies a shard's message and its learners' sums, unless a newer call has replaced this outbox's call."""
        if shard.outbox is not box:
            return
        shard.heard_at = self.clock.monotonic()
        match message.WhichOneof("what"):
            case "staged":
                shard.staged = message.staged.sha256
            case "confirmed":
                box.confirmed = max(box.confirmed, message.confirmed.sequence)
            case "summary":
                self._summarised(shard, message.summary, registry)
        self._changed.set()

    def _summarised(self, shard: AttachedShard, summary: sh.Summary, registry: LearnerRegistry) -> None:
        for sums in summary.learners:
            entry = registry.entries.get(sums.learner)
            if entry is None or not sums.merged_token_parameters.isdecimal():
                continue
            shard.pending[sums.learner], shard.missed[sums.learner] = sums.pending, sums.missed
            entry.account.by_shard[shard.number] = ShardSums(
                int(sums.merged_token_parameters),
                sums.bytes_up,
                sums.parameters_up,
                sums.accepted_tokens,
                sums.accepted_before,
                sums.bytes_down,
                sums.parameters_down,
                sums.bytes_whole,
                sums.undone_tokens,
            )
            entry.unsaved = True
        for told in summary.leases:
            if told.lease in self._leases:
                shard.leases[told.lease] = LeaseFacts(dict(map(_units, told.fragments)), told.settled)
        del summary.learners[:], summary.leases[:]
        shard.summary = summary

    # ------------------------------------------------------------------------------ to shards

    def tell(self, view: RunView) -> None:
        """Sends a view to all shards."""
        for box in self._boxes():
            box.put("view", _view(view))

    def member(self, entry: RegistryEntry) -> None:
        """Tells all shards about a learner that joined, left, or was evicted or readmitted."""
        for box in self._boxes():
            box.put(("member", entry.name), _member(entry))

    def keep(self, number: int, snapshots: Iterable[int], through: int) -> None:
        """Tells a shard, now and when it attaches, which snapshots the run's checkpoints name. through: as in Keep."""
        self._keep[number] = sh.Keep(snapshots=sorted(snapshots), through=through)
        if (shard := self.shards.get(number)) is not None and shard.outbox is not None:
            shard.outbox.put("keep", sh.FromRegistrar(keep=self._keep[number]))

    def await_lease(self, lease: int, learner: str, incarnation: int) -> None:
        """Asks all shards, now and when they attach, for their sums for a lease of data units."""
        self._leases[lease] = sh.AwaitedLease(lease=lease, learner=learner, incarnation=incarnation)
        for box in self._boxes():
            box.put(("lease", lease), sh.FromRegistrar(lease=self._leases[lease]))

    def lease_over(self, lease: int) -> None:
        """Tells all shards that the sums of a lease are no longer needed."""
        (over := self._leases.pop(lease)).over = True
        for shard in self.shards.values():
            shard.leases.pop(lease, None)
        for box in self._boxes():
            box.put(("lease", lease), sh.FromRegistrar(lease=over))

    def facts(self, lease: int) -> list[LeaseFacts] | None:
        """Returns all other shards' sums of a lease; None until each shard has sent them to this process."""
        found = [self.shards[number].leases.get(lease) for number in self.remote if number in self.shards]
        known = [each for each in found if each is not None]
        return known if len(known) == len(self.remote) else None

    async def confirmed(self) -> list[int]:
        """Waits up to CONFIRM_S until all shards have made all messages durable. Returns the shards that have not."""
        wanted: dict[Outbox, int] = {}  # a shard that attaches again gets a new outbox, with all that it must know

        def late(number: int) -> bool:
            box = self.shards[number].outbox if number in self.shards else None
            return box is None or box.confirmed < wanted.setdefault(box, box.newest)

        def lacking() -> list[int]:
            return [number for number in self.remote if late(number)]

        async def wait() -> None:
            while any(map(self._here, lacking())):
                self._changed.clear()
                await self._changed.wait()

        with contextlib.suppress(TimeoutError):  # the caller names the shards that are late
            await asyncio.wait_for(wait(), CONFIRM_S)
        return lacking()

    def offered(self) -> bytes:
        """Returns Stage.sha256 of the initial parameters that shards may fetch now; empty if there are none."""
        stage = self._begun.stage if self._begun is not None else self._stage
        return stage.sha256 if stage is not None else b""

    async def stage(self, stage: sh.Stage, layout: Layout) -> None:
        """Waits until every shard has durably written its part of the initial parameters.

        Raises Refused if a shard is missing for too long.
        """
        self._stage = stage
        self.runs(layout)
        for shard in self.shards.values():
            if shard.outbox is not None and shard.staged != stage.sha256:
                shard.outbox.put("stage", sh.FromRegistrar(stage=self._for(stage, shard)))
        while any(self.shards[number].staged != stage.sha256 for number in self.remote):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), AWAY_S if self.missing() else None)
            except TimeoutError as error:
                text = (
                    f"the run cannot begin without {self.waited_for()}: start every missing shard; the learner then "
                    f"tries again"
                )
                raise Refused(Status.UNAVAILABLE, text) from error

    def begin(self, begun: sh.Begun) -> None:
        """Tells all shards, now and when they attach, that the run has begun."""
        self._stage, self._begun = None, begun
        for number in self.remote:
            shard = self.shards.setdefault(number, AttachedShard(number))
            if shard.outbox is not None:
                mine = sh.Begun(settings=begun.settings, stage=self._for(begun.stage, shard))
                shard.outbox.put("begun", sh.FromRegistrar(begun=mine))

    def _for(self, stage: sh.Stage, shard: AttachedShard) -> sh.Stage:
        mine = sh.Stage()
        mine.CopyFrom(stage)
        mine.owned.extend(shard.fragments)
        return mine

    def _boxes(self) -> Iterator[Outbox]:
        return (shard.outbox for shard in self.shards.values() if shard.outbox is not None)

    # ------------------------------------------------------------------------------ for the ledger

    def as_data(self) -> dict[str, Any]:
        """Returns the data that must survive a restart of the registrar, as JSON values."""
        known = {str(each.number): [each.address, each.directory.hex()] for each in self.shards.values()}
        return {"count": self.count, "shards": known}

    def restore(self, data: dict[str, Any]) -> None:
        """Restores the data that `as_data` returned."""
        self.count = data["count"]
        for number, (address, directory) in data["shards"].items():
            self.shards[int(number)] = AttachedShard(int(number), address, bytes.fromhex(directory))

    def all(self) -> Sequence[AttachedShard]:
        """Returns the other shards that this process knows, in order."""
        return [self.shards[number] for number in sorted(self.shards)]


def _units(sums: sh.FragmentUnits) -> tuple[int, MergedUnits]:
    return sums.fragment, MergedUnits(sums.through, tuple(zip(sums.firsts, sums.lasts, strict=True)))


def _member(entry: RegistryEntry) -> sh.FromRegistrar:
    member = sh.Member(
        learner=entry.name,
        region=entry.region,
        incarnation=entry.incarnation,
        session=entry.session,
        evicted=entry.evicted,
        left=entry.account.left_at is not None,
    )
    return sh.FromRegistrar(member=member)


def _view(view: RunView) -> sh.FromRegistrar:
    return sh.FromRegistrar(
        view=sh.View(
            epoch=view.epoch,
            sequence=view.sequence,
            run_tokens=view.run_tokens,
            voided_tokens=view.voided_tokens,
            paused=view.paused,
            slot=view.slot,
            slot_s=view.slot_s,
        )
    )
