"""Once a second the run is read: for Prometheus as one Reading, and for the diary as one Look."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import structlog

from atoll_server.checkpoints.restore import LEDGER
from atoll_server.learners.accounts import overall
from atoll_server.learners.registry import MOST_REGIONS, Entry
from atoll_server.run.core import Core
from atoll_server.run.registrar import Registrar
from atoll_server.service.status import member_of, merged_tokens, state_of, trained_tokens, troubles
from atoll_server.telemetry.happenings import Look, Sight
from atoll_server.telemetry.metrics import Reading

log = structlog.get_logger()

EVERY_S = 1.0
SETTLED_S = 10.0  # after a start, until learners have reported what the last second before it may have lost
STATES = ("joining", "live", "paused", "silent", "left", "evicted")


async def keep_gauges(core: Core) -> None:
    """For as long as the core runs."""
    run = core.registrar
    core.diary.note(run.clock.wall(), "core", f"the core started: epoch {run.epoch}")
    if run.line.beginnings and run.versions() == run.line.beginnings[0].versions:
        text = f"restored to checkpoint {run.line.beginnings[0].checkpoint} (generation {run.generation})"
        core.diary.note(run.clock.wall(), "core", text)
    while True:
        try:
            read(core, await asyncio.to_thread(_size_bytes, core.settings.directory / LEDGER))
        except Exception:
            log.exception("the run could not be read for Prometheus: what was read last stays")
        await asyncio.sleep(EVERY_S)


def read(core: Core, ledger_bytes: int = 0) -> None:
    """The run at this moment."""
    run = core.registrar
    wall, now = run.clock.wall(), run.clock.monotonic()
    states = {entry.name: state_of(run, entry, now) for entry in run.roster.entries.values()}
    reading = Reading()
    _read_learners(run, reading, states, wall)
    _read_run(core, reading, now)
    reading.set("atoll_ledger_bytes", ledger_bytes)
    core.metrics.read = reading
    core.metrics.fold(run.roster.regions(), MOST_REGIONS)
    core.diary.look(
        Look(
            at=wall,
            learners={e.name: _sight(run, e, states[e.name], wall, now) for e in run.roster.entries.values()},
            parameters=run.layout.parameters if run.shards and run.layout is not None else 0,
            checkpoint=max((row.id for shard in run.shards for row in shard.snapshots.rows), default=0),
            paused=run.paused,
            refused=_refused(run),
            troubles=tuple(troubles(core)),
        )
    )


def _refused(run: Registrar) -> int:
    counts = [shard.contributions.counts for shard in run.shards]
    return sum(each["refused"] + each["turned_away"] for each in counts)


def _sight(run: Registrar, entry: Entry, state: str, wall: float, now: float) -> Sight:
    account, member = entry.account, member_of(run, entry.name)
    stepped_at = account.heard_at if account.left_at is None else account.left_at
    if state == "silent" and member is not None and member.stepped_at is not None:
        stepped_at = wall - (now - member.stepped_at)  # it may be heard, and make no steps
    return Sight(state, entry.region, entry.incarnation, stepped_at, entry.comeback.down_s, entry.evicted)


def _read_learners(run: Registrar, reading: Reading, states: dict[str, str], wall: float) -> None:
    balances = []
    for name, entry in run.roster.entries.items():
        account, balance = entry.account, entry.account.balance(wall)
        balances.append(balance)
        member = member_of(run, name)
        reading.set("atoll_learner_info", 1, name, entry.region, states[name])
        if account.heard_at > run.roster.since:  # until then a start may lack a second of it, and no counter falls
            reading.set("atoll_learner_inner_steps", account.total("steps"), name)
            reading.set("atoll_learner_tokens", account.total("tokens"), name)
            reading.set("atoll_learner_blocked_seconds", account.total("blocked_s"), name)
        reading.set("atoll_learner_loss", entry.loss, name)
        reading.set("atoll_learner_step_seconds", (member.step_time_s or 0.0) if member is not None else 0.0, name)
        reading.set("atoll_learner_heard_timestamp_seconds", account.heard_at, name)
        reading.set("atoll_learner_lost_seconds", balance.provisioned_s - balance.useful_s, name)
    whole, counts = overall(balances), Counter(states.values())
    reading.set("atoll_goodput_ratio", whole.ratio)
    reading.set("atoll_useful_seconds", whole.useful_s)
    reading.set("atoll_provisioned_seconds", whole.provisioned_s)
    for cause, seconds in whole.lost_s.items():
        reading.set("atoll_lost_seconds", seconds, cause)
    for state in STATES:
        reading.set("atoll_learners", counts[state], state)


def _read_run(core: Core, reading: Reading, now: float) -> None:
    run = core.registrar
    accounts = [entry.account for entry in run.roster.entries.values()]
    trained = trained_tokens(run)
    if run.epoch == 1 or now - core.started_at > SETTLED_S:
        reading.set("atoll_tokens_trained", trained)
    for direction, coded, parameters in (
        ("up", sum(a.bytes_up for a in accounts), sum(a.parameters_up for a in accounts)),
        ("down", sum(a.bytes_down for a in accounts), sum(a.parameters_down for a in accounts)),
    ):
        if coded:
            reading.set("atoll_compression_ratio", 4 * parameters / coded, direction)
    if run.shards:
        _read_shards(run, reading, trained, now)
    if core.free_bytes is not None:
        reading.set("atoll_disk_free_bytes", core.free_bytes)
    reading.set("atoll_restore_seconds", core.restore_s)
    reading.set("atoll_core_epoch", run.epoch)
    reading.set("atoll_paused", float(bool(run.paused)))
    if core.settings.wan_budget_gb:
        reading.set("atoll_wan_budget_bytes", core.settings.wan_budget_gb * 1e9)


def _read_shards(run: Registrar, reading: Reading, trained: int, now: float) -> None:
    merged = merged_tokens(run)
    reading.set("atoll_tokens_merged", merged)
    reading.set("atoll_token_goodput_ratio", merged / trained if trained else 1.0)
    reading.set("atoll_merges", sum(run.versions().values()))
    reading.set("atoll_contributions_pending", sum(shard.pending() for shard in run.shards))
    reading.set("atoll_spool_bytes", sum(shard.spool.used_bytes for shard in run.shards))
    for shard in run.shards:
        for index, fragment in shard.fragments.items():
            reading.set("atoll_fragment_version", fragment.version, str(index))
            if fragment.published_at is not None:
                reading.set("atoll_anchor_age_seconds", now - fragment.published_at, str(index))
    if taken_at := [shard.snapshots.rows[-1].taken_at for shard in run.shards if shard.snapshots.rows]:
        reading.set("atoll_snapshot_timestamp_seconds", min(taken_at))


def _size_bytes(ledger: Path) -> int:
    """Of the file and what is still to be written into it; one that is not there, or not to be looked at, has none."""
    size = 0
    for path in (ledger, Path(f"{ledger}-wal")):
        with contextlib.suppress(OSError):
            size += path.stat().st_size
    return size
