"""Manages a run's learner names, sessions, accounts, pause state, layout and token count. Shards hold the fragments.

The registrar's process also contains a shard. With `--registrar-only`, this shard holds no fragments. All other shards
are separate processes, which attach to the registrar (`attached_shards`).
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from atoll_wire import outer_pb2 as pb
from atoll_wire import shards_pb2 as sh
from atoll_wire.layout.layout import Layout

from atoll_server.access.refusals import Refused, Status
from atoll_server.data.accounts import EVICTED, Accounts, Changes
from atoll_server.learners.learner_registry import LearnerProcess, RegistryEntry, evicted, refuse_reason
from atoll_server.learners.refused_joins import RefusedJoins
from atoll_server.learners.session_tokens import SessionKey
from atoll_server.ledger import data_ledger, lineage, manifests, run_ledger
from atoll_server.ledger.ledger_writer import LedgerWriter
from atoll_server.ledger.lineage import Beginning
from atoll_server.ledger.manifests import Manifest, RestoredManifest
from atoll_server.ledger.rows import LearnerRow
from atoll_server.links.link import MergePace
from atoll_server.rounds.pacing import Position
from atoll_server.run.attached_shards import AttachedShards
from atoll_server.run.known_run import KnownRun
from atoll_server.run.run_clock import RunClock
from atoll_server.settings import Limits, RunSettings
from atoll_server.shard.shard import Shard
from atoll_server.shard_context.run_view import RunView
from atoll_server.storage import crash_points
from atoll_server.telemetry import entries
from atoll_server.telemetry.entries import Arrival
from atoll_server.telemetry.journal import Journal

NOWHERE = Position(0.0, 0.0, 0.0)
THERE_S = 10.0  # a learner that reported within this time still runs
PLACED_S = 0.25  # interval at which the step time of the fastest learner is read again
KEY_BYTES, START_BYTES = 32, 16  # sizes of the SessionKey's `secret` and `start`


class Registrar(KnownRun):
    """The registrar of one run. Every change is durable before learners can see it.

    attached: the other shards. manifests: the checkpoints of a run with several shards, oldest first.
    from_manifest: the manifest from which this generation began, if any. data: the datasets' accounts (`datasets`).
    """

    def __init__(
        self, limits: Limits, clock: RunClock, journal: Journal, attached: AttachedShards | None = None
    ) -> None:
        self.attached = attached or AttachedShards(own=0, count=1)
        super().__init__(limits, clock, journal)
        self._views = 0  # number of views sent to shards in this epoch
        self._position = NOWHERE
        self._placed_at = -math.inf
        self.manifests: list[Manifest] = []
        self.from_manifest: RestoredManifest | None = None
        self.data = Accounts({})
        self.refused_joins = RefusedJoins()

    @property
    def number(self) -> int:
        return self.attached.own

    @property
    def shards(self) -> int:
        return self.attached.count

    # ------------------------------------------------------------------------------ from and to the ledger

    def restore(self, meta: dict[str, Any], learners: Iterable[LearnerRow], writer: LedgerWriter) -> None:
        """Restores the run from the ledger. Does not restore the shard, which `runs` sets."""
        self.writer = writer
        self.run_id = meta["run"]
        self.generation = meta["generation"]
        self.line = lineage.line_of(meta)
        self.epoch = meta["epoch"]
        secret, start = bytes.fromhex(meta["session_key"]), secrets.token_bytes(START_BYTES)
        self.sessions = SessionKey(secret, start, self.run_id, self.generation)
        self.settings = RunSettings.model_validate(meta["settings"])
        self.paused = meta.get("paused", "")
        self.manifests = manifests.manifests_of(meta)
        self.from_manifest = manifests.restored_of(meta)
        self.frozen_digest = meta.get("frozen_digest", "")
        self.initial_sha256 = meta.get("initial_sha256", "")
        self.restore_learners(learners)

    def newly_restored(self) -> Beginning | None:
        """Returns this generation's beginning; None for the first generation or if an earlier core served it."""
        begun = self.line.beginnings[0] if self.line.beginnings else None
        return begun if begun is not None and self.epoch == begun.epoch + 1 else None

    def restored_checkpoint(self) -> int:
        """Returns the number of the checkpoint from which this generation began; 0 for the first generation."""
        if self.from_manifest is not None:
            return self.from_manifest.checkpoint
        return self.line.beginnings[0].checkpoint if self.line.beginnings else 0

    async def add_manifest(self, manifest: Manifest) -> None:
        """Durably adds a checkpoint and removes the oldest checkpoints.

        The new checkpoint's snapshots must be durable.
        """
        known = [*self.manifests, manifest]
        old = manifests.dropped(known, self.generation, self.settings.keep_snapshots)
        self.manifests = known[len(old) :]
        await self.writer.commit(partial(manifests.put_manifests, manifests=self.manifests))
        crash_points.point("manifest.committed")

    def propose(self, layout: Layout, frozen_digest: str) -> None:
        """Sets the layout and frozen digest of the learner that holds the lease. A later call replaces them."""
        self.layout = layout
        self.frozen_digest = frozen_digest

    async def begin(self, layout: Layout, tensors: list[dict[str, Any]], sha256: bytes, owned: Collection[int]) -> None:
        """Durably records that the run has its initial parameters, after all shards have made theirs durable.

        tensors: descriptions of the tensors as JSON values. sha256: digest of the file. owned: the fragments of this
        process.
        """
        stage = stage_of(layout, tensors, sha256)
        await self.attached.stage(stage, layout)
        settings = self.settings.changed(fragments=len(layout.fragments))
        meta = {
            "tensors": tensors,
            "fragments": len(layout.fragments),
            "fingerprint": layout.fingerprint.hex(),
            "frozen_digest": self.frozen_digest,
            "initial_sha256": sha256.hex(),
            "settings": settings.model_dump(mode="json"),
        }
        if self.attached.remote:
            meta["owned"] = sorted(owned)
            meta["owned_parameters"] = sum(layout.fragments[index].length for index in owned)
        await self.writer.commit(partial(run_ledger.put_all_meta, meta=meta))
        crash_points.point("initial.committed")
        self.initial_sha256 = sha256.hex()
        self.settings = settings
        self.attached.begin(sh.Begun(stage=stage, settings=settings.model_dump_json()))

    # ------------------------------------------------------------------------------ shards

    def runs(self, layout: Layout, shard: Shard) -> None:
        super().runs(layout, shard)
        self.attached.runs(layout)
        self.data.measure({each.index: each.length for each in layout.fragments})

    def view(self) -> RunView:
        """Returns a new view of the run for shards. It is newer than all earlier views."""
        self._views += 1
        place = self._place()
        tokens, voided = self.registry.tokens(), self.registry.voided_tokens()
        return RunView(self.epoch, self._views, tokens, voided, self.paused, place.slot, place.slot_s)

    def _place(self) -> Position:
        """Returns the position in the run's cycle of slots, which all shards share."""
        now = self.clock.monotonic()
        if self.shard is None or self.layout is None or self.attached.count + len(self.attached.remote) < 2:
            return NOWHERE
        cycle, slot_s = len(self.layout.fragments), self._position.slot_s
        if now - self._placed_at >= PLACED_S:
            self._placed_at = now
            fastest = self.shard.syncer.present(now).fastest_step_s
            slot_s = 0.0 if fastest is None else fastest * self.settings.inner_steps / cycle
        self._position = self._position.moved(cycle, now, slot_s)
        return self._position

    def tell(self) -> None:
        """Sends a new view to every shard. Called after each report and when an operator changes the run."""
        view = self.view()
        if self.shard is not None:
            self.shard.told(view)
        self.attached.tell(view)

    def places(self) -> list[pb.ShardPlace]:
        """Returns the address and fragments of each shard, for learners. This process's address is empty."""
        own = pb.ShardPlace(fragments=sorted(self.running().fragments))
        return self.attached.places(own)

    def pace(self, now: float) -> MergePace:
        """Returns the rate at which merges make older work stale. now: monotonic seconds."""
        if self.shard is None:
            return MergePace(0.0, None, self.settings.max_staleness)
        steps = [each.rounds.age(each.version) for each in self.shard.fragments.values()]
        steps += [each.outer_steps for shard in self.attached.all() for each in shard.summary.fragments]
        present = self.shard.syncer.present(now)
        step_s = None if self.paused else present.fastest_step_s
        outer_step_s = None if step_s is None else step_s * self.settings.inner_steps
        return MergePace(sum(steps) / max(1, len(steps)), outer_step_s, self.settings.max_staleness, present.live)

    def versions(self) -> dict[int, int]:
        """Returns the version of each fragment in this process.

        The other shards send their versions to learners themselves.
        """
        return {} if self.shard is None else self.shard.versions()

    # ------------------------------------------------------------------------------ learners and operators

    def token(self, entry: RegistryEntry) -> bytes:
        """Returns the session token of a learner's current process."""
        return self.sessions.token(entry.name, entry.incarnation, entry.session)

    async def joined(self, entry: RegistryEntry, by: str, state: pb.JoinReply.State) -> None:
        """Commits a learner's Join to the ledger, then notifies the shards, which drop older incarnations' uploads.

        by: the name in the caller's certificate. state: the state in the JoinReply. Raises Refused if another process
        has taken over the learner's name meanwhile or the learner was evicted.
        """
        incarnation = entry.incarnation
        await self.save(entry)
        crash_points.point("join.row committed")
        LearnerProcess(entry, incarnation).check_current()
        if self.shard is not None:
            self.shard.joined(entry.name, incarnation)
        self.attached.member(entry)
        if not entry.announced:
            arrival = Arrival.NEW
        else:
            arrival = Arrival.RESTARTED if entry.announced < incarnation else Arrival.AGAIN
        entry.announced = incarnation
        self.refused_joins.joined(entry.name)
        down_s = entry.recovery.down_s
        joined = entries.Joined(entry.name, entry.region, incarnation, arrival, down_s, by, state)
        self.record(joined)

    async def left(self, entry: RegistryEntry, *, itself: bool) -> None:
        await super().left(entry, itself=itself)
        self.attached.member(entry)  # a shard may not have received the learner's own Leave

    async def gone(self, name: str) -> list[int]:
        """Records that a learner's process has ended without a Leave. Its work stays, and its name may join again.

        Returns the numbers of the shards that have not confirmed the change yet. Raises Refused if the run has no such
        learner, an operator evicted it, or it still reports.
        """
        entry = self._learner(name)
        silent_s = self.clock.wall() - entry.account.heard_at
        if entry.evicted:
            raise evicted(entry)
        if entry.account.left_at is None:
            if silent_s < THERE_S:
                text = f'learner "{name}" reported {silent_s:.1f} s ago: stop its process first, or evict the learner'
                raise Refused(Status.FAILED_PRECONDITION, text)
            await self.left(entry, itself=False)
        return await self.attached.confirmed()

    async def evict(self, name: str, reason: str, tokens: int | None = None) -> list[int]:
        """Evicts a learner and refuses its pending contributions. Merged contributions stay in the model.

        Returns the numbers of the shards that have not confirmed the eviction yet. They apply it later, at the latest
        when they attach again. reason: reason for the eviction; if empty, the learner may join again. tokens: number of
        the learner's reported tokens that still count; None for all. Learners' schedules use the run's reduced token
        count starting from the next published update. Raises Refused if the run has no such learner.
        """
        entry = self._learner(name)
        was_evicted = bool(entry.evicted)
        self.registry.evict(entry, reason, self.clock.wall())
        if tokens is not None:
            self.registry.void_tokens(entry, tokens)
        ended = Changes()
        for lease in self.data.leases.values() if reason else ():  # now, since the learner may be readmitted soon
            if lease.learner == name:
                self.data.end(lease, EVICTED, ended)
        await self.save(entry)
        crash_points.point("eviction.committed")
        if ended:
            await self.writer.commit(partial(data_ledger.write, rows=data_ledger.rows_of(ended)))
        self.tell()
        if reason:
            if self.shard is not None:
                self.shard.evicted(name, entry.incarnation, refuse_reason(reason))
            self.record(entries.Evicted(name, reason))
        elif was_evicted:
            self.record(entries.Readmitted(name))
        self.attached.member(entry)
        return await self.attached.confirmed()

    def _learner(self, name: str) -> RegistryEntry:
        if (entry := self.registry.entries.get(name)) is None:
            raise Refused(Status.NOT_FOUND, f'this run has no learner "{name[:80]}": `atoll status` lists its learners')
        return entry

    async def pause(self, reason: str) -> list[int]:
        """Durably pauses or resumes the run, then notifies every learner. A restart of the core does not end a pause.

        Returns the numbers of the shards that have not confirmed the change yet. reason: text that names the operator
        and the reason; empty to resume the run.
        """
        await self.writer.commit(partial(run_ledger.put_meta, key="paused", value=reason))
        crash_points.point("pause.committed")
        self.paused = reason
        self.tell()
        self.record(entries.PauseChanged(reason))
        return await self.attached.confirmed()


def stage_of(layout: Layout, tensors: list[dict[str, Any]], sha256: bytes) -> sh.Stage:
    """Returns the message that tells shards to fetch the initial parameters. sha256: digest of the whole file."""
    return sh.Stage(
        sha256=sha256, tensors=json.dumps(tensors), fragments=len(layout.fragments), fingerprint=layout.fingerprint
    )
