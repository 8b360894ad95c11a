"""Carries out what the syncer decides; the only place where ledger, spool, merge and publications meet.

One event loop owns all state. Disk and numerics run in worker threads on values that nobody else writes, and their
results come back as events. Every effect is durable before it is visible.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
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
from atoll_server.learners.registry import Entry, Roster
from atoll_server.merging import merge
from atoll_server.merging.norm_guard import NormGuard
from atoll_server.rounds import events as ev
from atoll_server.rounds.fragment_rounds import FragmentRounds, Phase
from atoll_server.rounds.outer_step import OuterRule
from atoll_server.rounds.syncer import Syncer
from atoll_server.settings import CoreSettings, RunSettings
from atoll_server.shard.contributions import Contributions, receipt_of, refusal_row
from atoll_server.shard.fragment import Fragment, Held
from atoll_server.shard.publications import HappeningLog, Publication, UpdateCache
from atoll_server.shard.readers import Readers
from atoll_server.shard.snapshotter import Snapshotter
from atoll_server.shard.uploads import Uploads
from atoll_server.storage import crash_points, ledger
from atoll_server.storage.disk import Disk
from atoll_server.storage.ledger_writer import LedgerWriter
from atoll_server.storage.rows import ContributionRow, FateRow, MergeRow
from atoll_server.storage.spool import Spool
from atoll_server.telemetry.metrics import Metrics
from atoll_server.telemetry.timeline import Timeline

log = structlog.get_logger()

BYTES_A_PARAMETER = 12  # of a snapshot: theta, theta_pub, momentum
UPDATES_KEPT = 0.4  # bytes a parameter at least: nearly one update of every fragment


class Shard:
    """Some fragments of a run that has parameters. Told by the service and by time.

    They are those whose states are in `restored`.
    """

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
        *,
        paused: bool,
        damaged: bool,
    ) -> None:
        """fail: is told what could not be carried through, and ends the process. wall: seconds of the run's clock.

        damaged: a snapshot was found damaged and given up.
        """
        self.wall = wall
        self.settings, self.run, self.generation = settings, run, generation
        self.layout: Layout = restored.layout
        self.line = restored.line
        self.initial = restored.initial
        self.roster, self.happenings, self.metrics = roster, happenings, metrics
        self.writer, self._fail, self.disk, self.failed = writer, fail, disk, False
        self.spool = Spool(
            settings.directory / "spool", settings.limits.spool_bytes, settings.limits.contents_bytes, disk
        )
        self.parameters = sum(state.theta.size for state in restored.states.values())  # of its fragments
        cache_bytes = max(settings.limits.update_cache_bytes, int(UPDATES_KEPT * self.parameters))
        self.cache = UpdateCache(cache_bytes, settings.limits.update_cache_versions)
        self.fragments = {
            place.index: Fragment(
                place, restored.states[place.index], FragmentRounds(restored.states[place.index].version),
                NormGuard(settings.limits.norm_window, run.norm_limit, run.clip_norm),
            )
            for place in self.layout.fragments
            if place.index in restored.states
        }  # fmt: skip
        rounds = {index: fragment.rounds for index, fragment in self.fragments.items()}
        self.syncer = Syncer(run, rounds, merge.weight, paused=paused)
        self.workers = ThreadPoolExecutor(2, thread_name_prefix="frames")
        self.mergers = ThreadPoolExecutor(2, thread_name_prefix="merge")
        self.uploads = Uploads(self.layout, run.codec, generation, self.spool, settings.limits, self.workers)
        self.readers = Readers(lambda: self.failed)
        self.contributions = Contributions(self.fragments, self.layout.parameters, roster, metrics)
        self.timeline = Timeline(metrics)
        self.snapshots = Snapshotter(self, restored.snapshots, restored.undone, restored.replay_s, damaged=damaged)
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

    def room(self, free_bytes: int) -> None:
        """What the disk has free now: a snapshot and the ledger must still find room when all uploads are here."""
        kept = self.settings.limits.headroom_bytes + BYTES_A_PARAMETER * self.parameters
        self.spool.room_bytes = max(0, free_bytes - kept - self.uploads.unwritten_bytes())

    def _decide(self, fate: FateRow) -> pb.Receipt:
        """A fate is durable: memory follows, and the learner can be told."""
        self.contributions.end(self.held(fate.key).row, fate)
        receipt = receipt_of(fate)
        self.uploads.decide(receipt)
        if fate.fate == "refused":
            self.happenings.append(pb.Happening(receipt=receipt))
        return receipt

    # ------------------------------------------------------------------------------ effects

    async def _merge(self, effect: ev.Merge) -> None:
        fragment = self.fragments[effect.fragment]
        rule = OuterRule.of(self.run, effect.age, effect.cause, self.roster.tokens())
        stored = [self.held(share.key).stored for share in effect.shares]
        weights = [share.weight for share in effect.shares]
        async with fragment.lock:
            old = fragment.state
            read = self.readers.any_of(old)

            def work() -> tuple[merge.Merged, Publication, float]:
                working = time.monotonic()
                published = memory.empty(fragment.place.length) if read else old.theta_pub
                merged = merge.merge(fragment.place, old, stored, weights, rule, published)
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
            refused = [self.held(refusal.key).row for refusal in effect.refusals]
            fragment.state = merged.state
            if read:
                self.readers.passed(fragment.index)
            self.snapshots.merged(took_s)
        self._publish(fragment, effect, publication, fates)
        crash_points.point("merge.published")
        self._forget(refused)

    def _publish(self, fragment: Fragment, effect: ev.Merge, publication: Publication, fates: list[FateRow]) -> None:
        """The merge is durable: now it may be seen."""
        refused, fragment.refused = fragment.refused, []
        self.cache.add(effect.fragment, replace(publication, receipts=(*refused, *map(self._decide, fates))))
        fragment.published_at = time.monotonic()
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
        fragment = self.fragments[effect.fragment]
        fates = [refusal_row(refusal, fragment.version) for refusal in effect.refusals]
        await self.writer.commit(partial(ledger.put_fates, generation=self.generation, fates=fates))
        crash_points.point("refusal.committed")
        refused = [self.held(fate.key).row for fate in fates]
        fragment.refused += map(self._decide, fates)
        self._forget(refused)

    def _forget(self, refused: list[ContributionRow]) -> None:
        """Refused payloads are of no more use; merged ones stay until two snapshots cover them."""
        loop = asyncio.get_running_loop()
        for row in refused:
            loop.run_in_executor(self.workers, self.spool.delete, self.generation, row.key, row.size_bytes)

    # ------------------------------------------------------------------------------ asked by the service

    def held(self, key: ev.Key) -> Held:
        """An acknowledged contribution that has no fate yet."""
        return self.fragments[key.fragment].held[key]

    def pending(self) -> int:
        """Acknowledged contributions that have no fate yet."""
        return sum(len(fragment.held) for fragment in self.fragments.values())

    def versions(self) -> dict[int, int]:
        """The published version of each fragment, by its number."""
        return {index: fragment.version for index, fragment in self.fragments.items()}

    def open_rounds(self) -> list[pb.RoundOpened]:
        """As followers are told of them."""
        return [
            pb.RoundOpened(fragment=index, cycle=fragment.rounds.cycle)
            for index, fragment in self.fragments.items()
            if fragment.rounds.phase is Phase.OPEN
        ]

    def joined(self, learner: str, incarnation: int) -> None:
        """A process may speak for a name: what an older one left unfinished is dropped."""
        self.uploads.fence(learner, incarnation)
        self.contributions.joined(learner)
        self.dispatch(ev.Joined(learner, incarnation))

    def evicted(self, learner: str, incarnation: int, reason: str) -> None:
        """A learner's uploads are dropped, and what waits of its work is refused."""
        self.uploads.fence(learner, incarnation + 1)
        self.dispatch(ev.Gone(learner, reason))

    def sent(self, entry: Entry, size_bytes: int, parameters: int, *, whole: bool) -> None:
        """Counts what went down to a learner."""
        self.metrics.moved(entry.region, "down", Codec.FLOAT32 if whole else self.run.codec, size_bytes)
        entry.dirty = True
        if whole:
            entry.account.bytes_whole += size_bytes
        else:
            entry.account.bytes_down += size_bytes
            entry.account.parameters_down += parameters
