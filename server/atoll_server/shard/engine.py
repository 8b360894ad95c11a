"""Carries out what the syncer decides; the only place where ledger, spool, merge and publications meet.

One event loop owns all state. Disk and numerics run in worker threads on values that nobody else writes, and their
results come back as events. Every effect is durable before it is visible.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any, assert_never

import structlog
from atoll_wire import memory
from atoll_wire import outer_pb2 as pb
from atoll_wire.layout import Layout
from atoll_wire.spans import Codec

from atoll_server.checkpoints.restore import Restored
from atoll_server.learners.plausibility import Declared, weighed
from atoll_server.learners.registry import Entry, Roster
from atoll_server.merging import merge
from atoll_server.merging.norm_guard import Guard
from atoll_server.rounds import events as ev
from atoll_server.rounds.fragment_rounds import Phase
from atoll_server.rounds.outer_step import OuterRule
from atoll_server.rounds.syncer import Syncer
from atoll_server.settings import CoreSettings, RunSettings
from atoll_server.shard.contributions import Contributions, receipt_of, refusal_row
from atoll_server.shard.publications import HappeningLog, Publication, UpdateCache
from atoll_server.shard.readers import Readers
from atoll_server.shard.uploads import Uploads
from atoll_server.storage import crash_points, ledger
from atoll_server.storage.disk import Disk
from atoll_server.storage.ledger_writer import LedgerWriter
from atoll_server.storage.rows import ContributionRow, FateRow, MergeRow
from atoll_server.storage.spool import Spool, Stored
from atoll_server.telemetry.metrics import Metrics
from atoll_server.telemetry.timeline import Timeline

log = structlog.get_logger()

BYTES_A_PARAMETER = 12  # of a snapshot: theta, theta_pub, momentum
UPDATES_KEPT = 0.4  # bytes a parameter at least: nearly one update of every fragment


class Engine:
    """A run that has parameters. Told by the service and by time."""

    def __init__(
        self,
        settings: CoreSettings,
        run: RunSettings,
        generation: int,
        restored: Restored,
        roster: Roster,
        happenings: HappeningLog,
        writer: LedgerWriter,
        metrics: Metrics,
        fail: Callable[[BaseException], None],
        disk: Disk,
        wall: Callable[[], float],
    ) -> None:
        """fail: is told what could not be carried through; whoever runs the process ends it then. wall: its time."""
        self._wall = wall
        self.settings, self.run, self.generation = settings, run, generation
        self.layout: Layout = restored.layout
        self.initial = restored.initial
        self.states: list[merge.FragmentState] = restored.states
        self.roster, self.happenings, self.metrics = roster, happenings, metrics
        self.writer, self._fail, self.disk, self.failed = writer, fail, disk, False
        self.spool = Spool(
            settings.directory / "spool", settings.limits.spool_bytes, settings.limits.contents_bytes, disk
        )
        cache_bytes = max(settings.limits.update_cache_bytes, int(UPDATES_KEPT * self.layout.parameters))
        self.cache = UpdateCache(cache_bytes, settings.limits.update_cache_versions)
        self.syncer = Syncer(run, len(self.layout.fragments), merge.weight)
        self.workers = ThreadPoolExecutor(2, thread_name_prefix="frames")
        self.mergers = ThreadPoolExecutor(2, thread_name_prefix="merge")
        self.guard = Guard(len(self.layout.fragments), settings.limits.norm_window, run.norm_limit, run.clip_norm)
        self.uploads = Uploads(
            self.layout, run.codec, generation, self.spool, settings.limits, self.workers, self.guard, self
        )
        self.unsaved_s = restored.replay_s  # of merging, beyond the newest snapshot
        self.locks = [asyncio.Lock() for _ in self.layout.fragments]  # merging, or being written to a snapshot
        self.readers = Readers(self.states, self.locks, lambda: self.failed)
        self.contributions = Contributions(self.layout, roster, metrics)
        self.timeline = Timeline(metrics)
        self.published_at: list[float | None] = [None] * len(self.layout.fragments)  # each one's newest version
        self._refused_since: list[list[pb.Receipt]] = [[] for _ in self.layout.fragments]
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake: asyncio.TimerHandle | None = None
        self._stopping = False

    def start(self) -> None:
        """Lets time pass."""
        self.dispatch(ev.Ticked())

    async def stop(self) -> None:
        """Opens no more rounds and lets running merges end."""
        self._stopping = True
        if self._wake is not None:
            self._wake.cancel()
        while self._tasks:  # a merge that ends may let another round close
            await asyncio.gather(*self._tasks)
        self.workers.shutdown()
        self.mergers.shutdown()

    # ------------------------------------------------------------------------------ events in, effects out

    def dispatch(self, event: ev.Event) -> None:
        """Tells the syncer and carries out what it answers."""
        if self._stopping and not isinstance(event, ev.Merged):
            return
        now = time.monotonic()
        effects = self.syncer.on(event, now)
        self.timeline.on(event, effects, now)
        for effect in effects:
            match effect:
                case ev.OpenRound():
                    self.happenings.append(
                        pb.Happening(opened=pb.RoundOpened(fragment=effect.fragment, cycle=effect.cycle))
                    )
                case ev.Merge():
                    self.spawn(self._merge(effect))
                case ev.Lapse():
                    log.info("round lapsed", fragment=effect.fragment, cycle=effect.cycle, reason=effect.reason)
                case ev.Refuse():
                    self.spawn(self._refuse_pending(effect))
                case _:
                    assert_never(effect)
        if self.syncer.looked_at == now:
            self._arm()

    def _arm(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
        now = time.monotonic()
        at = None if self._stopping else self.syncer.next_wake(now)
        if at is not None:
            self._wake = asyncio.get_running_loop().call_later(max(0.001, at - now), self.dispatch, ev.Ticked())

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work whose failure ends the process."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Acknowledged work cannot be carried through, and the state may be half changed: no more is written."""
        self.failed = True
        self._fail(error)

    # ------------------------------------------------------------------------------ contributions

    async def keep(self, row: ContributionRow, stored: Stored) -> None:
        """The payload is on disk: commit the row, then count on it."""
        await self.writer.commit(partial(ledger.add_contribution, generation=self.generation, row=row))
        crash_points.point("contribution.committed")
        self.contributions.accept(row)
        self.contributions.hold(row, stored)
        self.dispatch(ev.Contributed(row.key, row.cycle, row.base_version, row.tokens, row.steps))

    async def refuse(self, row: ContributionRow, reason: str) -> pb.Receipt:
        """A contribution that came whole and is not wanted: its receipt is durable, its payload is not kept."""
        fate = FateRow(row.key, "refused", self.states[row.key.fragment].version, reason=reason, dropped=True)
        await self.writer.commit(partial(ledger.add_contribution, generation=self.generation, row=row, fate=fate))
        crash_points.point("contribution.refused")
        self.contributions.accept(row)
        self.contributions.end(row, fate)
        log.warning("contribution refused", contribution=str(row.key), reason=reason)
        self.dispatch(ev.Declined(row.key.learner, row.key.fragment, row.cycle, "its contribution was refused"))
        return receipt_of(fate)

    def room(self, free_bytes: int) -> None:
        """What the disk has free now: a snapshot and the ledger must still find room when all uploads are here."""
        kept = self.settings.limits.headroom_bytes + BYTES_A_PARAMETER * self.layout.parameters
        self.spool.room_bytes = max(0, free_bytes - kept - self.uploads.unwritten_bytes())

    def weighed(self, key: ev.Key, said: Declared) -> Declared:
        """What counts of the tokens and steps that a contribution declares."""
        entry, wall = self.roster.entries[key.learner], self._wall()
        dead = key.incarnation != entry.incarnation and entry.account.past
        spent = entry.account.past[0] if dead else entry.account.current  # the sums of all that are dead
        rates = self.roster.rates(wall)
        tokens = spent.tokens
        if not dead:  # they may have been held back until a moment ago
            tokens, _ = spent.tokens_counted(spent.said_tokens, rates.most(key.learner), wall)
        reported = Declared(tokens, spent.steps)
        unheard_s = max(0.0, wall - (spent.grown_at or spent.joined_at))
        rate, usual = rates.of(key.learner), rates.usual(key.learner)
        counts = weighed(said, reported, self.contributions.given(key), unheard_s, rate, usual)
        if counts != said:
            self.metrics.contributions.labels("clamped").inc()
            told = {"tokens": said.tokens, "steps": said.steps, "counted": counts}
            log.warning("a contribution declares more than its learner can have trained", learner=key.learner, **told)
        return counts

    def present(self) -> Set[str]:
        """Learners that may be expected to contribute."""
        now = time.monotonic()
        return {name for name, member in self.syncer.members.items() if member.expected(now)}

    def pending_bytes(self, learner: str) -> int:
        """Of a learner's acknowledged contributions that have no fate yet."""
        return self.contributions.pending_bytes[learner]

    def _decide(self, fate: FateRow) -> pb.Receipt:
        """A fate is durable: memory follows, and the learner can be told."""
        self.contributions.end(self.contributions.pending[fate.key].row, fate)
        receipt = receipt_of(fate)
        self.uploads.decide(receipt)
        if fate.fate == "refused":
            self.happenings.append(pb.Happening(receipt=receipt))
        return receipt

    # ------------------------------------------------------------------------------ effects

    async def _merge(self, effect: ev.Merge) -> None:
        fragment = self.layout.fragments[effect.fragment]
        rule = OuterRule.of(self.run, effect.age, effect.cause, self.roster.tokens())
        stored = [self.contributions.pending[share.key].stored for share in effect.shares]
        weights = [share.weight for share in effect.shares]
        async with self.locks[fragment.index]:
            old = self.states[fragment.index]
            read = self.readers.any_of(old)

            def work() -> tuple[merge.Merged, Publication, float]:
                working = time.monotonic()
                published = memory.empty(fragment.length) if read else old.theta_pub
                merged = merge.merge(fragment, old, stored, weights, rule, published)
                return merged, Publication.of(merged.update), time.monotonic() - working

            try:
                merged, publication, took_s = await asyncio.get_running_loop().run_in_executor(self.mergers, work)
            except Exception as error:
                self.fail(error)  # before anybody else is given this fragment's lock
                raise
            self.timeline.computed(fragment.index, effect.version, time.monotonic())
            crash_points.point("merge.computed")
            assert merged.state.version == effect.version, "the syncer and the state agree on the version"
            fates = [FateRow(s.key, "merged", effect.version, s.weight, s.staleness) for s in effect.shares]
            fates += [refusal_row(refusal, effect.version) for refusal in effect.refusals]
            row = MergeRow(
                effect.fragment, effect.version, effect.cycle,
                tuple((s.key.learner, s.key.incarnation, s.key.seq, s.weight, s.staleness) for s in effect.shares),
                asdict(rule) | {"codec": int(rule.codec)},
                *merged.checksums, publication.size_bytes, time.time(),
            )  # fmt: skip
            await self.writer.commit(partial(ledger.add_merge, generation=self.generation, row=row, fates=fates))
            crash_points.point("merge.committed")
            refused = [self.contributions.pending[refusal.key].row for refusal in effect.refusals]
            self.states[fragment.index] = merged.state
            if read:
                self.readers.passed(fragment.index)
            self.unsaved_s += took_s
        self._publish(effect, publication, fates)
        crash_points.point("merge.published")
        self._forget(refused)

    def _publish(self, effect: ev.Merge, publication: Publication, fates: list[FateRow]) -> None:
        """The merge is durable: now it may be seen."""
        lapsed, self._refused_since[effect.fragment] = self._refused_since[effect.fragment], []
        self.cache.add(effect.fragment, replace(publication, receipts=(*lapsed, *map(self._decide, fates))))
        self.published_at[effect.fragment] = time.monotonic()
        self.contributions.merged(share.key.learner for share in effect.shares)
        log.debug("merged", fragment=effect.fragment, version=effect.version, reason=effect.reason,
                  shares={str(share.key): round(share.weight, 4) for share in effect.shares})  # fmt: skip
        published = pb.UpdatePublished(
            fragment=effect.fragment,
            version=effect.version,
            size_bytes=publication.size_bytes,
            run_tokens=self.roster.tokens(),
            struck_tokens=self.roster.struck_tokens(),
        )
        self.happenings.append(pb.Happening(published=published))
        self.dispatch(ev.Merged(effect.fragment, effect.version))

    async def _refuse_pending(self, effect: ev.Refuse) -> None:
        version = self.states[effect.fragment].version
        fates = [refusal_row(refusal, version) for refusal in effect.refusals]
        await self.writer.commit(partial(ledger.put_fates, generation=self.generation, fates=fates))
        crash_points.point("refusal.committed")
        refused = [self.contributions.pending[fate.key].row for fate in fates]
        self._refused_since[effect.fragment] += map(self._decide, fates)
        self._forget(refused)

    def _forget(self, refused: list[ContributionRow]) -> None:
        """Refused payloads are of no more use; merged ones stay until two snapshots cover them."""
        loop = asyncio.get_running_loop()
        for row in refused:
            loop.run_in_executor(self.workers, self.spool.delete, self.generation, row.key, row.size_bytes)

    # ------------------------------------------------------------------------------ asked by the service

    def versions(self) -> list[int]:
        """The published version of each fragment."""
        return [state.version for state in self.states]

    def current(self) -> pb.Current:
        """Everything that a follower must know to go on from here."""
        open_rounds = [
            pb.RoundOpened(fragment=index, cycle=rounds.cycle)
            for index, rounds in enumerate(self.syncer.fragments)
            if rounds.phase is Phase.OPEN
        ]
        tokens, struck = self.roster.tokens(), self.roster.struck_tokens()
        return pb.Current(versions=self.versions(), open=open_rounds, run_tokens=tokens, struck_tokens=struck)

    def sent(self, entry: Entry, size_bytes: int, parameters: int, *, whole: bool) -> None:
        """Counts what went down to a learner."""
        self.metrics.moved(entry.region, "down", Codec.FLOAT32 if whole else self.run.codec, size_bytes)
        entry.dirty = True
        if whole:
            entry.account.bytes_whole += size_bytes
        else:
            entry.account.bytes_down += size_bytes
            entry.account.parameters_down += parameters
