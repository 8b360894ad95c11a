"""Carries out the syncer's decisions with the ledger, the spool, merges and publications.

One event loop owns all state. Disk access and numerics run in worker threads on values that no other code writes. Their
results return as events. Every effect is durable before it is visible.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from functools import partial
from typing import assert_never

from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import buffers
from atoll_wire.contract import Fate
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import Layout
from atoll_wire.layout.sharding import divide

from atoll_server.checkpoints.restore import Restored
from atoll_server.learners.learner_registry import RegistryEntry
from atoll_server.ledger import shard_ledger
from atoll_server.ledger.rows import ContributionRow, FateRow, MergeRow
from atoll_server.merging import merge
from atoll_server.merging.norm_limit import NormLimiter
from atoll_server.rounds import syncer_events as ev
from atoll_server.rounds.outer_rule import OuterRule
from atoll_server.rounds.pacing import Pacing, Position
from atoll_server.rounds.round_state import Phase, RoundState
from atoll_server.rounds.syncer import Syncer, rounds_in_flight
from atoll_server.shard.contributions import Contributions, receipt_of, refusal_row
from atoll_server.shard.follower_log import FollowerLog
from atoll_server.shard.fragment import Fragment, HeldContribution
from atoll_server.shard.publications import Publication, UpdateCache
from atoll_server.shard.readers import Readers
from atoll_server.shard.snapshotter import Snapshotter
from atoll_server.shard_context.context import ShardContext
from atoll_server.shard_context.run_view import RunView
from atoll_server.shard_context.work import Work
from atoll_server.storage import crash_points
from atoll_server.storage.spool import Spool
from atoll_server.telemetry import entries
from atoll_server.telemetry.journal import Journal
from atoll_server.uploads.uploads import Uploads

BYTES_A_PARAMETER = 12  # bytes per parameter in a snapshot: theta, theta_pub, momentum
UPDATES_KEPT = 0.54  # minimum cache size in bytes per parameter, which fits an uncompressed update of each fragment


class Shard:
    """A shard with the fragments whose states are in `restored`. It is driven by timers and by calls to the core."""

    def __init__(self, context: ShardContext, restored: Restored, view: RunView, *, damaged: bool) -> None:
        """view: the registrar's newest view. damaged: whether a damaged snapshot was found and dropped."""
        self.context = context
        self.view = view
        self.follower_log = FollowerLog(context.settings.limits.notifications, self._current)
        self._journal = Journal()  # the follower log gets an entry before the core journal's subscribers
        self._journal.subscribe(self.follower_log.on, only_shows=False)
        self._journal.subscribe(context.journal.record, only_shows=False)
        self.work = Work(context.fail)
        run, limits = context.run, context.settings.limits
        self.layout: Layout = restored.layout
        self.initial = restored.initial
        self.spool = Spool(
            context.settings.directory / "spool", limits.spool_bytes, limits.contents_bytes, context.disk
        )
        self._parameters = sum(state.theta.size for state in restored.states.values())
        cache_bytes = max(limits.update_cache_bytes, int(UPDATES_KEPT * self._parameters))
        self.cache = UpdateCache(cache_bytes, limits.update_cache_versions)
        self._compressing = asyncio.Lock()
        self.fragments = {
            place.index: Fragment(
                place,
                restored.states[place.index],
                RoundState(restored.states[place.index].version),
                NormLimiter(limits.norm_window, run.norm_limit, run.clip_norm),
            )
            for place in self.layout.fragments
            if place.index in restored.states
        }
        rounds = {index: fragment.rounds for index, fragment in self.fragments.items()}
        self.syncer = Syncer(run, rounds, merge.weight, paused=bool(view.paused), pacing=self._pacing())
        self._place(view)
        self.uploads = Uploads(context, self.layout, self.spool, self.work)
        self.readers = Readers(self.work)
        self.contributions = Contributions(context.number, self.fragments, self.layout.parameters, context.registry)
        self.snapshots = Snapshotter(context, self.fragments, self.spool, self.work, restored, damaged=damaged)
        self._wake: asyncio.TimerHandle | None = None
        self._wake_at: float | None = None
        self._stopping = False

    def start(self) -> None:
        """Starts the shard's threads and timers, which `stop` ends."""
        self.work.start()
        self.dispatch(ev.Ticked())

    async def stop(self) -> None:
        """Stops opening rounds and waits for running merges."""
        self._stopping = True
        if self._wake is not None:
            self._wake.cancel()
        await self.work.stop()  # includes merges of rounds that close when a running merge ends

    # ------------------------------------------------------------------------------ events in, effects out

    def dispatch(self, event: ev.SyncerEvent) -> None:
        """Passes an event to the syncer and carries out the effects in order."""
        if self._stopping and not isinstance(event, ev.Merged):
            return
        now = self.context.clock.monotonic()
        effects = self.syncer.on(event, now)
        for effect in effects:
            match effect:
                case ev.OpenRound():
                    self._journal.record(entries.RoundOpened(effect.fragment, effect.cycle), now)
                case ev.Merge():
                    self._journal.record(entries.RoundClosed(effect), now)
                    self.work.spawn(self._merge(effect))
                case ev.Lapse():
                    self._journal.record(entries.RoundLapsed(effect), now)
                case ev.Refuse():
                    self.work.spawn(self._refuse_pending(effect))
                case _:
                    assert_never(effect)
        if self.syncer.looked_at == now:
            self._arm(self.syncer.next_wake(now))
        elif (concerned := ev.concerned(event)) is not None:
            at = self.syncer.next_wake_for(concerned, now)
            if at is not None and (self._wake_at is None or at < self._wake_at):
                self._arm(at)

    def _arm(self, at: float | None) -> None:
        """Sets the time of the next Ticked event, in monotonic seconds. None: there is none."""
        if self._wake is not None:
            self._wake.cancel()
        self._wake_at = None if self._stopping else at
        if self._wake_at is not None:
            after_s = max(0.001, self._wake_at - self.context.clock.monotonic())
            self._wake = asyncio.get_running_loop().call_later(after_s, self.dispatch, ev.Ticked())

    def _record(self, entry: entries.Entry) -> None:
        self._journal.record(entry, self.context.clock.monotonic())

    # ------------------------------------------------------------------------------ contributions

    def room(self, free_bytes: int) -> None:
        """Limits the spool's space, so that a snapshot and the ledger still fit on the disk after all uploads.

        free_bytes: the disk's free space now.
        """
        kept = self.context.settings.limits.headroom_bytes + BYTES_A_PARAMETER * self._parameters
        self.spool.room_bytes = max(0, free_bytes - kept - self.uploads.unwritten_bytes())

    def _decide(self, fate: FateRow) -> pb.Receipt:
        """Applies a durable fate to the state in memory and returns the receipt for the learner."""
        self.contributions.end(self.held(fate.key).row, fate)
        receipt = receipt_of(fate)
        self.uploads.decide(receipt)
        if fate.fate is Fate.REFUSED:
            self._record(entries.PendingRefused(fate))
        return receipt

    # ------------------------------------------------------------------------------ effects

    async def _merge(self, effect: ev.Merge) -> None:
        fragment = self.fragments[effect.fragment]
        view = self.view
        rule = OuterRule.of(self.context.run, effect.age, effect.cause, view.run_tokens)
        stored = [self.held(share.key).stored for share in effect.shares]
        weights = [share.weight for share in effect.shares]
        async with fragment.lock:
            old = fragment.state
            read = self.readers.any_of(old)
            compressed = self.compresses(fragment)

            def work() -> tuple[merge.MergeResult, Publication, float]:
                working = self.context.clock.monotonic()
                published = buffers.empty(fragment.place.length) if read else old.theta_pub
                merged = merge.merge(fragment.place, old, stored, weights, rule, published)
                publication = Publication.of(merged.update, compressed=compressed)
                for payload in stored:
                    payload.leave_to_disk()
                return merged, publication, self.context.clock.monotonic() - working

            try:
                merged, publication, took_s = await self.work.on_merges(work)
            except Exception as error:
                self.work.fail(error)  # must come before another task gets this fragment's lock
                raise
            self._record(entries.MergeComputed(fragment.index, effect.version))
            crash_points.point("merge.computed")
            assert merged.state.version == effect.version, "the syncer and the state agree on the version"
            fates = [FateRow(s.key, Fate.MERGED, effect.version, s.weight, s.staleness) for s in effect.shares]
            fates += [refusal_row(refusal, effect.version) for refusal in effect.refusals]
            row = MergeRow(
                effect.fragment,
                effect.version,
                effect.cycle,
                tuple((s.key.learner, s.key.incarnation, s.key.seq, s.weight, s.staleness) for s in effect.shares),
                asdict(rule) | {"codec": int(rule.codec)},
                view.run_tokens,
                view.voided_tokens,
                *merged.checksums,
                publication.size_bytes,
                self.context.clock.wall(),
            )
            operation = partial(shard_ledger.add_merge, generation=self.context.generation, row=row, fates=fates)
            await self.context.writer.commit(operation)
            crash_points.point("merge.committed")
            refused = [self.held(refusal.key).row for refusal in effect.refusals]
            fragment.state = merged.state
            if read:
                self.readers.passed(fragment.index)
            self.snapshots.merged(took_s)
        self._publish(fragment, effect, publication, fates, view)
        crash_points.point("merge.published")
        self._forget(refused)

    def _publish(
        self, fragment: Fragment, effect: ev.Merge, publication: Publication, fates: list[FateRow], view: RunView
    ) -> None:
        """Publishes a durable merge. view: the view of the run that the merge used."""
        refused, fragment.refused = fragment.refused, []
        self.cache.add(effect.fragment, replace(publication, receipts=(*refused, *map(self._decide, fates))))
        fragment.published_at = self.context.clock.monotonic()
        fragment.fetched_by.clear()
        self.contributions.published(share.key.learner for share in effect.shares)
        self._record(entries.Published(effect, publication.size_bytes, view.run_tokens, view.voided_tokens))
        self.dispatch(ev.Merged(effect.fragment, effect.version))

    async def _refuse_pending(self, effect: ev.Refuse) -> None:
        fragment = self.fragments[effect.fragment]
        fates = [refusal_row(refusal, fragment.version) for refusal in effect.refusals]
        await self.context.writer.commit(
            partial(shard_ledger.put_fates, generation=self.context.generation, fates=fates)
        )
        crash_points.point("refusal.committed")
        refused = [self.held(fate.key).row for fate in fates]
        fragment.refused += map(self._decide, fates)
        self._forget(refused)

    def _forget(self, refused: list[ContributionRow]) -> None:
        """Deletes refused payloads. Merged payloads stay until two snapshots cover them."""
        for row in refused:
            self.work.on_frames(self.spool.delete, self.context.generation, row.key, row.size_bytes)

    # ------------------------------------------------------------------------------ called by the service

    def compresses(self, fragment: Fragment) -> bool:
        """Returns whether a merge should compress its update: unless only fast links fetched the update before."""
        return self.context.run.compression.applies(fast=fragment.fetched_by == {True})

    async def publication(self, fragment: Fragment, version: int, *, fast: bool) -> Publication | None:
        """Returns the update that leads to `version`, or None if the cache has dropped it.

        fast: whether the caller's link is fast (see `Compression`). The first slow caller has the update compressed.
        """
        if (found := self.cache.get(fragment.index, version)) is None:
            return None
        if version == fragment.version:
            fragment.fetched_by.add(fast)
        if found.compressed or not self.context.run.compression.applies(fast=fast):
            return found
        async with self._compressing:
            known = self.cache.get(fragment.index, version) or found
            if not known.compressed:
                known = await asyncio.to_thread(known.compress)
                self.cache.replace(fragment.index, known)
        return known

    def held(self, key: ev.ContributionKey) -> HeldContribution:
        """Returns a pending contribution. Raises KeyError if the contribution is not pending."""
        return self.fragments[key.fragment].held[key]

    def pending(self) -> int:
        """Returns the number of pending contributions."""
        return sum(len(fragment.held) for fragment in self.fragments.values())

    def may_merge(self, learner: str, incarnation: int) -> bool:
        """Returns whether work of a process is pending or being uploaded."""
        held = (key for fragment in self.fragments.values() for key in fragment.held)
        pending = any((key.learner, key.incarnation) == (learner, incarnation) for key in held)
        return pending or self.uploads.has(learner, incarnation)

    def versions(self) -> dict[int, int]:
        return {index: fragment.version for index, fragment in self.fragments.items()}

    def _current(self) -> pb.FullState:
        """Returns the shard's full state, for learners whose position is unknown or too old."""
        return pb.FullState(
            versions=self.versions(),
            open=[
                pb.RoundOpened(fragment=index, cycle=fragment.rounds.cycle)
                for index, fragment in self.fragments.items()
                if fragment.rounds.phase is Phase.OPEN
            ],
            run_tokens=self.view.run_tokens,
            voided_tokens=self.view.voided_tokens,
            paused=pb.Paused(reason=self.view.paused),
        )

    # ------------------------------------------------------------------------------ called by the registrar

    def told(self, view: RunView) -> None:
        """Keeps a view if it is newer than the last one. Notifies learners if the run was paused or resumed."""
        if not view.newer_than(self.view):
            return
        before, self.view = self.view, view
        self._place(view)
        if view.paused != before.paused:
            self.dispatch(ev.Paused(bool(view.paused)))
            self.follower_log.on(entries.PauseChanged(view.paused), self.context.clock.monotonic())

    def _pacing(self) -> Pacing | None:
        if self.context.shards < 2 or not self.fragments:
            return None
        counts = [len(owned) for owned in divide(self.layout, self.context.shards)]
        return Pacing.of(counts, self.context.number, rounds_in_flight(self.context.run, len(self.layout.fragments)))

    def _place(self, view: RunView) -> None:
        """Sets the position in the run's cycle if the view contains a position."""
        if view.slot_s:
            self.syncer.position = Position(view.slot, self.context.clock.monotonic(), view.slot_s)

    def joined(self, learner: str, incarnation: int) -> None:
        """Records that a learner joined. Drops unfinished uploads of its older incarnations."""
        self.uploads.fence(learner, incarnation)
        self.contributions.joined(learner)
        self.dispatch(ev.Joined(learner, incarnation))

    def evicted(self, learner: str, incarnation: int, reason: str) -> None:
        """Drops an evicted learner's unfinished uploads and refuses its pending contributions."""
        self.uploads.fence(learner, incarnation + 1)
        self.dispatch(ev.Left(learner, reason))

    def sent(self, entry: RegistryEntry, size_bytes: int, parameters: int, *, whole: bool) -> None:
        """Counts payloads sent to a learner.

        parameters: number of parameters in the payloads. whole: whether the payloads are whole fragments rather than
        updates.
        """
        self.context.metrics.moved(entry.region, "down", Codec.FLOAT32 if whole else self.context.run.codec, size_bytes)
        entry.unsaved = True
        if whole:
            entry.account.bytes_whole += size_bytes
        else:
            entry.account.bytes_down += size_bytes
            entry.account.parameters_down += parameters
