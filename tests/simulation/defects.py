"""Deliberate defects of the product, each of which the simulation of one core must find (see `find_defects`).

Each defect is a context manager that makes the real code wrong in one way. A simulation that misses it proves nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock
from weakref import WeakSet

import grpc.aio
import numpy as np
from atoll.agent import coordination, fetching, run_session, sending, shard_session
from atoll.boundary import movement, movement_watch, round_answers, step_boundary
from atoll.boundary.host_values import HostValues
from atoll.fragments import adoption, exchange, in_place, segments
from atoll.model import optimizer_copies
from atoll.transfers import partial_fetch
from atoll_server.access import quotas, reader_limits
from atoll_server.checkpoints import restore, rollback
from atoll_server.front import service as front_service
from atoll_server.front.answering import Answering, Route
from atoll_server.front.fetch_cache import CacheKey, FetchCache
from atoll_server.front.region_fetches import RegionFetches
from atoll_server.learners import goodput, learner_counters, learner_registry, plausibility
from atoll_server.ledger import database, ledger_writer, lineage, rows, run_ledger, shard_ledger
from atoll_server.merging import norm_limit
from atoll_server.processes import core_process
from atoll_server.rounds import round_state as merge_rounds
from atoll_server.rounds import syncer
from atoll_server.rounds.syncer_events import Merge
from atoll_server.run import initial_parameters, joining, known_run
from atoll_server.shard import follower_log, intake, shard, snapshotter
from atoll_server.storage import payload_writer
from atoll_server.telemetry import entries, journal
from atoll_server.uploads import uploads
from atoll_server.upstream import core_connection
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import LinkLost
from atoll_wire.contract import Fate

from tests.simulation import disk
from tests.simulation.data_defects import DATA_DEFECTS

DECODED = partial_fetch.PartialFetch.decoded
Defect = Callable[[], Iterator[None]]
DEFECTS: dict[str, Defect] = {}
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def defect(function: Defect) -> Defect:
    """Adds a defect to the list. Its docstring states what is wrong."""
    DEFECTS[function.__name__] = function
    return function


def patch(owner: Any, name: str, new: Any) -> AbstractContextManager[Any]:
    """Context manager that replaces `owner.name` with a defect.

    Raises RuntimeError unless both have the same signature.
    """
    old = getattr(owner, name)
    parameters = list(inspect.signature(old).parameters.values()) if inspect.isfunction(old) else []
    if inspect.isfunction(new) and not any(each.kind in VARIABLE for each in parameters):
        for some in (parameters, [each for each in parameters if each.default is each.empty]):
            given = [each.name for each in some if each.kind is not each.KEYWORD_ONLY]
            named = dict.fromkeys(each.name for each in some if each.kind is each.KEYWORD_ONLY)
            try:
                inspect.signature(new).bind(*given, **named)
            except TypeError as error:
                raise RuntimeError(f"a defect no longer fits {name}: {error}; change it to match the code") from error
    return mock.patch.object(owner, name, new)


# ------------------------------------------------------------------------------------------------- names and
# incarnations


@defect
def fencing_off() -> Iterator[None]:
    """A session of an older incarnation is accepted as the newest."""

    def check(
        self: learner_registry.LearnerRegistry, name: str, incarnation: int, session: int
    ) -> learner_registry.RegistryEntry:
        return dataclasses.replace(self.entries[name], incarnation=incarnation)

    with patch(learner_registry.LearnerRegistry, "check", check), patch(uploads.Uploads, "fence", lambda *_: None):
        yield


@defect
def a_name_is_taken_over_without_an_answer() -> Iterator[None]:
    """The first Join of another process takes over a name, however late it arrives."""
    join = learner_registry.LearnerRegistry.join

    def at_once(self: learner_registry.LearnerRegistry, name: str, *values: Any) -> learner_registry.RegistryEntry:
        entry = join(self, name, *values)
        if entry.nonce != values[1]:
            values = (*values[:4], entry.challenge[1], *values[5:])
            entry = join(self, name, *values)
        return entry

    with patch(learner_registry.LearnerRegistry, "join", at_once):
        yield


@defect
def a_restart_does_not_change_the_incarnation() -> Iterator[None]:
    """A restarted learner gets the dead process's incarnation."""
    join = learner_registry.LearnerRegistry.join

    def same(
        self: learner_registry.LearnerRegistry, name: str, region: str, nonce: int, *values: Any
    ) -> learner_registry.RegistryEntry:
        entry = self.entries.get(name)
        if entry is not None and not entry.connected:
            entry.nonces = [nonce]
        return join(self, name, region, nonce, *values)

    with patch(learner_registry.LearnerRegistry, "join", same):
        yield


@defect
def the_epoch_does_not_grow() -> Iterator[None]:
    """A restarted core keeps its epoch."""
    put = run_ledger.put_meta

    def frozen(db: Any, key: str, value: Any) -> None:
        put(db, key, 1 if key == "epoch" else value)

    with patch(run_ledger, "put_meta", frozen):
        yield


@defect
def a_pause_is_forgotten() -> Iterator[None]:
    """A pause is announced to all learners, but not stored."""
    put = run_ledger.put_meta

    def in_memory(db: Any, key: str, value: Any) -> None:
        if key != "paused":
            put(db, key, value)

    with patch(run_ledger, "put_meta", in_memory):
        yield


@defect
def an_evicted_learner_is_heard() -> Iterator[None]:
    """The ledger says that the learner is evicted, but the core accepts its calls."""
    evict = learner_registry.LearnerRegistry.evict

    def in_the_books_only(
        self: learner_registry.LearnerRegistry, entry: learner_registry.RegistryEntry, reason: str, wall: float
    ) -> None:
        evict(self, entry, "", wall)

    with patch(learner_registry.LearnerRegistry, "evict", in_the_books_only):
        yield


# ------------------------------------------------------------------------------------------------- initial parameters


@defect
def initial_parameters_accepted_twice() -> Iterator[None]:
    """Every caller gets the lease, and its upload replaces the run's parameters."""
    accept, let_in = joining.Joining.accept, joining.Joining._let_in

    async def again(self: joining.Joining, process: Any, staging: Any) -> None:
        kept, self._run.state = self._run.state, known_run.Waiting()
        self._lease = initial_parameters.Lease(process.entry, 1e9, upload=staging)
        try:
            await accept(self, process, staging)
        finally:
            if isinstance(self._run.state, known_run.Waiting):
                self._run.state = kept

    async def lease_for_all(self: joining.Joining, request: Any, tensors: Any, fleet: str) -> Any:
        entry, state = await let_in(self, request, tensors, fleet)
        asks = request.incarnation == 0 and state != pb.JoinReply.STATE_CONFIRM
        early = asks and not sum(self._run.versions().values())
        return entry, pb.JoinReply.STATE_INITIALISE if early and self._run.shard is None else state

    async def stage(self: joining.Joining, _process: Any, header: Any) -> Any:
        made = initial_parameters.StagedFile(self._settings.directory, header.size_bytes, header.sha256, self._disk)
        made.begin()
        return made

    with (
        patch(joining.Joining, "accept", again),
        patch(joining.Joining, "_let_in", lease_for_all),
        patch(joining.Joining, "stage", stage),
        patch(joining.Joining, "came", lambda *_: None),
    ):
        yield


# ------------------------------------------------------------------------------------------------- durability


def _early(entered: Callable[..., Any], by_s: float) -> Any:
    """Context manager that reports commits of one kind before the database makes them."""
    commit = ledger_writer.LedgerWriter.commit

    async def early(self: ledger_writer.LedgerWriter, operation: Any) -> Any:
        if getattr(operation, "func", None) is not entered:
            return await commit(self, operation)

        async def later() -> None:
            await asyncio.sleep(by_s)
            await commit(self, operation)

        return asyncio.get_running_loop().create_task(later())

    return patch(ledger_writer.LedgerWriter, "commit", early)


@defect
def acknowledged_before_it_is_durable() -> Iterator[None]:
    """A contribution's commit is reported before it is durable."""
    with _early(shard_ledger.add_contribution, 0.0):
        yield


@defect
def published_before_it_is_durable() -> Iterator[None]:
    """A merge is announced to learners before its commit."""
    with _early(shard_ledger.add_merge, 0.05):
        yield


@defect
def payloads_are_not_synced() -> Iterator[None]:
    """Written data is treated as durable."""
    with patch(disk._Handle, "sync", lambda self: None):
        yield


@defect
def names_are_not_synced() -> Iterator[None]:
    """A rename is treated as durable."""
    with patch(disk.SimulatedDisk, "sync_directory", lambda self, path: None):
        yield


@defect
def the_ledger_is_not_synced_at_each_commit() -> Iterator[None]:
    """synchronous=NORMAL: after a power failure, the database is valid but older than the acknowledgements."""
    open_ledger = database.open_ledger

    def lax(*values: Any) -> Any:
        db = open_ledger(*values)
        db.execute("PRAGMA synchronous=NORMAL")
        return db

    with patch(database, "open_ledger", lax):
        yield


@defect
def payloads_go_when_they_are_merged() -> Iterator[None]:
    """Payloads are deleted at their merge. Only the state in memory then has their work."""
    publish = shard.Shard._publish

    def and_forget(self: shard.Shard, fragment: Any, effect: Any, *values: Any) -> None:
        rows = [self.held(share.key).row for share in effect.shares]
        publish(self, fragment, effect, *values)
        self._forget(rows)

    with patch(shard.Shard, "_publish", and_forget):
        yield


@defect
def payloads_go_with_the_first_snapshot() -> Iterator[None]:
    """Payloads are deleted after one snapshot, which may be damaged."""
    with patch(
        snapshotter, "covered", lambda rows, fragments: rows[-1].versions if rows else dict.fromkeys(fragments, 0)
    ):
        yield


@defect
def a_snapshot_stops_half_way_when_its_caller_goes() -> Iterator[None]:
    """A caller that leaves cancels the snapshot, even after its row was committed."""
    with patch(snapshotter.Snapshotter, "take", snapshotter.Snapshotter._take):
        yield


@defect
def a_damaged_snapshot_counts_as_one() -> Iterator[None]:
    """Payloads are deleted after two snapshots, although one of them is damaged."""
    restored = restore.restore

    def all_of_them(db: Any, *values: Any, **more: Any) -> Any:
        found = restored(db, *values, **more)
        return dataclasses.replace(found, snapshots=lineage.snapshots(db, found.line))

    with patch(core_process, "restore", all_of_them):
        yield


@defect
def pending_payloads_are_swept_at_a_start() -> Iterator[None]:
    """A starting core deletes one payload that it needs."""
    sweep = shard.Spool.sweep

    def all_but_one(self: shard.Spool, needed: Any) -> int:
        return sweep(self, list(needed)[1:])

    with patch(shard.Spool, "sweep", all_but_one):
        yield


@defect
def a_start_forgets_the_last_merges() -> Iterator[None]:
    """A starting core loads the snapshot, but does not repeat the ledger's later merges."""
    with patch(restore.shard_ledger, "merges", lambda *_, **__: iter(())):
        yield


# ------------------------------------------------------------------------------------------------- exactly once


@defect
def receipts_forgotten_at_a_restart() -> Iterator[None]:
    """A restarted core forgets which contributions it acknowledged."""
    restore = core_process.restore_shard

    def forgetful(of: shard.Shard, *values: Any) -> None:
        restore(of, *values)
        of.uploads._newest.clear()

    with patch(core_process, "restore_shard", forgetful):
        yield


@defect
def merged_twice_on_a_retry() -> Iterator[None]:
    """A repeated upload becomes a new contribution with the next free number."""
    offer = uploads.Uploads.offer

    def again(self: uploads.Uploads, header: pb.PushHeader, *values: Any) -> Any:
        newest = self._newest.get((header.session.learner, header.fragment))
        if newest is not None and newest.digest == header.digest:
            header.seq = newest.receipt.seq + 1
        return offer(self, header, *values)

    with patch(uploads.Uploads, "offer", again):
        yield


@defect
def receipts_dropped() -> Iterator[None]:
    """Updates do not name the contributions that they include."""
    with patch(shard, "replace", lambda publication, receipts: publication):
        yield


@defect
def a_refusal_at_the_door_is_not_written_down() -> Iterator[None]:
    """A contribution above the norm limit is refused, but the refusal is not stored."""

    async def at_once(self: intake.Intake, row: Any, reason: str) -> pb.Receipt:
        version = self._shard.fragments[row.key.fragment].version
        return intake.receipt_of(rows.FateRow(row.key, Fate.REFUSED, version, reason=reason, dropped=True))

    with patch(intake.Intake, "_refuse", at_once):
        yield


@defect
def refusals_get_no_receipt() -> Iterator[None]:
    """Refused contributions get no receipt, not even on request."""

    def decide(self: uploads.Uploads, receipt: pb.Receipt) -> None:
        if receipt.fate != pb.FATE_REFUSED:
            decided(self, receipt)

    decided, append, publish = uploads.Uploads.decide, follower_log.FollowerLog._append, shard.replace

    def quiet(self: follower_log.FollowerLog, notification: pb.Notification) -> None:
        if notification.WhichOneof("what") != "receipt":
            append(self, notification)

    with (
        patch(uploads.Uploads, "decide", decide),
        patch(follower_log.FollowerLog, "_append", quiet),
        patch(shard, "replace", lambda p, receipts: publish(p, receipts=tuple(r for r in receipts if r.weight))),
    ):
        yield


@defect
def an_acknowledgement_is_recorded_twice() -> Iterator[None]:
    """The journal records an acknowledgement twice, so Prometheus and the log show both."""
    record = journal.Journal.record

    def again(self: journal.Journal, entry: entries.Entry, now: float) -> None:
        record(self, entry, now)
        if isinstance(entry, entries.Acknowledged):
            record(self, entry, now)

    with patch(journal.Journal, "record", again):
        yield


@defect
def a_dead_incarnations_acknowledged_work_is_dropped() -> Iterator[None]:
    """When a learner restarts, its acknowledged contributions are dropped."""
    joined = syncer.Syncer._joined

    def drop(self: syncer.Syncer, event: Any, now: float) -> None:
        joined(self, event, now)
        for rounds in self.fragments.values():
            for key in [k for k in rounds.pending if k.learner == event.learner and k.incarnation < event.incarnation]:
                del rounds.pending[key]

    with patch(syncer.Syncer, "_joined", drop):
        yield


@defect
def a_late_contribution_is_lost() -> Iterator[None]:
    """A contribution that arrives after its round closed does not wait for another round."""
    contributed = syncer.Syncer._contributed

    def lose(self: syncer.Syncer, event: Any, now: float) -> Any:
        return contributed(self, event, now) if self.fragments[event.key.fragment].cycle == event.cycle else []

    with patch(syncer.Syncer, "_contributed", lose):
        yield


@defect
def an_upload_of_unknown_fate_is_replaced() -> Iterator[None]:
    """After a reconnection, the learner sends its work again under a new number."""
    failed = sending.Sender._failed

    def replace(self: sending.Sender, line: Any, in_flight: Any, failure: Any) -> bool:
        acted = failed(self, line, in_flight, failure)
        if line.in_flight is in_flight:
            in_flight.seq += 1000  # a number that no later contribution has
        return acted

    with patch(sending.Sender, "_failed", replace):
        yield


# ------------------------------------------------------------------------------------------------- arithmetic


@defect
def anchors_drift_by_one_ulp() -> Iterator[None]:
    """A learner adds an update with a small error, which its checksum does not cover."""

    def wrong(self: partial_fetch.PartialFetch, base: Any) -> Any:
        decoded = DECODED(self, base)
        if decoded is not None and base is not None:
            decoded.values[0] = np.nextafter(decoded.values[0], np.float32(np.inf))
        return decoded

    with patch(partial_fetch.PartialFetch, "decoded", wrong):
        yield


@defect
def merged_work_stays_outstanding() -> Iterator[None]:
    """A learner sends work again that was already merged."""
    vector, coded = segments.change, in_place.change
    with (
        patch(segments, "change", lambda old, new, update, _, shape: vector(old, new, update, None, shape)),
        patch(in_place, "change", lambda old, new, update, _, shape: coded(old, new, update, None, shape)),
    ):
        yield


@defect
def a_replay_forgets_what_was_clipped() -> Iterator[None]:
    """A replay merges the unscaled values of clipped contributions."""
    contribution_of = restore.contribution_of

    def whole(*values: Any) -> Any:
        return dataclasses.replace(contribution_of(*values), scale=1.0)

    with patch(restore, "contribution_of", whole):
        yield


@defect
def tallied_and_counted_again() -> Iterator[None]:
    """A starting core adds contributions to sums that already include them."""
    came_after = shard_ledger.came_after

    def all_of_it(db: Any, generation: int, number: int, *limit: int) -> Any:
        return came_after(db, generation, number if limit else 0, *limit)

    with patch(shard_ledger, "came_after", all_of_it):
        yield


@defect
def momentum_is_lost_at_a_restart() -> Iterator[None]:
    """A snapshot restores the parameters, but not the momentum."""
    load = restore.load_snapshot

    def check_current(*values: Any) -> Any:
        states = load(*values)
        for state in states.values():
            state.momentum[:] = 0
        return states

    with patch(restore, "load_snapshot", check_current):
        yield


@defect
def merged_in_another_order_at_a_replay() -> Iterator[None]:
    """A replay's sums differ slightly from the merge's, as in another order."""
    merge_again = restore.merge.merge

    def shuffled(fragment: Any, state: Any, contributions: Any, weights: Any, *values: Any) -> Any:
        return merge_again(fragment, state, contributions, [w * np.float64(1.0 + 1e-6) for w in weights], *values)

    with patch(restore, "merge", mock.Mock(wraps=restore.merge, merge=shuffled, start=restore.merge.start)):
        yield


# ------------------------------------------------------------------------------------------------- rounds


@defect
def grace_ignored() -> Iterator[None]:
    """A round closes as soon as it has its quorum."""
    with patch(syncer.Syncer, "grace_s", lambda *_: 0.0):
        yield


@defect
def staleness_ignored() -> Iterator[None]:
    """Contributions of any staleness are accepted and merged."""
    close = syncer.Syncer._close

    def any_age(self: syncer.Syncer, *values: Any) -> Any:
        kept, self.settings = self.settings, self.settings.model_copy(update={"max_staleness": 1000})
        try:
            return close(self, *values)
        finally:
            self.settings = kept

    with patch(syncer.Syncer, "_close", any_age), patch(uploads, "check_age", lambda *_: None):
        yield


@defect
def a_start_swallows_what_the_syncer_asks_for() -> Iterator[None]:
    """Rounds that close in the first second after a start are not merged."""
    restore_rounds, on = syncer.Syncer.restore, syncer.Syncer.on
    restored_at: dict[int, float] = {}

    def restored(self: syncer.Syncer, *values: Any) -> None:
        restore_rounds(self, *values)
        restored_at[id(self)] = asyncio.get_running_loop().time()

    def swallow(self: syncer.Syncer, event: Any, now: float) -> Any:
        early = now < restored_at.get(id(self), -1.0) + 1.0
        return [effect for effect in on(self, event, now) if not (early and isinstance(effect, Merge))]

    with patch(syncer.Syncer, "restore", restored), patch(syncer.Syncer, "on", swallow):
        yield


@defect
def a_start_takes_every_version_for_a_whole_outer_step() -> Iterator[None]:
    """After a start, merges of only some learners count as whole outer steps."""
    resume = merge_rounds.RoundState.resume

    def whole(self: Any, cycle: int, synced_at: float, _: Any, pending: Any) -> None:
        resume(self, cycle, synced_at, {self.version: float(self.version)}, pending)

    with patch(merge_rounds.RoundState, "resume", whole):
        yield


@defect
def silent_learners_hold_what_is_pending() -> Iterator[None]:
    """A round waits for a learner that reports but no longer trains (found by one of the first hundred seeds)."""
    with patch(syncer.LearnerLiveness, "expected", lambda self, now: not self.gone and now - self.heard_at <= 3.0):
        yield


# ------------------------------------------------------------------------------------------------- several ranks


@defect
def frames_of_some_ranks_are_a_contribution() -> Iterator[None]:
    """An upload with only some frames counts as complete. Missing frames become zeros."""

    def fill(self: payload_writer.PayloadWriter) -> None:
        for span in self.fragment.frames:
            self.squares.setdefault(span.index, np.zeros(len(span.segments)))

    with (
        patch(payload_writer.PayloadWriter, "complete", property(lambda self: bool(self.received))),
        patch(payload_writer.PayloadWriter, "check", fill),
    ):
        yield


@defect
def frames_are_numbered_as_they_arrive() -> Iterator[None]:
    """The core numbers frames by their arrival, not by the rank that sent them."""
    finish = payload_writer.PayloadWriter.finish

    def renumbered(self: payload_writer.PayloadWriter, norms_sq: Any, scale: float) -> Any:
        stored = finish(self, norms_sq, scale)
        return dataclasses.replace(stored, places=dict(enumerate(stored.places.values())))

    with patch(payload_writer.PayloadWriter, "finish", renumbered):
        yield


@defect
def a_version_is_adopted_before_all_ranks_have_verified_it() -> Iterator[None]:
    """Rank 0 confirms a version as soon as one rank has prepared its part."""
    record = coordination.Leading._part

    def confirmed(self: coordination.Leading, rank: int, part: Any) -> None:
        record(self, rank, part)
        if part.generation == self._core.session.generation:
            self._confirm(part.fragment, part.version, part.published)

    with patch(coordination.Leading, "_part", confirmed):
        yield


@defect
def a_rank_does_not_fetch_again_what_it_failed_to_fetch() -> Iterator[None]:
    """After a failed fetch, a rank other than 0 treats the fragment as fetched."""
    begin, given_up = fetching.Fetcher.begin, set[int]()

    def failed(self: fetching.Fetcher, track: Any, failure: Any) -> bool:
        if not self._coordination.owners.rank:
            return had_failed(self, track, failure)
        given_up.add(id(track))
        track.target, track.whole = track.version, False
        return True

    def unless_given_up(self: fetching.Fetcher, track: Any) -> None:
        if id(track) not in given_up:
            begin(self, track)

    had_failed = fetching.Fetcher._failed
    with patch(fetching.Fetcher, "_failed", failed), patch(fetching.Fetcher, "begin", unless_given_up):
        yield


@defect
def ranks_wait_for_versions_that_a_rank_has_skipped() -> Iterator[None]:
    """Rank 0 does not tell the ranks that one of them fetched a whole fragment, so it will prepare no older version."""
    with patch(coordination.Leading, "_note_skip", lambda *_: None):
        yield


@defect
def ranks_drop_what_rank_0_has_chosen() -> Iterator[None]:
    """Ranks combine all anchors up to the newest confirmed one, although an older choice may be on its way."""
    fold = exchange.ThreadExchange._fold

    def all_of_them(self: exchange.ThreadExchange, fragment: int, newest: Any, _: Any) -> None:
        fold(self, fragment, newest, None)

    with patch(exchange.ThreadExchange, "_fold", all_of_them):
        yield


@defect
def a_slow_rank_is_left_behind() -> Iterator[None]:
    """Rank 0 confirms a version after 0.15 s, although a rank has not prepared its part."""
    record = coordination.Leading._part

    def impatient(self: coordination.Leading, rank: int, part: Any) -> None:
        record(self, rank, part)
        name = (part.fragment, part.version, part.published)

        def confirm() -> None:
            if name in self._parts:
                self._confirm(*name)

        asyncio.get_running_loop().call_later(0.15, confirm)

    with patch(coordination.Leading, "_part", impatient):
        yield


# ------------------------------------------------------------------------------------------------- fronts


@defect
def a_front_gives_all_learners_the_receipts_of_one() -> Iterator[None]:
    """Each learner gets whole fragments with the receipts of the learner that caused the fetch."""
    item = RegionFetches._item

    async def shared(self: RegionFetches, request: pb.FetchRequest) -> Any:
        _, found, wanted = await item(self, request)
        return found.header, found, wanted

    with patch(RegionFetches, "_item", shared):
        yield


@defect
def a_front_keeps_fragments_for_ever() -> Iterator[None]:
    """A front with a whole fragment no longer checks for newer versions or other learners' fates."""
    header = RegionFetches._header

    async def remembered(self: RegionFetches, request: pb.FetchRequest) -> pb.FetchHeader:
        place = (request.session.run, request.session.generation, request.fragment)
        kept = [i for p, i in self.cache._items.items() if p.whole and p[:3] == place and all(i.messages)]
        return kept[0].header if kept and request.whole else await header(self, request)

    with patch(RegionFetches, "_header", remembered):
        yield


@defect
def a_front_takes_versions_for_each_other() -> Iterator[None]:
    """A front serves another update with the requested update's header."""
    find = FetchCache.find

    def nearly(self: FetchCache, place: CacheKey) -> Any:
        found = find(self, place)
        if found is None and not place.whole:
            others = [i for p, i in self._items.items() if p[:4] == place[:4] and all(i.messages)]
            if others:
                found = others[-1]
                found.header.version = place.version
        return found

    with patch(FetchCache, "find", nearly), patch(partial_fetch.PartialFetch, "decoded", _unchecked):
        yield


@defect
def frames_of_an_older_version_are_taken_for_the_newest() -> Iterator[None]:
    """An interrupted fetch of a whole fragment continues after a merge, without updates of the earlier frames."""
    took = partial_fetch.PartialFetch.took_update

    def without_it(self: partial_fetch.PartialFetch, header: Any, frame: Any) -> None:
        took(self, header, frame)
        self._parts[frame.index].updates.clear()

    with (
        patch(partial_fetch.PartialFetch, "took_update", without_it),
        patch(partial_fetch.PartialFetch, "decoded", _unchecked),
    ):
        yield


@defect
def a_front_takes_its_own_hanging_up_for_the_cores() -> Iterator[None]:
    """Calls that ended because the front reconnected cause more reconnections (found by seed 19)."""
    answering = Answering.__call__

    @asynccontextmanager
    async def suspicious(self: Answering, *values: Any) -> AsyncIterator[Route]:
        async with answering(self, *values) as route:
            try:
                yield route
            except (LinkLost, grpc.aio.AioRpcError):
                dial_again = route.shard.core_connection._dial_again
                asyncio.get_running_loop().call_later(core_connection.AGAIN_S, dial_again)
                raise

    with patch(Answering, "__call__", suspicious):
        yield


def _unchecked(self: partial_fetch.PartialFetch, base: Any) -> Any:
    """Returns an anchor with the published checksum, without a check."""
    decoded = DECODED(self, base)
    return None if decoded is None else decoded._replace(checksum=Anything())


class Anything(int):
    """Equals all numbers."""

    def __eq__(self, _: object) -> bool:
        return True

    def __ne__(self, _: object) -> bool:
        return False

    __hash__ = int.__hash__


# ------------------------------------------------------------------------------------------------- calls


@defect
def a_learner_leaves_its_calls_open() -> Iterator[None]:
    """A learner that joins again keeps its old calls open."""
    with patch(shard_session, "open_stream", lambda method, call: nullcontext(call)):
        yield


@defect
def a_front_leaves_its_calls_open() -> Iterator[None]:
    """A front's calls to the core continue after their learner leaves, and the core does not end them."""
    opened = front_service.open_stream

    def open_end(method: str, call: Any) -> Any:
        return nullcontext(call) if method in {"Follow", "Report"} else opened(method, call)

    def unheard(self: learner_registry.RegistryEntry, session: int, _: Any) -> None:
        self.session, self.due_since = session, None

    with patch(front_service, "open_stream", open_end), patch(learner_registry.RegistryEntry, "start_session", unheard):
        yield


# ------------------------------------------------------------------------------------------------- hostile learners


@defect
def norms_are_not_checked() -> Iterator[None]:
    """Work of any norm is merged."""
    with patch(norm_limit.NormLimiter, "judge", lambda *_: norm_limit.NormVerdict()):
        yield


@defect
def what_is_declared_counts() -> Iterator[None]:
    """A contribution's weight follows from its declared tokens and steps, without limits."""
    with patch(intake.Intake, "_weighed", lambda self, key, said: said):
        yield


@defect
def what_is_reported_counts() -> Iterator[None]:
    """The core does not compare reported tokens with the time that they need."""

    def as_reported(said: int, before: int, most_s: float | None, paid: float, now: float) -> tuple[int, float]:
        return max(said, before), now

    with patch(goodput, "counted", as_reported), patch(learner_counters, "counted", as_reported):
        yield


@defect
def what_cannot_be_compared_counts() -> Iterator[None]:
    """Tokens count even before other learners have trained, when no comparison is possible (once a real defect)."""
    with patch(plausibility, "HELD", plausibility.MaxRates()):
        yield


@defect
def a_liar_outweighs_the_others() -> Iterator[None]:
    """A learner's weight in a merge has no limit (once a real defect)."""
    with patch(merge_rounds, "parts_counted", lambda weights, _: dict.fromkeys(weights, 1.0)):
        yield


@defect
def a_liars_own_batch_is_believed() -> Iterator[None]:
    """Only the learner's own reports limit its tokens per step (once a real defect)."""

    def own_or_usual(own: Any, usual: Any) -> float:
        return plausibility.MIXED * max(each.batch for each in (own, usual) if each is not None)

    with patch(plausibility, "_most_of_a_step", own_or_usual):
        yield


@defect
def nonce_0_is_a_process() -> Iterator[None]:
    """A Join with nonce 0 takes over a disconnected process's name in one step."""
    join = learner_registry.LearnerRegistry.join

    def taken(
        self: learner_registry.LearnerRegistry, name: str, region: str, nonce: int, *values: Any
    ) -> learner_registry.RegistryEntry:
        entry = self.entries.get(name)
        if nonce or entry is None or entry.connected:
            return join(self, name, region, nonce, *values)
        entry.nonces.append(0)
        entry.incarnation += 1
        entry.start_session(self._next_session(), learner_registry.fenced(name))
        return entry

    with patch(learner_registry.LearnerRegistry, "join", taken):
        yield


@defect
def regions_are_never_given_back() -> Iterator[None]:
    """A name stays counted in every region from which it ever joined."""

    def everywhere(self: learner_registry.LearnerRegistry, but: Any = None) -> set[str]:
        ever: set[str] = self.__dict__.setdefault("ever", set())
        ever.update(entry.region for entry in self.entries.values())
        return ever

    with patch(learner_registry.LearnerRegistry, "regions", everywhere):
        yield


@defect
def the_lease_is_kept_by_empty_words() -> Iterator[None]:
    """Any message of its holder, even a Join, renews the lease for the initial parameters."""
    held = joining.Joining._held

    def renewed(self: joining.Joining, *values: Any) -> initial_parameters.Lease:
        lease = held(self, *values)
        lease.until = 1e9
        return lease

    with patch(joining.Joining, "_held", renewed):
        yield


@defect
def the_lease_of_an_evicted_process_is_kept() -> Iterator[None]:
    """An evicted process's lease for the initial parameters stays with its name, without expiry."""
    with patch(initial_parameters.Lease, "over", lambda *_: False):
        yield


@defect
def initial_parameters_of_a_silenced_process_are_taken() -> Iterator[None]:
    """Initialise checks which name has the lease, but not which process."""

    def check(
        self: learner_registry.LearnerRegistry, name: str, incarnation: int, session: int
    ) -> learner_registry.RegistryEntry:
        return self.entries[name]

    with (
        patch(learner_registry.LearnerRegistry, "check", check),
        patch(learner_registry.LearnerProcess, "check_current", lambda _: None),
        patch(initial_parameters.Lease, "over", lambda self, now, wanted=False: now > self.until),
    ):
        yield


@defect
def calls_have_no_end_of_places() -> Iterator[None]:
    """A learner may open any number of streams, and send any number of incomplete messages."""

    def enter(self: quotas.CallSlots[Any], call: Any, now: float, *_: Any) -> None:
        self._taken[call] = now

    with patch(quotas.CallSlots, "enter", enter):
        yield


@defect
def who_reads_slowly_keeps_every_version() -> Iterator[None]:
    """The number of versions that are kept for slow readers has no limit."""
    with patch(reader_limits, "MAX_OF_ONE", 1000), patch(reader_limits.ReaderLimits, "_trim", lambda _: None):
        yield


# ------------------------------------------------------------------------------------------------- restored checkpoints


@defect
def work_of_before_a_restore_is_sent_after_it() -> Iterator[None]:
    """After a restore, a learner fetches whole fragments, but still sends work based on its old anchors."""

    def send(self: sending.Sender, line: Any, taken: Any) -> None:
        taken.outstanding.restores = line.restores
        original(self, line, taken)

    original = sending.Sender.send
    with patch(sending.Sender, "send", send):
        yield


@defect
def a_flight_survives_a_restore() -> Iterator[None]:
    """After a restore, a learner sends its contribution in flight to the new generation."""
    with patch(sending.Sender, "forget", lambda *_: None):
        yield


@defect
def a_learner_keeps_its_anchors_when_the_run_is_restored() -> Iterator[None]:
    """After a restore, a learner accepts the new session, but applies updates to its old anchors."""
    with patch(run_session.RunSession, "_restored", lambda *_: None):
        yield


@defect
def tokens_of_after_a_checkpoint_count_when_it_is_restored() -> Iterator[None]:
    """A restored run keeps the token count from before the restore."""
    with patch(goodput.TimeAccount, "_count_only", lambda *_: None):
        yield


@defect
def what_waited_is_merged_into_the_new_generation() -> Iterator[None]:
    """Pending contributions from before a restore are merged into the new generation."""

    def take_along(db: Any, generation: int, _: Any) -> None:
        db.execute(
            "UPDATE contributions SET generation=? WHERE generation=? AND fate='pending'", (generation + 1, generation)
        )

    with patch(rollback, "_refuse_pending", take_along):
        yield


@defect
def merges_that_were_undone_are_tallied() -> Iterator[None]:
    """The new generation also counts merges that the restore undid."""
    merged = lineage.merged

    def everything(db: Any, line: Any, fragment: int, *bounds: int) -> Any:
        for generation in range(1, line.generation + 1):
            yield from merged(db, lineage.Line(generation), fragment, *bounds)

    with patch(rollback.lineage, "merged", everything):
        yield


# ------------------------------------------------------------------------------------------------- weights


@defect
def loaded_weights_are_work() -> Iterator[None]:
    """Parameters that are loaded during the run count as training."""

    def fine(self: movement_watch.MovementWatch, *, now: bool = True) -> movement.Movement:
        self.judged = self.boundary
        return movement.Movement.FINE

    with (
        patch(movement_watch.MovementWatch, "judge", fine),
        patch(movement_watch.MovementWatch, "glance", fine),
        patch(movement_watch.MovementWatch, "leave", fine),
    ):
        yield


@defect
def weights_loaded_before_leaving_are_work() -> Iterator[None]:
    """A leaving learner sends loaded parameters as training."""
    with patch(movement_watch.MovementWatch, "leave", lambda _: movement.Movement.FINE):
        yield


@defect
def overwritten_work_that_was_kept_back_is_sent() -> Iterator[None]:
    """The rows of contributions show that weights were loaded. The parameters are reset, but the contributions are
    sent."""
    restore = step_boundary.StepBoundary._restore

    def after_sending(self: step_boundary.StepBoundary) -> None:
        self._rounds.hand_over(self._number)
        restore(self)

    with patch(step_boundary.StepBoundary, "_restore", after_sending):
        yield


@defect
def dropped_work_that_was_kept_back_is_sent() -> Iterator[None]:
    """A learner drops outstanding work, but not its contributions that wait for a verdict (this was a real defect)."""
    with patch(step_boundary.StepBoundary, "_withdraw", lambda *_: None):
        yield


@defect
def work_that_was_kept_back_is_forgotten_when_a_learner_joins_again() -> Iterator[None]:
    """Contributions that wait for a verdict are not sent in a new session, and their fragments wait for their fate."""
    joined, hand_over = run_session.RunSession._joined, round_answers.RoundAnswers.hand_over
    again = WeakSet[Any]()

    async def joining_again(self: run_session.RunSession, reply: pb.JoinReply) -> None:
        await joined(self, reply)
        again.add(self._exchange)

    def forgetful(self: round_answers.RoundAnswers, judged: int = 0) -> None:
        if self._exchange in again:
            again.remove(self._exchange)
            self.kept_back.clear()
        hand_over(self, judged)

    with (
        patch(run_session.RunSession, "_joined", joining_again),
        patch(round_answers.RoundAnswers, "hand_over", forgetful),
    ):
        yield


@defect
def ranks_send_what_no_verdict_covers() -> Iterator[None]:
    """Rank 0's verdict ends where the ranks agree, but they take their work at a later boundary (this was a real
    defect)."""
    hand_over = round_answers.RoundAnswers.hand_over

    def at_once(self: round_answers.RoundAnswers, judged: int = 0) -> None:
        assert isinstance(self._local._values, HostValues)
        several = self._local._values._ranks.size > 1
        hand_over(self, max(judged, *(boundary for boundary, _ in self.kept_back), 0) if several else judged)

    with patch(round_answers.RoundAnswers, "hand_over", at_once):
        yield


@defect
def adoptions_may_be_undone() -> Iterator[None]:
    """An optimizer's masters undo each adoption, and the learner sends the reverse movement."""
    with patch(
        movement.MovementDetector, "_undone", lambda _self, _moved, _whole, step, **_: (movement.Movement.FINE, step)
    ):
        yield


@defect
def masters_stay_where_they_are() -> Iterator[None]:
    """The optimizer's named masters do not move with the parameters."""
    with patch(optimizer_copies.OptimizerCopies, "following", lambda *_, **__: nullcontext()):
        yield


@defect
def what_was_given_up_in_flight_is_taken_back() -> Iterator[None]:
    """After a restore, a learner subtracts merged work from its outstanding work once more (found by seed 2052)."""

    class Never(tuple[int, int]):
        """Equals nothing."""

        __slots__ = ()
        __eq__ = lambda *_: False  # noqa: E731
        __ne__ = lambda *_: True  # noqa: E731
        __hash__ = tuple.__hash__

    with patch(adoption, "GIVEN_UP", Never((0, 0))):
        yield


for each in DATA_DEFECTS:
    DEFECTS[each.__name__] = partial(each, patch)
