"""Once a second the run is read: for Prometheus as one Reading, and for the diary as one Look."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from pathlib import Path

import structlog

from atoll_server.checkpoints.restore import LEDGER
from atoll_server.learners.accounts import overall
from atoll_server.learners.registry import MOST_REGIONS, Entry
from atoll_server.run.core import Core
from atoll_server.service.status import merged_tokens, state_of, trained_tokens, troubles
from atoll_server.telemetry.happenings import Look, Sight
from atoll_server.telemetry.metrics import Reading

log = structlog.get_logger()

EVERY_S = 1.0
SETTLED_S = 10.0  # after a start, until learners have reported what the last second before it may have lost
STATES = ("joining", "live", "paused", "silent", "left", "evicted")


async def keep_gauges(core: Core) -> None:
    """For as long as the core runs."""
    core.diary.note(core.clock.now(), "core", f"the core started: epoch {core.epoch}")
    while True:
        try:
            read(core, await asyncio.to_thread(_size_bytes, core.settings.directory / LEDGER))
        except Exception:
            log.exception("the run could not be read for Prometheus: what was read last stays")
        await asyncio.sleep(EVERY_S)


def read(core: Core, ledger_bytes: int = 0) -> None:
    """The run at this moment."""
    wall, now = core.clock.now(), time.monotonic()
    states = {entry.name: state_of(core, entry, now) for entry in core.roster.entries.values()}
    reading = Reading()
    _read_learners(core, reading, states, wall)
    _read_run(core, reading, now)
    reading.set("atoll_ledger_bytes", ledger_bytes)
    core.metrics.read = reading
    core.metrics.fold(core.roster.regions(), MOST_REGIONS)
    core.diary.look(
        Look(
            at=wall,
            learners={e.name: _sight(core, e, states[e.name], wall, now) for e in core.roster.entries.values()},
            parameters=core.layout.parameters if core.engine is not None and core.layout is not None else 0,
            checkpoint=core.keeper.rows[-1].id if core.keeper is not None and core.keeper.rows else 0,
            paused=core.paused,
            refused=_refused(core),
            troubles=tuple(troubles(core)),
        )
    )


def _refused(core: Core) -> int:
    counts = core.engine.contributions.counts if core.engine is not None else {}
    return counts.get("refused", 0) + counts.get("turned_away", 0)


def _sight(core: Core, entry: Entry, state: str, wall: float, now: float) -> Sight:
    account, member = entry.account, core.engine.syncer.members.get(entry.name) if core.engine is not None else None
    stepped_at = account.heard_at if account.left_at is None else account.left_at
    if state == "silent" and member is not None and member.stepped_at is not None:
        stepped_at = wall - (now - member.stepped_at)  # it may be heard, and make no steps
    return Sight(state, entry.region, entry.incarnation, stepped_at, entry.comeback.down_s, entry.evicted)


def _read_learners(core: Core, reading: Reading, states: dict[str, str], wall: float) -> None:
    balances = []
    for name, entry in core.roster.entries.items():
        account, balance = entry.account, entry.account.balance(wall)
        balances.append(balance)
        member = core.engine.syncer.members.get(name) if core.engine is not None else None
        reading.set("atoll_learner_info", 1, name, entry.region, states[name])
        if account.heard_at > core.roster.since:  # until then a start may lack a second of it, and no counter falls
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
    accounts = [entry.account for entry in core.roster.entries.values()]
    trained = trained_tokens(core)
    if core.epoch == 1 or now - core.started_at > SETTLED_S:
        reading.set("atoll_tokens_trained", trained)
    for direction, coded, parameters in (
        ("up", sum(a.bytes_up for a in accounts), sum(a.parameters_up for a in accounts)),
        ("down", sum(a.bytes_down for a in accounts), sum(a.parameters_down for a in accounts)),
    ):
        if coded:
            reading.set("atoll_compression_ratio", 4 * parameters / coded, direction)
    if core.engine is not None:
        engine, merged = core.engine, merged_tokens(core)
        reading.set("atoll_tokens_merged", merged)
        reading.set("atoll_token_goodput_ratio", merged / trained if trained else 1.0)
        reading.set("atoll_merges", sum(engine.versions().values()))
        reading.set("atoll_contributions_pending", engine.pending())
        reading.set("atoll_spool_bytes", engine.spool.used_bytes)
        for index, fragment in engine.fragments.items():
            reading.set("atoll_fragment_version", fragment.version, str(index))
            if fragment.published_at is not None:
                reading.set("atoll_anchor_age_seconds", now - fragment.published_at, str(index))
    if core.keeper is not None and core.keeper.rows:
        reading.set("atoll_snapshot_timestamp_seconds", core.keeper.rows[-1].taken_at)
    if core.free_bytes is not None:
        reading.set("atoll_disk_free_bytes", core.free_bytes)
    reading.set("atoll_restore_seconds", core.restore_s)
    reading.set("atoll_core_epoch", core.epoch)
    reading.set("atoll_paused", float(bool(core.paused)))
    if core.settings.wan_budget_gb:
        reading.set("atoll_wan_budget_bytes", core.settings.wan_budget_gb * 1e9)


def _size_bytes(ledger: Path) -> int:
    """Of the file and what is still to be written into it; one that is not there, or not to be looked at, has none."""
    size = 0
    for path in (ledger, Path(f"{ledger}-wal")):
        with contextlib.suppress(OSError):
            size += path.stat().st_size
    return size
