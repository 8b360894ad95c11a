"""Rounds: why they close, the time of each stage, the fate of contributions, and the state of the core."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from boards import parts
from boards.parts import GREEN, RED, YELLOW, Panel, lines, steps, value


def board() -> Dashboard:
    """Returns the dashboard of rounds."""
    return parts.page(
        "atoll-rounds",
        "Atoll: rounds",
        "Why rounds close, the time of each stage, the fate of contributions, and the state of the core.",
        {"": _numbers(), "Rounds": _rounds(), "Contributions": _contributions(), "The core": _core()},
        events=[*parts.core_events(), parts.front_out(), parts.learner_silent()],
    )


def quantiles(name: str) -> dict[str, str]:
    """Returns expressions for the median, the 95th percentile and the highest bucket of a histogram."""
    rate = f"sum by (le) (rate({name}_bucket[$__rate_interval]))"
    of = {"median": 0.5, "95 %": 0.95, "highest": 1}
    return {name: f"histogram_quantile({share}, {rate})" for name, share in of.items()}


def _numbers() -> list[Panel]:
    """Returns the panels with current values."""
    return [
        value("Merges per minute", "Mean of the last five minutes.", "none",
              "60 * sum(rate(atoll_merges_total[5m]))", steps(RED, (0.001, GREEN)), decimals=1),
        value("Rounds closed at deadline", "Share of the rounds in the last half hour that closed at their deadline.",
              "percentunit", "max(run:atoll_rounds_at_deadline:ratio_30m) or vector(0)",
              steps(GREEN, (0.1, YELLOW), (0.25, RED)), decimals=1),
        value("Rounds that lapse", "Share of the rounds in the last half hour that had nothing to merge.",
              "percentunit", "max(run:atoll_rounds_lapsed:ratio_30m) or vector(0)",
              steps(GREEN, (0.1, YELLOW), (0.25, RED)), decimals=1),
        value("Tokens merged", "Share of the trained tokens that were merged.", "percentunit",
              "max(atoll_token_goodput_ratio)", steps(RED, (0.8, YELLOW), (0.9, GREEN)), decimals=1),
        value("Pending contributions", "Contributions that are acknowledged but not merged yet.", "none",
              "sum(atoll_contributions_pending)", steps(GREEN, (1000, YELLOW))),
        value("Oldest fragment", "Longest time since a fragment's last published update.", "s",
              "max(atoll_fragment_age_seconds)", steps(GREEN, (900, YELLOW), (1800, RED))),
        value("Newest snapshot", "Age of the newest snapshot, of the worst shard.", "s",
              "time() - min(atoll_snapshot_timestamp_seconds)",
              steps(GREEN, (600, YELLOW), (1800, RED))),
        value("Free disk space", "Free bytes of the file system that holds the run's directory.", "bytes",
              "min(atoll_disk_free_bytes)", steps(RED, (1e9, YELLOW), (1e10, GREEN))),
    ]  # fmt: skip


def _rounds() -> list[Panel]:
    """Returns the panels with the reasons for closing, and with the time of each stage."""
    closed = {"{{cause}}": "60 * sum by (cause) (rate(atoll_rounds_closed_total[$__rate_interval]))"}
    outcome = {"{{outcome}}": "60 * sum by (outcome) (rate(atoll_rounds_total[$__rate_interval]))"}
    versions = {
        "highest": "max(atoll_fragment_version)",
        "median": "quantile(0.5, atoll_fragment_version)",
        "lowest": "min(atoll_fragment_version)",
    }
    stages = {
        "Until the quorum": ("From a round's opening until enough learners have answered.", "quorum_wait"),
        "Grace window": (
            "From the quorum until the round closes. Learners keep training during this time.",
            "grace_wait",
        ),
        "Merge": ("From a round's close until its merge is computed.", "merge"),
        "Publish": ("From the computed merge until the update is durable and can be fetched.", "publish"),
        "Adopt": ("From publication until a learner reports that it has adopted the update.", "adopt"),
    }
    return [
        lines("Why rounds close", "Rounds per minute, by cause. all_silent: every learner fell silent. "
              "late: late work was merged without a round.", "none", closed, stacked=True),
        lines("Outcome of rounds", "Rounds per minute, by outcome. lapsed: the round had nothing to merge.", "none",
              outcome, stacked=True),
        lines("Versions", "Versions of fragments. They should stay close together.", "none", versions),
        *(lines(title, text, "s", quantiles(f"atoll_{name}_seconds")) for title, (text, name) in stages.items()),
        lines("Age of fragments", "Time since the last published update, of the five oldest fragments.", "s",
              {"fragment {{fragment}}": "topk(5, max by (fragment) (atoll_fragment_age_seconds))"}),
    ]  # fmt: skip


def _contributions() -> list[Panel]:
    """Returns the panels with fate, staleness and weight of contributions."""
    fates = {"{{fate}}": "60 * sum by (fate) (rate(atoll_contributions_total[$__rate_interval]))"}
    return [
        lines("Contributions by fate",
              "Contributions per minute. turned_away: refused before the upload was complete.", "none",
              fates),
        lines("Pending", "Contributions that are acknowledged but not merged yet.", "none",
              {"pending": "sum(atoll_contributions_pending)"}),
        lines("Staleness", "Outer steps between the base version of a contribution and its merge.", "none",
              quantiles("atoll_staleness_outer_steps")),
        lines("Weights", "Weight of a contribution, as a fraction of an outer step. Late work has a lower weight.",
              "percentunit",
              quantiles("atoll_contribution_weight"), most=1),
        lines("Tokens per second", "Trained tokens and merged tokens per second.", "none",
              {word: f"sum(rate(atoll_tokens_{word}_total[$__rate_interval]))" for word in ("trained", "merged")}),
        lines("Merges per minute", "Merges per minute, over all fragments.", "none",
              {"merges": "60 * sum(rate(atoll_merges_total[$__rate_interval]))"}),
    ]  # fmt: skip


def _core() -> list[Panel]:
    """Returns the panels with disk, memory, CPU and restarts of the core."""
    disk = {"spool": "sum(atoll_spool_bytes)", "ledger": "sum(atoll_ledger_bytes)"}
    return [
        lines("Disk use", "Size of the spool's payloads and of the ledger, in bytes.", "bytes", disk),
        lines("Free disk space", "Free bytes of the file system that holds the run's directory.", "bytes",
              {"free": "min(atoll_disk_free_bytes)"}),
        lines("Snapshots", "Age of the newest snapshot, per core. The age grows until the next snapshot.", "s",
              {"{{instance}}": "time() - max by (instance) (atoll_snapshot_timestamp_seconds)"}),
        lines("Memory", "Resident memory of the core process.", "bytes",
              {"{{instance}}": 'process_resident_memory_bytes{job="atoll-core"}'}),
        lines("CPUs", "Number of CPUs in use by the core.", "none",
              {"{{instance}}": 'rate(process_cpu_seconds_total{job="atoll-core"}[$__rate_interval])'}),
        lines("Restarts",
              "The core's epoch, which increases with each start, and the duration of the last start.", "none",
              {"epoch": "run:atoll_core_epoch:max", "seconds": "max(atoll_restore_seconds)"}),
    ]  # fmt: skip
