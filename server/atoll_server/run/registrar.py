"""Manages a run's learner names, sessions, accounts, pause state, layout and token count. Shards own the fragments."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from atoll_wire import outer_pb2 as pb
from atoll_wire.layout.layout import Layout

from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.learner_registry import LearnerProcess, LearnerRegistry, RegistryEntry, refuse_reason
from atoll_server.learners.session_tokens import SessionKey
from atoll_server.rounds import syncer_events as ev
from atoll_server.run.run_clock import RunClock
from atoll_server.settings import Limits, RunSettings
from atoll_server.shard.fragment import Fragment
from atoll_server.shard.run_view import RunView
from atoll_server.shard.shard import Shard
from atoll_server.storage import crash_points, lineage, run_ledger
from atoll_server.storage.ledger_writer import LedgerWriter
from atoll_server.storage.lineage import Beginning, Line
from atoll_server.storage.rows import LearnerRow
from atoll_server.telemetry import entries
from atoll_server.telemetry.entries import Arrival
from atoll_server.telemetry.journal import Journal

KEY_BYTES, START_BYTES = 32, 16  # sizes of the SessionKey's `secret` and `start`


@dataclass(frozen=True, slots=True)
class Waiting:
    """The run has no parameters yet."""


@dataclass(frozen=True, slots=True)
class Running:
    """The run has parameters. shards: each fragment belongs to exactly one shard."""

    shards: tuple[Shard, ...]


class Registrar:
    """The registrar of one run. Every change is durable before learners can see it.

    paused: the operator and the reason; empty while the run is not paused. layout: until the run has parameters, the
    layout of the learner that holds the lease. turned_away: number of contributions refused before their upload was
    complete, since this core started.
    """

    def __init__(self, limits: Limits, clock: RunClock, journal: Journal) -> None:
        self.clock = clock
        self.journal = journal
        self.registry = LearnerRegistry(limits.learners)
        self.run_id = ""
        self.generation = 0
        self.line = Line()  # this generation's history
        self.epoch = 0
        self.settings = RunSettings()
        self.layout: Layout | None = None
        self.frozen_digest = ""
        self.initial_sha256 = ""
        self.paused = ""
        self.turned_away = 0
        self.state: Waiting | Running = Waiting()
        self._views = 0  # number of views sent to shards in this epoch
        self.writer: LedgerWriter  # set by `restore`, like the next attribute
        self._sessions: SessionKey

    # ------------------------------------------------------------------------------ from and to the ledger

    def restore(self, meta: dict[str, Any], learners: Iterable[LearnerRow], writer: LedgerWriter) -> None:
        """Restores the run from the ledger, except for its shards, which `runs` sets."""
        self.writer = writer
        self.run_id = meta["run"]
        self.generation = meta["generation"]
        self.line = lineage.line_of(meta)
        self.epoch = meta["epoch"]
        secret, start = bytes.fromhex(meta["session_key"]), secrets.token_bytes(START_BYTES)
        self._sessions = SessionKey(secret, start, self.run_id, self.generation)
        self.settings = RunSettings.model_validate(meta["settings"])
        self.paused = meta.get("paused", "")
        self.frozen_digest = meta.get("frozen_digest", "")
        self.initial_sha256 = meta.get("initial_sha256", "")
        for row in learners:
            self.registry.restore(row.name, row.region, row.incarnation, row.nonces, row.account, row.evicted)
            self.clock.begin_after(row.account["heard_at"])
        self.registry.since = self.clock.wall()

    def newly_restored(self) -> Beginning | None:
        """Returns this generation's beginning, or None if it is the first one or an earlier core served it."""
        begun = self.line.beginnings[0] if self.line.beginnings else None
        return begun if begun is not None and self.epoch == begun.epoch + 1 else None

    def propose(self, layout: Layout, frozen_digest: str) -> None:
        """Sets the layout and frozen digest of the learner that holds the lease. A later call replaces them."""
        self.layout = layout
        self.frozen_digest = frozen_digest

    async def begin(self, layout: Layout, tensors: list[dict[str, Any]], sha256: str) -> None:
        """Durably records that the run has its initial parameters. tensors: JSON values. sha256: hex digest."""
        settings = self.settings.changed(fragments=len(layout.fragments))
        meta = {
            "tensors": tensors,
            "fragments": len(layout.fragments),
            "fingerprint": layout.fingerprint.hex(),
            "frozen_digest": self.frozen_digest,
            "initial_sha256": sha256,
            "settings": settings.model_dump(mode="json"),
        }
        await self.writer.commit(partial(_put_meta, meta=meta))
        crash_points.point("initial.committed")
        self.initial_sha256 = sha256
        self.settings = settings

    def runs(self, layout: Layout, shards: Iterable[Shard]) -> None:
        """Sets the shards of a run that has parameters."""
        self.layout = layout
        self.state = Running(tuple(shards))

    async def save(self, entry: RegistryEntry) -> None:
        """Commits a learner's row to the ledger."""
        entry.unsaved = False
        await self.writer.commit(partial(run_ledger.put_learner, row=row_of(entry)))

    async def save_accounts(self) -> None:
        """Commits the rows of all learners whose accounts have changed since their last save."""
        rows = [row_of(entry) for entry in self.registry.entries.values() if entry.unsaved]
        for entry in self.registry.entries.values():
            entry.unsaved = False
        if rows:
            await self.writer.commit(partial(_put_learners, rows=rows))

    def record(self, entry: entries.Entry) -> None:
        self.journal.record(entry, self.clock.monotonic())

    # ------------------------------------------------------------------------------ shards

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The run's shards; empty while the run has no parameters."""
        return self.state.shards if isinstance(self.state, Running) else ()

    def view(self) -> RunView:
        """Returns a new view of the run for shards. It is newer than all earlier views."""
        self._views += 1
        return RunView(self.epoch, self._views, self.registry.tokens(), self.registry.voided_tokens(), self.paused)

    def tell(self) -> None:
        """Sends a new view to every shard. Called after each report, and when an operator changes the run."""
        view = self.view()
        for shard in self.shards:
            shard.told(view)

    def owner(self, fragment: int) -> tuple[Shard, Fragment]:
        """Returns a fragment and the shard that owns it. Raises Refused if this core has no such fragment."""
        for shard in self.shards:
            if (found := shard.fragments.get(fragment)) is not None:
                return shard, found
        if isinstance(self.state, Waiting) or self.layout is None:
            raise _without_parameters()
        last = len(self.layout.fragments) - 1
        if fragment <= last:
            text = f"fragment {fragment} belongs to another shard of this run: join again, then call that shard"
            raise Refused(Status.UNAUTHENTICATED, text)
        raise Refused(Status.INVALID_ARGUMENT, f"fragment {fragment} does not exist: the run has fragments 0 to {last}")

    def shard(self, number: int) -> Shard:
        """Returns the shard at a position in `places`. Raises Refused if no shard has this position."""
        if number < len(self.shards):
            return self.shards[number]
        if isinstance(self.state, Waiting):
            raise _without_parameters()
        raise Refused(Status.INVALID_ARGUMENT, f"shard {number} does not exist: the run has {len(self.shards)} shards")

    def places(self) -> list[pb.ShardPlace]:
        """Returns the fragments of each shard, for learners. Learners reach every shard at this core's address."""
        return [pb.ShardPlace(fragments=sorted(shard.fragments)) for shard in self.shards]

    def versions(self) -> dict[int, int]:
        """Returns the published version of each fragment; empty while the run has no parameters."""
        return {fragment: version for shard in self.shards for fragment, version in shard.versions().items()}

    # ------------------------------------------------------------------------------ learners and operators

    def session(self, session: pb.Session) -> LearnerProcess:
        """Returns the learner process that made a call. Raises Refused if its session is not valid."""
        if session.run != self.run_id or session.generation != self.generation:
            raise Refused(Status.UNAUTHENTICATED, "the session belongs to another run or generation: join again")
        number = self._sessions.number(session.learner, session.incarnation, session.token)
        return LearnerProcess(self.registry.check(session.learner, session.incarnation, number), session.incarnation)

    def token(self, entry: RegistryEntry) -> bytes:
        """Returns the session token of a learner's current process."""
        return self._sessions.token(entry.name, entry.incarnation, entry.session)

    def settings_message(self) -> pb.RunSettings:
        return pb.RunSettings(
            inner_steps=self.settings.inner_steps,
            fragments=len(self.layout.fragments) if self.layout is not None else self.settings.fragments,
            overlap_steps=self.settings.overlap_steps,
            codec=int(self.settings.codec),  # type: ignore[arg-type]
            max_staleness=self.settings.max_staleness,
            total_tokens=self.settings.total_tokens,
        )

    async def joined(self, entry: RegistryEntry, by: str, state: pb.JoinReply.State) -> None:
        """Commits a learner's Join to the ledger, then notifies the shards, which drop older incarnations' uploads.

        by: the name in the caller's certificate. state: the state in the JoinReply. Raises Refused if another process
        has taken the learner's name meanwhile, or the learner was evicted.
        """
        incarnation = entry.incarnation
        await self.save(entry)
        crash_points.point("join.row committed")
        LearnerProcess(entry, incarnation).check_current()
        for shard in self.shards:
            shard.joined(entry.name, incarnation)
        if not entry.announced:
            arrival = Arrival.NEW
        else:
            arrival = Arrival.RESTARTED if entry.announced < incarnation else Arrival.AGAIN
        entry.announced = incarnation
        down_s = entry.recovery.down_s
        joined = entries.Joined(entry.name, entry.region, incarnation, arrival, down_s, by, state)
        self.record(joined)

    async def left(self, entry: RegistryEntry) -> None:
        """Durably records that a learner left, so that a restarted core does not count the learner as lost."""
        entry.account.left_at = self.clock.wall()
        entry.session = 0
        await self.save(entry)
        for shard in self.shards:
            shard.dispatch(ev.Left(entry.name))
        if not entry.session:  # the learner has not joined again meanwhile
            entry.start_session(0, Refused(Status.UNAUTHENTICATED, f'learner "{entry.name}" has left: join again'))
        self.record(entries.Left(entry.name, entry.incarnation))

    async def evict(self, name: str, reason: str, tokens: int | None = None) -> None:
        """Evicts a learner and refuses its pending contributions. Merged contributions stay in the model.

        reason: if empty, the learner may join again. tokens: how many of the learner's reported tokens still count;
        None for all. Learners' schedules use the run's reduced token count from the next published update on. Raises
        Refused if the run has no such learner.
        """
        entry = self.registry.entries.get(name)
        if entry is None:
            raise Refused(Status.NOT_FOUND, f'this run has no learner "{name[:80]}": `atoll status` lists its learners')
        was_evicted = bool(entry.evicted)
        self.registry.evict(entry, reason, self.clock.wall())
        if tokens is not None:
            self.registry.void_tokens(entry, tokens)
        await self.save(entry)
        crash_points.point("eviction.committed")
        self.tell()
        if reason:
            for shard in self.shards:
                shard.evicted(name, entry.incarnation, refuse_reason(reason))
            self.record(entries.Evicted(name, reason))
        elif was_evicted:
            self.record(entries.Readmitted(name))

    async def pause(self, reason: str) -> None:
        """Durably pauses or resumes the run, then notifies every learner. A core restart does not end a pause.

        reason: the operator and the reason; empty to resume the run.
        """
        await self.writer.commit(partial(run_ledger.put_meta, key="paused", value=reason))
        crash_points.point("pause.committed")
        self.paused = reason
        self.tell()
        self.record(entries.PauseChanged(reason))

    def turn_away(self, refused: Refused, learner: str) -> None:
        """Counts and records a contribution that was refused before its upload was complete."""
        self.turned_away += 1
        self.record(entries.TurnedAway(learner, refused))


def _without_parameters() -> Refused:
    return Refused(Status.UNAVAILABLE, "the run has no parameters yet: join again in a moment")


def row_of(entry: RegistryEntry) -> LearnerRow:
    return LearnerRow(entry.name, entry.region, entry.incarnation, entry.nonces, entry.account.as_data(), entry.evicted)


def _put_learners(db: sqlite3.Connection, rows: list[LearnerRow]) -> None:
    for row in rows:
        run_ledger.put_learner(db, row)


def _put_meta(db: sqlite3.Connection, meta: dict[str, Any]) -> None:
    for key, value in meta.items():
        run_ledger.put_meta(db, key, value)
