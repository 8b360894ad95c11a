"""Reads the run's state once per second, records its changes in the journal and samples metrics for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog
from atoll_wire.contract import LearnerState, LinkState

from atoll_server.checkpoints.restore import LEDGER
from atoll_server.learners.goodput import total_goodput
from atoll_server.learners.learner_registry import MAX_REGIONS
from atoll_server.operators.status import merged_tokens, trained_tokens
from atoll_server.processes.core_process import CoreFacts
from atoll_server.run.known_run import KnownRun
from atoll_server.run.registrar import Registrar
from atoll_server.run.troubles import troubles
from atoll_server.run.watch import Watch, liveness_of
from atoll_server.settings import CoreSettings
from atoll_server.telemetry.events import EventLog
from atoll_server.telemetry.metrics import Metrics, MetricSamples

log = structlog.get_logger()

EVERY_S = 1.0
SETTLED_S = 10.0  # seconds that learners may need after a start to repeat reports that the previous core lost


async def keep_gauges(
    run: Registrar,
    settings: CoreSettings,
    metrics: Metrics,
    watch: Watch,
    events: EventLog,
    facts: Callable[[], CoreFacts],
) -> None:
    """Updates metrics and events once per second until this task is cancelled.

    facts: function that returns the core's facts.
    """
    while True:
        ledger_bytes = await asyncio.to_thread(_size_bytes, settings.directory / LEDGER)
        try:
            now = run.clock.monotonic()
            states = watch.look(troubles(run, facts().damage, now), now)
            events.tell_refused(now)
            metrics.read = reading(run, settings, facts(), states, ledger_bytes, now)
            metrics.fold(run.registry.regions(), MAX_REGIONS)
        except Exception:
            log.exception("the metrics could not be updated, so Prometheus sees old values: report this bug")
        await asyncio.sleep(EVERY_S)


async def keep_shard_gauges(run: KnownRun, metrics: Metrics, directory: Path, facts: Callable[[], CoreFacts]) -> None:
    """Does the same as `keep_gauges` for a process with only a shard. The registrar samples the metrics of the run."""
    while True:
        made = MetricSamples()
        made.set("atoll_ledger_bytes", await asyncio.to_thread(_size_bytes, directory / LEDGER))
        _read_process(run, made, facts(), run.clock.monotonic())
        metrics.read = made
        metrics.fold(run.registry.regions(), MAX_REGIONS)
        await asyncio.sleep(EVERY_S)


def reading(
    run: Registrar,
    settings: CoreSettings,
    facts: CoreFacts,
    states: Mapping[str, LearnerState],
    ledger_bytes: int,
    now: float,
) -> MetricSamples:
    """Returns the current values of all sampled metrics. now: monotonic seconds."""
    made = MetricSamples()
    _read_learners(run, made, states, run.clock.at(now))
    _read_run(run, made, facts, now)
    _read_links(run, made, now)
    _read_process(run, made, facts, now)
    made.set("atoll_ledger_bytes", ledger_bytes)
    if settings.wan_budget_gb:
        made.set("atoll_wan_budget_bytes", settings.wan_budget_gb * 1e9)
    return made


def _read_learners(run: Registrar, reading: MetricSamples, states: Mapping[str, LearnerState], wall: float) -> None:
    balances = []
    for name, entry in run.registry.entries.items():
        account, balance = entry.account, entry.account.balance(wall)
        balances.append(balance)
        observed = liveness_of(run, name)
        reading.set("atoll_learner_info", 1, name, entry.region, states[name])
        # Counters must not decrease. They may be too low until the learner's first report to a restarted core.
        if account.heard_at > run.registry.since:
            reading.set("atoll_learner_inner_steps", account.total("steps"), name)
            reading.set("atoll_learner_tokens", account.total("tokens"), name)
            reading.set("atoll_learner_blocked_seconds", account.total("blocked_s"), name)
        reading.set("atoll_learner_loss", account.latest_loss(), name)
        reading.set("atoll_learner_step_seconds", (observed.step_time_s or 0.0) if observed is not None else 0.0, name)
        reading.set("atoll_learner_heard_timestamp_seconds", account.heard_at, name)
        reading.set("atoll_learner_lost_seconds", balance.provisioned_s - balance.useful_s, name)
    whole, counts = total_goodput(balances), Counter(states.values())
    reading.set("atoll_goodput_ratio", whole.ratio)
    reading.set("atoll_useful_seconds", whole.useful_s)
    reading.set("atoll_provisioned_seconds", whole.provisioned_s)
    for cause, seconds in whole.lost_s.items():
        reading.set("atoll_lost_seconds", seconds, cause)
    for state in LearnerState:
        reading.set("atoll_learners", counts[state], state)


def _read_run(run: Registrar, reading: MetricSamples, facts: CoreFacts, now: float) -> None:
    accounts = [entry.account for entry in run.registry.entries.values()]
    trained = trained_tokens(run)
    if run.epoch == 1 or now - facts.started_at > SETTLED_S:
        reading.set("atoll_tokens_trained", trained)
    for direction, coded, parameters in (
        ("up", sum(a.bytes_up for a in accounts), sum(a.parameters_up for a in accounts)),
        ("down", sum(a.down()[0] for a in accounts), sum(a.down()[1] for a in accounts)),
    ):
        if coded:
            reading.set("atoll_compression_ratio", 4 * parameters / coded, direction)
    if run.shard is not None:
        merged = merged_tokens(run)
        reading.set("atoll_tokens_merged", merged)
        reading.set("atoll_token_goodput_ratio", merged / trained if trained else 1.0)
    reading.set("atoll_paused", float(bool(run.paused)))
    _read_datasets(run, reading)


def _read_links(run: Registrar, reading: MetricSamples, now: float) -> None:
    """Samples the links. For a learner's own link, other metrics show the bytes and the time of the last message."""
    pace = run.pace(now)
    for link in run.links.all:
        labels = ("front" if link.front else "learner", link.name, link.region)
        if link.heard_at is None:
            continue
        reading.set("atoll_link_connected", float(link.state(now) is LinkState.CONNECTED), *labels)
        if link.round_trip_s:
            reading.set("atoll_link_round_trip_seconds", link.round_trip_s, *labels)
        if (budget_s := link.budget_s(pace, now)) is not None:
            reading.set("atoll_outage_budget_seconds", budget_s, *labels)
        if not link.front:
            continue
        traffic = link.traffic
        reading.set("atoll_link_heard_timestamp_seconds", run.clock.at(link.heard_at), *labels)
        if traffic.moved_at is not None:
            reading.set("atoll_link_byte_timestamp_seconds", run.clock.at(traffic.moved_at), *labels)
        reading.set("atoll_link_bytes", traffic.up, *labels, "up")
        reading.set("atoll_link_bytes", traffic.down, *labels, "down")
        reading.set("atoll_link_learners", len(link.learners), *labels)


def _read_datasets(run: Registrar, reading: MetricSamples) -> None:
    for dataset in run.data.datasets.values():
        name = dataset.declared.name
        for state, count in (
            ("consumed", dataset.consumed),
            ("leased", dataset.leased),
            ("returned", len(dataset.pool)),
            ("not_begun", dataset.declared.positions - dataset.next),
        ):
            reading.set("atoll_data_units", count, name, state)
        reading.set("atoll_data_repeated_units", dataset.repeated / max(1, run.data.parameters), name)
        reading.set("atoll_data_lost_units", dataset.lost / max(1, run.data.parameters), name)


def _read_process(run: KnownRun, reading: MetricSamples, facts: CoreFacts, now: float) -> None:
    """Samples the metrics of this process and its shard."""
    if facts.free_bytes is not None:
        reading.set("atoll_disk_free_bytes", facts.free_bytes)
    reading.set("atoll_restore_seconds", facts.restore_s)
    reading.set("atoll_core_epoch", run.epoch)
    if (shard := run.shard) is None:
        return
    reading.set("atoll_merges", sum(shard.versions().values()))
    reading.set("atoll_contributions_pending", shard.pending())
    reading.set("atoll_spool_bytes", shard.spool.used_bytes)
    for index, fragment in shard.fragments.items():
        reading.set("atoll_fragment_version", fragment.version, str(index))
        if fragment.published_at is not None:
            reading.set("atoll_fragment_age_seconds", now - fragment.published_at, str(index))
    if shard.snapshots.rows:
        reading.set("atoll_snapshot_timestamp_seconds", shard.snapshots.rows[-1].taken_at)


def _size_bytes(ledger: Path) -> int:
    """Returns the size of the ledger and its write-ahead log in bytes. A missing or unreadable file counts as 0."""
    size = 0
    for path in (ledger, Path(f"{ledger}-wal")):
        with contextlib.suppress(OSError):
            size += path.stat().st_size
    return size
