"""Once a second the run is read: for Prometheus as one Reading, and for the diary as one Look."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

from atoll_server.core import Core
from atoll_server.diary import Look, Sight
from atoll_server.goodput import overall
from atoll_server.metrics import Reading
from atoll_server.restore import LEDGER
from atoll_server.roster import Entry
from atoll_server.status import merged_tokens, state_of, troubles

EVERY_S = 1.0
STATES = ("joining", "live", "paused", "silent", "left", "evicted")


async def keep_gauges(core: Core) -> None:
    """For as long as the core runs."""
    core.diary.note(core.clock.now(), "core", f"the core started: epoch {core.epoch}")
    while True:
        ledger_bytes = await asyncio.to_thread(_size_bytes, core.settings.directory / LEDGER)
        read(core, ledger_bytes)
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
    core.diary.look(
        Look(
            at=wall,
            learners={entry.name: _sight(entry, states[entry.name]) for entry in core.roster.entries.values()},
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


def _sight(entry: Entry, state: str) -> Sight:
    account = entry.account
    heard_at = account.heard_at if account.left_at is None else account.left_at
    return Sight(state, entry.region, entry.incarnation, heard_at, entry.comeback.down_s, entry.evicted)


def _read_learners(core: Core, reading: Reading, states: dict[str, str], wall: float) -> None:
    balances = []
    for name, entry in core.roster.entries.items():
        account, balance = entry.account, entry.account.balance(wall)
        balances.append(balance)
        member = core.engine.syncer.members.get(name) if core.engine is not None else None
        reading.set("atoll_learner_info", 1, name, entry.region, states[name])
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
    trained = core.roster.tokens()
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
        reading.set("atoll_outer_steps", sum(engine.versions()))
        reading.set("atoll_contributions_pending", len(engine.contributions.pending))
        reading.set("atoll_spool_bytes", engine.spool.used_bytes)
        for fragment, version in enumerate(engine.versions()):
            reading.set("atoll_fragment_version", version, str(fragment))
            reading.set("atoll_anchor_age_seconds", now - engine.published_at[fragment], str(fragment))
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
    """Of the file and what is still to be written into it; 0 for one that is not there."""
    return sum(path.stat().st_size for path in (ledger, Path(f"{ledger}-wal")) if path.exists())
