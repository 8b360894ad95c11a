"""A shard process's copy of the run, which the registrar keeps up to date.

The copy is durable, so that a shard can restart and serve its learners while the registrar is unavailable. The shard
learns about a learner from the registrar or from the learner's session token, which only the registrar can issue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from atoll_wire import outer_pb2 as pb
from atoll_wire import shards_pb2 as sh

from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.learner_registry import LearnerProcess, RegistryEntry, refuse_reason
from atoll_server.learners.session_tokens import SessionKey
from atoll_server.ledger import lineage, run_ledger
from atoll_server.ledger.ledger_writer import LedgerWriter
from atoll_server.ledger.rows import LearnerRow
from atoll_server.ledger.run_ledger import VIEW
from atoll_server.run.known_run import KnownRun
from atoll_server.run.run_clock import RunClock
from atoll_server.settings import Limits, RunSettings, ShardNumber
from atoll_server.shard_context.run_view import RunView
from atoll_server.storage import crash_points
from atoll_server.telemetry.journal import Journal

START = "session_start"  # key in the ledger's meta table


class Replica(KnownRun):
    """The run as the registrar last described it. attached: whether the call to the registrar is open."""

    def __init__(self, limits: Limits, clock: RunClock, journal: Journal, place: ShardNumber) -> None:
        super().__init__(limits, clock, journal)
        self.attached = False
        self._place = place
        self._view = self._stored = RunView()
        self._unfenced: set[str] = set()  # learners whose newest process, eviction or Leave is not in the ledger yet

    @property
    def number(self) -> int:
        return self._place.number

    @property
    def shards(self) -> int:
        return self._place.count

    # ------------------------------------------------------------------------------ from and to the ledger

    def restore(self, meta: dict[str, Any], learners: Iterable[LearnerRow], writer: LedgerWriter) -> None:
        """Restores the copy from the ledger. Does not restore the shard, which `runs` sets."""
        self.writer = writer
        self.run_id = meta.get("run", "")
        self.generation = meta.get("generation", 0)
        self.epoch = meta["epoch"]
        self.settings = RunSettings.model_validate(meta.get("settings", {}))
        self.initial_sha256 = meta.get("initial_sha256", "")
        if "generation" in meta:
            self.line = lineage.line_of(meta)
        self._use_key(meta.get("session_key", ""), meta.get(START, ""))
        self._view = self._stored = RunView(**meta.get(VIEW, {}))
        self.paused = self._view.paused
        self.restore_learners(learners)

    def _use_key(self, secret: str, start: str) -> None:
        self.sessions = SessionKey(bytes.fromhex(secret), bytes.fromhex(start), self.run_id, self.generation)

    async def welcomed(self, welcome: sh.Welcome) -> None:
        """Durably records the registrar's first message. Ends sessions that began before a restart of the registrar."""
        values: dict[str, Any] = {
            "run": welcome.run,
            "generation": welcome.generation,
            "session_key": welcome.secret.hex(),
            START: welcome.start.hex(),
            "settings": RunSettings.model_validate_json(welcome.settings).model_dump(mode="json"),
        }
        await self.writer.commit(partial(run_ledger.put_all_meta, meta=values))
        self.leases.clear()  # the registrar sends all leases again
        again = welcome.start != self.sessions.start
        self.run_id, self.generation = welcome.run, welcome.generation
        self.settings = RunSettings.model_validate(values["settings"])
        if again:
            self._use_key(values["session_key"], values[START])
            self.registry.forget_sessions()

    async def save_view(self) -> None:
        """Makes the newest view durable."""
        view = replace(self._view, slot=0.0, slot_s=0.0)  # a position has no meaning after a restart
        if view != self._stored:
            self._stored = view
            await self.writer.commit(partial(run_ledger.put_meta, key=VIEW, value=asdict(view)))

    async def save_accounts(self) -> None:
        await super().save_accounts()
        await self.save_view()

    # ------------------------------------------------------------------------------ from the registrar

    def view(self) -> RunView:
        return self._view

    def tell(self) -> None:
        """Does nothing, because the registrar counts the run's tokens."""

    async def viewed(self, view: RunView) -> None:
        """Keeps a view if it is newer than the last one.

        A change of the pause state is durable when this method returns.
        """
        if not view.newer_than(self._view):
            return
        changed = view.paused != self._view.paused
        self._view = view
        self.paused = view.paused
        if changed:
            await self.save_view()
            crash_points.point("pause.committed")
        if self.shard is not None:
            self.shard.told(view)

    async def member(self, member: sh.Member) -> None:
        """Applies the registrar's message about a learner. A change is durable when this method returns."""
        self._let_in(member.learner, member.incarnation, member.session)
        entry = self.registry.entries[member.learner]
        entry.region = member.region
        leaves = member.left and entry.incarnation == member.incarnation and entry.account.left_at is None
        evicted = member.evicted != entry.evicted
        if leaves or evicted:
            self._unfenced.add(entry.name)
        if leaves:
            await self.left(entry, itself=True)  # or an operator ended it: only the registrar needs to know
        if evicted:
            let_in = entry.session  # before this shard began and before it knew that the eviction was undone
            self.registry.evict(entry, member.evicted, self.clock.wall())
            if let_in and not member.evicted and self.shard is not None:
                self.shard.joined(entry.name, entry.incarnation)
        await self.settled(entry)
        if evicted and member.evicted and self.shard is not None:
            self.shard.evicted(entry.name, entry.incarnation, refuse_reason(member.evicted))

    def lease(self, lease: sh.AwaitedLease) -> None:
        """Keeps a lease while the registrar wants its sums; otherwise, forgets the lease."""
        place = (lease.learner, lease.incarnation)
        if not lease.over:
            self.leases[lease.lease] = place
            return
        self.leases.pop(lease.lease, None)
        if self.shard is not None:
            self.shard.contributions.forget_units(*place, lease.lease)

    # ------------------------------------------------------------------------------ learners

    def fenced(self, learner: str, incarnation: int) -> bool:
        return learner not in self._unfenced and super().fenced(learner, incarnation)

    def session(self, session: pb.Session) -> LearnerProcess:
        number = self.proven(session)
        if number:
            self._let_in(session.learner, session.incarnation, number)
        elif not self.attached:
            text = "this shard cannot check the session without the registrar, which does not answer: try again later"
            raise Refused(Status.UNAVAILABLE, text)
        return LearnerProcess(self.registry.check(session.learner, session.incarnation, number), session.incarnation)

    def _let_in(self, name: str, incarnation: int, session: int) -> None:
        entry = self.registry.let_in(name, incarnation, session, self.clock.wall())
        if entry is None:
            return
        self._unfenced.add(name)
        if self.shard is not None:
            self.shard.joined(name, incarnation)

    async def fence(self, process: LearnerProcess) -> None:
        if process.entry.name in self._unfenced:
            await self.save(process.entry)

    async def save(self, entry: RegistryEntry) -> None:
        incarnation = entry.incarnation
        await super().save(entry)
        if entry.incarnation == incarnation:
            self._unfenced.discard(entry.name)

    async def settled(self, entry: RegistryEntry) -> None:
        if entry.unsaved:
            await self.save(entry)
