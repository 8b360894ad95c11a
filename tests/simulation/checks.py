"""The numbered invariants of a run, checked from outside at every event.

The checks see the core's messages before the network can lose them. They also see learners' adoptions and the disk of a
restarted core. They do not rely on counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from atoll_server.checkpoints.rollback import RolledBack
from atoll_server.ledger.lineage import Line
from atoll_server.processes.core import Core
from atoll_server.rounds.round_state import Phase
from atoll_server.rounds.syncer import Syncer
from atoll_server.rounds.syncer_events import Cause, ContributionKey
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec

from tests.simulation import bookkeeping
from tests.simulation.bookkeeping import Violation, shard_of
from tests.simulation.loop import Process, VirtualLoop

if TYPE_CHECKING:
    from tests.simulation.island import Island

LONGEST_ROUND_S = 120.0
SLOW_DISK_S = 2.5  # time for a complete upload of a fenced process to become durable
Name = tuple[str, int, int, int]  # learner, incarnation, fragment, seq


@dataclass(frozen=True)
class Told:
    """A final fate, as sent."""

    fate: int
    version: int
    weight: float
    staleness: float


class Checks:
    """The checks of one seed. trace: one line per event, for reading and for comparing runs."""

    def __init__(self, loop: VirtualLoop, max_staleness: int) -> None:
        self._loop, self.max_staleness = loop, max_staleness
        self.trained: dict[tuple[str, int], int] = {}  # name, incarnation -> trained tokens
        self.trace: list[str] = []
        self.acknowledged: dict[Name, None] = {}
        self.fates: dict[Name, Told] = {}
        self.published: dict[tuple[int, int, int], int] = {}  # generation, fragment, version -> checksum of its anchor
        self.lines = {1: Line()}  # generation -> its history
        self.generation = 1
        self.checkpoints: set[int] = set()  # that operators asked to restore since a core last started
        self.restored_to: RolledBack | None = None  # the result that an operator received
        self.anchors: dict[tuple[Island, int], tuple[int, int]] = {}  # version, checksum of the last adopted anchor
        self.took: dict[Name, tuple[int, int]] = {}  # version and checksum of the contribution's anchor
        self.coded: dict[Name, bytes] = {}  # digest of the frames from all ranks of its learner
        self.newest: dict[int, int] = {}  # fragment -> newest announced version
        self.incarnations: dict[tuple[str, int], int] = {}  # by name and nonce
        self.highest: dict[str, int] = {}  # name -> newest announced incarnation
        self.fenced_at: dict[tuple[str, int], float] = {}  # when an incarnation stopped being the newest
        self.epochs: list[int] = []
        self.core: Core | None = None
        self.opened: dict[int, tuple[int, float]] = {}
        self.joined_run: set[str] = set()
        self.paused: str | None = ""  # the reason that the core confirmed; None while no answer has arrived

    def note(self, text: str) -> None:
        """Adds a line to the trace."""
        self.trace.append(f"{self._loop.now:9.4f} {text}")

    # ------------------------------------------------------------------------------ messages of the core

    def said(self, _: Process, request: Any, reply: Any) -> None:
        """Records a message of the core, which is binding even if the network loses it."""
        match reply:
            case pb.JoinReply() if reply.state != pb.JoinReply.STATE_CONFIRM:
                self._join(request, reply)
            case pb.PushReply() if reply.WhichOneof("what") == "receipt":
                self._counts_from_this_generation(reply.receipt, request.header.session.generation)
                self._receipt(reply.receipt, pushed=True)
            case pb.Notification():
                self._notification(reply)
            case pb.FetchReply() if reply.HasField("header"):
                self._header(request, reply.header)
        self.always()

    def _join(self, request: pb.JoinRequest, reply: pb.JoinReply) -> None:
        self.joined_run.add(reply.run)
        if len(self.joined_run) > 1:
            raise Violation(5, f"learners joined several runs: {self.joined_run}")
        if not request.nonce:
            raise Violation(6, f"{request.learner} was admitted with nonce 0, which no process has")
        given = self.incarnations.setdefault((request.learner, request.nonce), reply.incarnation)
        versions = dict(sorted(reply.versions.items()))
        self.note(f"join {request.learner} incarnation {reply.incarnation} epoch {reply.epoch} {versions}")
        if given != reply.incarnation:
            raise Violation(6, f"one process of {request.learner} has incarnations {given} and {reply.incarnation}")
        others = [n for (name, nonce), n in self.incarnations.items() if name == request.learner]
        if len(others) != len(set(others)):
            raise Violation(6, f"several processes of {request.learner} have incarnation {reply.incarnation}: {others}")
        highest = self.highest.get(request.learner, 0)
        if reply.incarnation < highest:
            raise Violation(6, f"{request.learner} incarnation {reply.incarnation} was admitted after {highest}")
        self.highest[request.learner] = reply.incarnation
        for older in range(1, reply.incarnation):
            self.fenced_at.setdefault((request.learner, older), self._loop.now)
        for fragment, version in reply.versions.items():
            if version < self.newest.get(fragment, 0):
                raise Violation(3, f"fragment {fragment} fell from version {self.newest[fragment]} to {version}")

    def _receipt(self, receipt: pb.Receipt, *, pushed: bool = False, as_of: int | None = None) -> None:
        name = (receipt.learner, receipt.incarnation, receipt.fragment, receipt.seq)
        if pushed and name not in self.acknowledged:
            self.acknowledged[name] = None
            self.note(f"acknowledged {name}")
            self._is_whole(name)
            fenced = self.fenced_at.get(name[:2])
            if fenced is not None and self._loop.now > fenced + SLOW_DISK_S:
                raise Violation(6, f"{name} was acknowledged {self._loop.now - fenced:.1f} s after it was fenced off")
        if receipt.fate == pb.FATE_PENDING:
            decided = self.fates.get(name)
            # A whole fragment comes with the fates at the time of the read. A round that lapses later may refuse a
            # contribution at the same version.
            latest = -1 if decided is None else decided.version - (decided.fate == pb.FATE_MERGED)
            if decided is not None and (as_of is None or latest < as_of):
                raise Violation(2, f"{name} is pending again after its final fate was sent")
            return
        told = Told(receipt.fate, receipt.version, receipt.weight, receipt.staleness)
        before = self.fates.setdefault(name, told)
        if before is told:
            self.note(f"{'merged' if told.fate == pb.FATE_MERGED else 'refused'} {name} in {told.version}")
        if before != told:
            raise Violation(2, f"{name} was sent two fates: {before} and {told}")
        if told.fate == pb.FATE_MERGED and told.staleness > self.max_staleness:
            raise Violation(7, f"{name} was merged at staleness {told.staleness}")
        if not 0 <= told.weight <= 1.0000001:
            raise Violation(7, f"{name} has weight {told.weight}")

    def _is_whole(self, name: Name) -> None:
        """Checks that the core stored the frames that all ranks coded, unless they are already merged."""
        shard, (learner, incarnation, fragment, seq) = shard_of(self.core), name
        key = ContributionKey(learner, incarnation, fragment, seq)
        if shard is None or name not in self.coded or key not in shard.fragments[fragment].held:
            return
        places = shard.held(key).stored.places
        if frame_codec.frames_digest([places[index][1:] for index in sorted(places)]) != self.coded[name]:
            raise Violation(1, f"{name} was acknowledged with frames that its ranks did not code")

    def _notification(self, notification: pb.Notification) -> None:
        match notification.WhichOneof("what"):
            case "published":
                self._version(notification.published.fragment, notification.published.version)
            case "current":
                for fragment, version in notification.current.versions.items():
                    if version < self.newest.get(fragment, 0):
                        raise Violation(3, f"fragment {fragment} fell to version {version}")
                    self.newest[fragment] = max(version, self.newest.get(fragment, 0))
            case "receipt":
                self._receipt(notification.receipt)

    def _version(self, fragment: int, version: int) -> None:
        if version > self.newest.get(fragment, 0):
            self.newest[fragment] = version
            self.note(f"published {fragment}/{version}")

    def _header(self, request: pb.FetchRequest, header: pb.FetchHeader) -> None:
        place = self._place(request.session.generation, header.fragment, header.version)
        before = self.published.setdefault(place, header.crc32c)
        if before != header.crc32c:
            raise Violation(3, f"fragment {place[1]} version {place[2]} is {header.crc32c:08x} now, was {before:08x}")
        if not request.whole and header.version != request.version:
            raise Violation(3, f"a learner asked for update {request.version} and was sent {header.version}")
        for receipt in header.receipts:
            self._receipt(receipt, as_of=header.version)

    # ------------------------------------------------------------------------------ actions of learners

    def adopted(self, island: Island, fragment: int, version: int, anchor: np.ndarray) -> None:
        """Records an adoption. All learners with a version must have the same bytes."""
        found = frame_codec.vector_crc32c(anchor)
        places = {self._place(generation, fragment, version) for generation in self.lines}
        if found not in {self.published.get(place, found) for place in places}:
            raise Violation(4, f"{island.process.name} adopted other bytes of {fragment}/{version} than published")
        self.anchors[island, fragment] = (version, found)

    def taken(self, island: Island, name: Name) -> None:
        """Records that a learner takes its work since the adopted anchor."""
        self.took[name] = self.anchors[island, name[2]]

    def sent(self, name: Name, digest: bytes) -> None:
        """Records that a learner sends what it took. digest: of the frames from all its ranks."""
        self.coded[name] = digest

    def _counts_from_this_generation(self, receipt: pb.Receipt, generation: int) -> None:
        """Checks that acknowledged work starts at an anchor of the run's current history."""
        name = (receipt.learner, receipt.incarnation, receipt.fragment, receipt.seq)
        if name not in self.took or name in self.acknowledged:
            return
        version, checksum = self.took[name]
        if self.published.get(self._place(generation, receipt.fragment, version), checksum) != checksum:
            raise Violation(13, f"{name} has another anchor {receipt.fragment}/{version} than generation {generation}")

    def _place(self, generation: int, fragment: int, version: int) -> tuple[int, int, int]:
        """Returns a key that is the same for all generations that share this version."""
        made_in = bookkeeping.made_in(self.lines[generation], fragment, version) if version else 1
        return made_in, fragment, version

    # ------------------------------------------------------------------------------ restores by operators

    def restoring(self, checkpoint: int) -> None:
        """Records that an operator requests a restore, whose outcome is not known yet."""
        self.checkpoints.add(checkpoint)

    def rolled_back(self, done: RolledBack) -> None:
        """Records a durable restore, as the operator received it."""
        self.note(f"restored to checkpoint {done.row.id}: generation {done.generation}, {done.row.versions}")
        self.restored_to = done

    def _new_generation(self, core: Core) -> None:
        run, asked = core.run, self.checkpoints
        done, self.restored_to, self.checkpoints = self.restored_to, None, set()
        if done is not None and done.generation != run.generation:
            raise Violation(13, f"the restore reported generation {done.generation}, the core runs {run.generation}")
        if run.generation == self.generation:
            return
        begun = run.line.beginnings[0]
        self.note(f"generation {run.generation} begins at checkpoint {begun.checkpoint}")
        if run.generation < self.generation or begun.checkpoint not in asked:
            raise Violation(13, f"generation {run.generation} began at {begun.checkpoint}, after {self.generation}")
        self.generation = run.generation
        self.lines[run.generation] = run.line
        self.newest = dict(begun.versions)
        if done is not None and run.registry.tokens() > sum(done.row.tokens.values()):
            raise Violation(13, f"the core counts {run.registry.tokens()} tokens after a restore of {done.row}")

    # ------------------------------------------------------------------------------ the core's disk

    def restored(self, core: Core) -> None:
        """Checks that a restarted core has all acknowledged or visible data, bit for bit."""
        self.core = core
        self.opened.clear()
        self.note(f"core up, epoch {core.run.epoch}")
        if self.epochs and core.run.epoch <= self.epochs[-1]:
            raise Violation(6, f"epochs do not grow: {self.epochs} then {core.run.epoch}")
        self.epochs.append(core.run.epoch)
        if self.paused is not None and core.run.paused.rpartition(": ")[2] != self.paused:
            raise Violation(1, f"the run's pause is {core.run.paused!r}, an operator received {self.paused!r}")
        shard = shard_of(core)
        self._new_generation(core)
        if shard is None:
            if self.acknowledged or self.newest or self.published:
                raise Violation(1, "the run lost its parameters")
            return
        for index, fragment in shard.fragments.items():
            if fragment.version < self.newest.get(index, 0):
                raise Violation(3, f"fragment {index} came back at version {fragment.version}")
            crc = frame_codec.vector_crc32c(fragment.state.theta_pub)
            if self.published.setdefault(self._place(self.generation, index, fragment.version), crc) != crc:
                raise Violation(3, f"fragment {index} came back with other bytes at {fragment.version}")
        self.in_ledger(core)
        bookkeeping.sums(core)

    def in_ledger(self, core: Core) -> dict[Name, Told]:
        """Compares the ledger with the core's messages. Returns all final fates."""
        db = core.run.writer._db
        rows = db.execute(
            "SELECT learner, incarnation, fragment, seq, fate, version, weight, staleness, generation "
            "FROM contributions"
        ).fetchall()
        found = {tuple(row[:4]): row[4:8] for row in rows}
        if len(found) < len(rows):
            raise Violation(13, "a contribution is in two generations")
        for name in self.acknowledged:
            if name not in found:
                raise Violation(1, f"acknowledged {name} is gone")
        for name, told in self.fates.items():
            fate, version, weight, staleness = found.get(name, (None, None, None, None))
            kind = {"merged": pb.FATE_MERGED, "refused": pb.FATE_REFUSED}.get(fate)
            if (kind, version, weight, staleness) != (told.fate, told.version, told.weight, told.staleness):
                raise Violation(2, f"{name} was sent {told}, the ledger has {fate} {version} {weight} {staleness}")
        bookkeeping.each_merged_once(db, {(row[8], *row[:4]) for row in rows if row[4] == "merged"})
        kinds = {"merged": pb.FATE_MERGED, "refused": pb.FATE_REFUSED}
        return {name: Told(kinds[row[0]], *row[1:]) for name, row in found.items() if row[0] in kinds}

    def work_counted_once(self, core: Core, names: Sequence[str]) -> None:
        """Checks that no process of these learners has more merged tokens in a fragment than it trained."""
        merged = core.run.writer._db.execute(
            "SELECT learner, incarnation, fragment, SUM(tokens) FROM contributions WHERE fate='merged' "
            "GROUP BY learner, incarnation, fragment"
        )
        for learner, incarnation, fragment, tokens in merged.fetchall():
            trained = self.trained.get((learner, incarnation), 0)
            if learner in names and tokens > trained:
                raise Violation(1, f"{learner}/{incarnation} trained {trained} tokens, {fragment} merged {tokens}")

    def closing(self, syncer: Syncer, fragment: int, cause: Cause, now: float) -> None:
        """Checks that a round without a live learner waited for the deadline, or the quorum and the grace of Eq. 3."""
        rounds, live = syncer.fragments[fragment], syncer.present(now).live
        if cause is Cause.LATE:
            late = {key.learner for key, waiting in rounds.pending.items() if waiting.cycle}
            if syncer.settings.grace_ratio > 0 or syncer.paused or len(late) < syncer.settings.quorum.of(len(live)):
                raise Violation(7, f"fragment {fragment} merged late contributions too early, of {sorted(late)}")
            return
        missing = live - set(rounds.declined) - {key.learner for key in rounds.pending}
        patience = max((syncer.liveness[name].max_wait_s() for name in missing), default=0.0)
        if not missing or now >= rounds.opened_at + patience:
            return
        fresh = {key.learner for key, waiting in rounds.pending.items() if waiting.cycle == rounds.cycle}
        steps = [step_s for name in live if (step_s := syncer.liveness[name].step_time_s) is not None]
        slack = syncer.settings.overlap_steps * min(steps, default=0.0)  # a learner wakes up before its first step
        grace = syncer.settings.grace_ratio * max(0.0, slack - (syncer.quorum_s or 0.0) - (syncer.sync_s or 0.0))
        if rounds.quorum_at is None or now < rounds.quorum_at + grace - 1e-9 or len(fresh) < 1:
            raise Violation(7, f"round of fragment {fragment} closed early, without {sorted(missing)}")

    # ------------------------------------------------------------------------------ at every event

    def always(self) -> None:
        """Checks the invariants that hold at every moment."""
        core = self.core
        shard = shard_of(core)
        if core is None or shard is None:
            return
        limits = core.settings.limits
        bounds = (
            ("entries for followers", len(shard.follower_log._kept), limits.notifications),
            ("cached updates", shard.cache.size_bytes, shard.cache.limit_bytes),
            ("spool", shard.spool.used_bytes, limits.spool_bytes),
            ("faults of the journal's subscribers", core.journal.faults, 0),
            ("uploads", len(shard.uploads._underway), 2 * len(core.run.registry.entries) * len(shard.fragments)),
        )
        for what, received, most in bounds:
            if received > most:
                raise Violation(9, f"{what}: {received} of at most {most}")
        for index, rounds in shard.syncer.fragments.items():
            if rounds.phase is Phase.IDLE:
                self.opened.pop(index, None)
                continue
            cycle, since = self.opened.setdefault(index, (rounds.cycle, self._loop.now))
            if cycle != rounds.cycle:
                self.opened[index] = (rounds.cycle, self._loop.now)
            elif self._loop.now - since > LONGEST_ROUND_S:
                raise Violation(7, f"round {cycle} of fragment {index} is open for {LONGEST_ROUND_S} s")
