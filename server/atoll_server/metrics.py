"""What a core tells Prometheus: declared once, units in the names, series of a bounded number."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """Counters and gauges of one core; its own registry, so that a process may hold several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.goodput = Gauge("atoll_goodput_ratio", "Useful / provisioned learner-seconds of the run", registry=r)
        self.lost = Gauge(
            "atoll_lost_seconds", "Provisioned learner-seconds not useful, by cause", ["cause"], registry=r
        )
        self.wan_bytes = Counter(
            "atoll_wan_bytes_total", "Payload bytes between learners and this core", ["region", "direction"], registry=r
        )
        self.contributions = Counter(
            "atoll_contributions_total", "Contributions: accepted, then merged or refused; turned_away at the door",
            ["fate"], registry=r,
        )  # fmt: skip
        self.rounds = Counter("atoll_rounds_total", "Rounds by outcome: merged, lapsed", ["outcome"], registry=r)
        self.fragment_version = Gauge("atoll_fragment_version", "Published version", ["fragment"], registry=r)
        self.inner_steps = Gauge(
            "atoll_learner_inner_steps_total", "Inner steps over all incarnations", ["learner"], registry=r
        )
        self.tokens = Gauge(
            "atoll_learner_tokens_total", "Tokens trained over all incarnations", ["learner"], registry=r
        )
        self.loss = Gauge("atoll_learner_loss", "Latest training loss", ["learner"], registry=r)
        self.blocked = Gauge("atoll_learner_blocked_seconds_total", "Inside Learner.step()", ["learner"], registry=r)
        self.learners = Gauge("atoll_learners", "Learners by state", ["state"], registry=r)
        self.merge_seconds = Histogram(
            "atoll_merge_seconds", "From a round's close to its publication", registry=r,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
        )  # fmt: skip
        self.staleness = Histogram(
            "atoll_staleness_versions", "Of merged contributions", registry=r, buckets=(0, 1, 2, 3, 4, 8, 16)
        )
        self.spool_bytes = Gauge("atoll_spool_bytes", "Reserved or held by payloads", registry=r)
        self.disk_free = Gauge("atoll_disk_free_bytes", "Of the file system that the run lives on", registry=r)
        self.snapshot_at = Gauge("atoll_snapshot_timestamp_seconds", "When the newest snapshot was taken", registry=r)
        self.restore_seconds = Gauge("atoll_restore_seconds", "This core's start, until it could serve", registry=r)
