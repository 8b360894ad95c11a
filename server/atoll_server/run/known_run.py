"""A run as one core process knows it: its settings, its layout, its learners and the fragments that this process holds.

The registrar (`registrar`) makes the decisions. A process with only a shard keeps a copy of them (`replica`).
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from atoll_wire import outer_pb2 as pb
from atoll_wire.layout.layout import Layout

from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.learner_registry import LearnerProcess, LearnerRegistry, RegistryEntry
from atoll_server.learners.session_tokens import SessionKey
from atoll_server.ledger import run_ledger
from atoll_server.ledger.ledger_writer import LedgerWriter
from atoll_server.ledger.lineage import Line
from atoll_server.ledger.rows import LearnerRow
from atoll_server.links.links import Links
from atoll_server.rounds import syncer_events as ev
from atoll_server.run.run_clock import RunClock
from atoll_server.settings import Limits, RunSettings
from atoll_server.shard.fragment import Fragment
from atoll_server.shard.shard import Shard
from atoll_server.shard_context.run_view import RunView
from atoll_server.telemetry import entries
from atoll_server.telemetry.journal import Journal


@dataclass(frozen=True, slots=True)
class Waiting:
    """The run has no parameters yet."""


@dataclass(frozen=True, slots=True)
class Running:
    """The run has parameters. shard: the shard in this process."""

    shard: Shard


class KnownRun(ABC):
    """A run as one core process knows it.

    paused: the operator and the reason; empty while the run is not paused. layout: the layout; until the run has
    parameters, that of the learner that holds the lease. turned_away: number of contributions that this process has
    refused since its start before their upload was complete. leases: learner and incarnation of each lease of data
    units whose sums a registrar in another process wants. links: links of fronts and learners to this process.
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
        self.leases: dict[int, tuple[str, int]] = {}
        self.links = Links()
        self.state: Waiting | Running = Waiting()
        self.writer: LedgerWriter  # set by `restore`, as is the next attribute
        self.sessions: SessionKey

    @property
    @abstractmethod
    def number(self) -> int:
        """The position of this process's shard in `JoinReply.shards`."""

    @property
    @abstractmethod
    def shards(self) -> int:
        """The number of shards that hold fragments."""

    @abstractmethod
    def view(self) -> RunView:
        """Returns the newest view of the run, for this process's shard."""

    @abstractmethod
    def tell(self) -> None:
        """Tells the shards the run's tokens, which each report may change."""

    def record(self, entry: entries.Entry) -> None:
        self.journal.record(entry, self.clock.monotonic())

    def restore_learners(self, rows: Iterable[LearnerRow]) -> None:
        """Adds the learners in the ledger. Their processes must join again."""
        for row in rows:
            self.registry.restore(row.name, row.region, row.incarnation, row.nonces, row.account, row.evicted)
            self.clock.begin_after(row.account["heard_at"])
        self.registry.since = self.clock.wall()

    # ------------------------------------------------------------------------------ the shard in this process

    @property
    def shard(self) -> Shard | None:
        """The shard in this process; None while the run has no parameters."""
        return self.state.shard if isinstance(self.state, Running) else None

    def runs(self, layout: Layout, shard: Shard) -> None:
        """Sets this process's shard of a run that has parameters."""
        self.layout = layout
        self.state = Running(shard)

    def owner(self, fragment: int) -> tuple[Shard, Fragment]:
        """Returns this process's shard and the fragment. Raises Refused if the shard does not hold the fragment."""
        shard = self.running()
        if (found := shard.fragments.get(fragment)) is not None:
            return shard, found
        last = len(shard.layout.fragments) - 1
        if fragment <= last:
            text = f"fragment {fragment} belongs to another shard of this run: call Join or Describe for its address"
            raise Refused(Status.UNAUTHENTICATED, text)
        raise Refused(Status.INVALID_ARGUMENT, f"fragment {fragment} does not exist: the run has fragments 0 to {last}")

    def numbered(self, number: int) -> Shard:
        """Returns this process's shard. Raises Refused if the caller wants a shard with a different number."""
        shard = self.running()
        if number != self.number:
            text = f"this process serves shard {self.number}, not shard {number}: join again, then call that shard"
            raise Refused(Status.UNAUTHENTICATED, text)
        return shard

    def running(self) -> Shard:
        """Returns this process's shard. Raises Refused while the run has no parameters."""
        if (shard := self.shard) is None:
            raise Refused(Status.UNAVAILABLE, "the run has no parameters yet: start a learner, or try again soon")
        return shard

    # ------------------------------------------------------------------------------ learners

    def session(self, session: pb.Session) -> LearnerProcess:
        """Returns the learner process that made a call. Raises Refused if its session is not valid."""
        number = self.proven(session)
        return LearnerProcess(self.registry.check(session.learner, session.incarnation, number), session.incarnation)

    def proven(self, session: pb.Session) -> int:
        """Returns the number of a session, or 0 if its token is invalid.

        Raises Refused if the session is of a different run.
        """
        if session.run != self.run_id or session.generation != self.generation:
            raise Refused(Status.UNAUTHENTICATED, "the session belongs to another run or generation: join again")
        return self.sessions.number(session.learner, session.incarnation, session.token)

    def fenced(self, learner: str, incarnation: int) -> bool:
        """Returns whether a process can no longer send work because it left, was evicted or was replaced."""
        entry = self.registry.entries.get(learner)
        if entry is None:
            return False
        return entry.incarnation > incarnation or bool(entry.evicted) or entry.account.left_at is not None

    async def fence(self, process: LearnerProcess) -> None:  # noqa: B027 - the registrar did this when it admitted it
        """Waits until older processes of the same learner are refused even after a restart."""

    async def left(self, entry: RegistryEntry, *, itself: bool) -> None:
        """Durably records that a learner left, so that a restarted core does not count the learner as lost.

        itself: as in TimeAccount.left.
        """
        entry.account.left(self.clock.wall(), itself=itself)
        entry.session = 0
        await self.save(entry)
        if (shard := self.shard) is not None:
            shard.dispatch(ev.Left(entry.name))
        if not entry.session:  # the learner has not joined again meanwhile
            entry.start_session(0, Refused(Status.UNAUTHENTICATED, f'learner "{entry.name}" has left: join again'))
        self.record(entries.Left(entry.name, entry.incarnation))

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

    def turn_away(self, refused: Refused, learner: str) -> None:
        """Counts and records a contribution that was refused before its upload was complete."""
        self.turned_away += 1
        self.record(entries.TurnedAway(learner, refused))

    def settings_message(self) -> pb.RunSettings:
        return pb.RunSettings(
            inner_steps=self.settings.inner_steps,
            fragments=len(self.layout.fragments) if self.layout is not None else self.settings.fragments,
            overlap_steps=self.settings.overlap_steps,
            codec=int(self.settings.codec),  # type: ignore[arg-type]
            max_staleness=self.settings.max_staleness,
            total_tokens=self.settings.total_tokens,
            compression=int(self.settings.compression),  # type: ignore[arg-type]
        )


def row_of(entry: RegistryEntry) -> LearnerRow:
    return LearnerRow(entry.name, entry.region, entry.incarnation, entry.nonces, entry.account.as_data(), entry.evicted)


def _put_learners(db: sqlite3.Connection, rows: list[LearnerRow]) -> None:
    for row in rows:
        run_ledger.put_learner(db, row)
