"""Rounds: why they close, how long each stage takes, what becomes of contributions, and how the core fares."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from boards import parts
from boards.parts import GREEN, RED, YELLOW, Panel, lines, steps, value


def board() -> Dashboard:
    """The dashboard."""
    return parts.page(
        "atoll-rounds",
        "Atoll: rounds",
        "Why rounds close, how long each stage takes, what becomes of contributions, and how the core fares.",
        {"": _numbers(), "Rounds": _rounds(), "Contributions": _contributions(), "The core": _core()},
        events=[parts.core_started(), parts.somebody_silent()],
    )


def quantiles(name: str) -> dict[str, str]:
    """Median and 95th percentile of a histogram."""
    rate = f"sum by (le) (rate({name}_bucket[$__rate_interval]))"
    return {"median": f"histogram_quantile(0.5, {rate})", "95 %": f"histogram_quantile(0.95, {rate})"}


def _numbers() -> list[Panel]:
    """Of now."""
    return [
        value("Merges a minute", "Over the last five minutes.", "none",
              "60 * sum(rate(atoll_merges_total[5m]))", steps(RED, (0.001, GREEN)), decimals=1),
        value("Rounds at their deadline", "Share of the last half hour's rounds that closed at their deadline.",
              "percentunit", "max(run:atoll_rounds_at_deadline:ratio_30m) or vector(0)",
              steps(GREEN, (0.1, YELLOW), (0.25, RED)), decimals=1),
        value("Rounds that lapse", "Share of the last half hour's rounds with nothing to merge.", "percentunit",
              "max(run:atoll_rounds_lapsed:ratio_30m) or vector(0)",
              steps(GREEN, (0.1, YELLOW), (0.25, RED)), decimals=1),
        value("Tokens merged", "Share of all trained tokens that are merged.", "percentunit",
              "max(atoll_token_goodput_ratio)", steps(RED, (0.8, YELLOW), (0.9, GREEN)), decimals=1),
        value("Pending contributions", "Acknowledged, and waiting for their merge.", "none",
              "sum(atoll_contributions_pending)", steps(GREEN, (1000, YELLOW))),
        value("Oldest anchor", "Since the last published update of the fragment that waits longest.", "s",
              "max(atoll_fragment_age_seconds)", steps(GREEN, (900, YELLOW), (1800, RED))),
        value("Newest snapshot", "How long ago it was taken.", "s", "time() - max(atoll_snapshot_timestamp_seconds)",
              steps(GREEN, (600, YELLOW), (1800, RED))),
        value("Room on the disk", "Free bytes of the file system that the run lives on.", "bytes",
              "min(atoll_disk_free_bytes)", steps(RED, (1e9, YELLOW), (1e10, GREEN))),
    ]  # fmt: skip


def _rounds() -> list[Panel]:
    """Why they close, and each stage."""
    closed = {"{{cause}}": "60 * sum by (cause) (rate(atoll_rounds_closed_total[$__rate_interval]))"}
    outcome = {"{{outcome}}": "60 * sum by (outcome) (rate(atoll_rounds_total[$__rate_interval]))"}
    versions = {
        "furthest": "max(atoll_fragment_version)",
        "median": "quantile(0.5, atoll_fragment_version)",
        "least far": "min(atoll_fragment_version)",
    }
    stages = {
        "Until the quorum": ("From a round's opening until enough learners have answered.", "quorum_wait"),
        "Grace window": ("From the quorum until the round is closed, hidden behind training.", "grace_wait"),
        "Merge": ("From a round's close until its outer step is computed.", "merge"),
        "Publish": ("From there until it is durable and may be fetched.", "publish"),
        "Adopt": ("From there until each learner has reported that it adopted it.", "adopt"),
    }
    return [
        lines("Why rounds close", "Per minute: all live learners answered, the grace window or deadline "
              "passed, or all fell silent; late: merged alone.", "none", closed, stacked=True),
        lines("What rounds give", "Rounds a minute that were merged, and that lapsed with nothing to merge.", "none",
              outcome, stacked=True),
        lines("Versions", "Published versions of all fragments: they should stay close together.", "none", versions),
        *(lines(title, text, "s", quantiles(f"atoll_{name}_seconds")) for title, (text, name) in stages.items()),
        lines("Anchors' age", "Since each fragment's last published update; the oldest five.", "s",
              {"fragment {{fragment}}": "topk(5, max by (fragment) (atoll_fragment_age_seconds))"}),
    ]  # fmt: skip


def _contributions() -> list[Panel]:
    """What becomes of them."""
    fates = {"{{fate}}": "60 * sum by (fate) (rate(atoll_contributions_total[$__rate_interval]))"}
    return [
        lines("Contributions by fate", "A minute: accepted, then merged or refused; turned away at the door.", "none",
              fates),
        lines("Pending", "Contributions that are acknowledged and wait for their merge.", "none",
              {"pending": "sum(atoll_contributions_pending)"}),
        lines("Staleness", "Outer steps between a merged contribution's base and its merge.", "none",
              quantiles("atoll_staleness_outer_steps")),
        lines("Weights", "A contribution's part in an outer step: less if late, or if few are there.", "percentunit",
              quantiles("atoll_contribution_weight"), most=1),
        lines("Tokens a second", "Tokens that were trained, and those that were merged.", "none",
              {word: f"sum(rate(atoll_tokens_{word}_total[$__rate_interval]))" for word in ("trained", "merged")}),
        lines("Merges a minute", "Of all fragments.", "none",
              {"merges": "60 * sum(rate(atoll_merges_total[$__rate_interval]))"}),
    ]  # fmt: skip


def _core() -> list[Panel]:
    """Its disk, memory and starts."""
    disk = {"spool": "sum(atoll_spool_bytes)", "ledger": "sum(atoll_ledger_bytes)"}
    return [
        lines("On the disk", "What the spool's payloads and the ledger take.", "bytes", disk),
        lines("Room on the disk", "Free bytes of the file system that the run lives on.", "bytes",
              {"free": "min(atoll_disk_free_bytes)"}),
        lines("Snapshots", "Age of the newest snapshot: it grows until the next is written.", "s",
              {"age": "time() - max(atoll_snapshot_timestamp_seconds)"}),
        lines("Memory", "Resident memory of the core's process.", "bytes",
              {"{{instance}}": 'process_resident_memory_bytes{job="core"}'}),
        lines("Processors", "Processors that the core keeps busy.", "none",
              {"{{instance}}": 'rate(process_cpu_seconds_total{job="core"}[$__rate_interval])'}),
        lines("Starts", "The core's epoch grows with each start; and how long the latest one took.", "none",
              {"epoch": "run:atoll_core_epoch:max", "seconds": "max(atoll_restore_seconds)"}),
    ]  # fmt: skip
