"""A core's Prometheus metrics. Their names contain units, and the number of series is bounded.

The event loop updates counters and histograms from the journal and samples all other values once per second (see
gauges.py). The thread that serves Prometheus converts these samples to series, so that the event loop stays responsive
with many learners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import assert_never

from atoll_wire.contract import Fate
from atoll_wire.layout.frame_spans import Codec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atoll_server.access.quotas import LIMITS
from atoll_server.rounds.syncer_events import Cause
from atoll_server.rpc.open_calls import OpenCalls
from atoll_server.telemetry import entries
from atoll_server.telemetry.entries import Entry

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)

LINK = ("type", "link", "region")  # the type is front or learner; the link is its name

# Name, type, labels and meaning of each metric in MetricSamples. Counters omit _total here, since the library adds it.
SAMPLED: tuple[tuple[str, type[GaugeMetricFamily | CounterMetricFamily], tuple[str, ...], str], ...] = (
    ("atoll_goodput_ratio", GaugeMetricFamily, (), "Useful learner-seconds / provisioned learner-seconds of the run"),
    ("atoll_useful_seconds", GaugeMetricFamily, (), "Learner-seconds in inner steps whose tokens were not discarded"),
    (
        "atoll_provisioned_seconds",
        GaugeMetricFamily,
        (),
        "Learner-seconds since each learner's first Join, including downtime, excluding pauses",
    ),
    ("atoll_lost_seconds", GaugeMetricFamily, ("cause",), "Provisioned learner-seconds that were not useful, by cause"),
    ("atoll_token_goodput_ratio", GaugeMetricFamily, (), "Merged tokens / trained tokens, as a mean over parameters"),
    ("atoll_tokens_trained", CounterMetricFamily, (), "Tokens trained by all learners, as counted by the core"),
    ("atoll_tokens_merged", CounterMetricFamily, (), "Tokens merged, as a mean over parameters"),
    ("atoll_merges", CounterMetricFamily, (), "Merges of all fragments"),
    ("atoll_compression_ratio", GaugeMetricFamily, ("direction",), "Bytes as float32 / bytes as encoded"),
    ("atoll_contributions_pending", GaugeMetricFamily, (), "Contributions that are acknowledged but not yet merged"),
    (
        "atoll_fragment_age_seconds",
        GaugeMetricFamily,
        ("fragment",),
        "Time since the fragment's newest version was published",
    ),
    ("atoll_fragment_version", GaugeMetricFamily, ("fragment",), "Published version of the fragment"),
    ("atoll_learners", GaugeMetricFamily, ("state",), "Learners by state"),
    (
        "atoll_learner_info",
        GaugeMetricFamily,
        ("learner", "region", "state"),
        "1 for the learner's current region and state",
    ),
    ("atoll_learner_inner_steps", CounterMetricFamily, ("learner",), "Inner steps over all incarnations"),
    ("atoll_learner_tokens", CounterMetricFamily, ("learner",), "Tokens trained over all incarnations"),
    ("atoll_learner_loss", GaugeMetricFamily, ("learner",), "Latest training loss"),
    ("atoll_learner_blocked_seconds", CounterMetricFamily, ("learner",), "Time blocked inside Learner.step()"),
    ("atoll_learner_step_seconds", GaugeMetricFamily, ("learner",), "Smoothed duration of an inner step"),
    (
        "atoll_learner_heard_timestamp_seconds",
        GaugeMetricFamily,
        ("learner",),
        "Time of the learner's last message to the core",
    ),
    (
        "atoll_learner_lost_seconds",
        GaugeMetricFamily,
        ("learner",),
        "Provisioned time that was not useful, from all causes",
    ),
    ("atoll_link_connected", GaugeMetricFamily, LINK, "1 while messages of the front or learner arrive, else 0"),
    ("atoll_link_round_trip_seconds", GaugeMetricFamily, LINK, "Round trip to the core; absent if unknown"),
    (
        "atoll_outage_budget_seconds",
        GaugeMetricFamily,
        LINK,
        "Time for which the link may be silent before work is discarded; absent while none would be",
    ),
    ("atoll_link_heard_timestamp_seconds", GaugeMetricFamily, LINK, "Time of the front's last message"),
    ("atoll_link_byte_timestamp_seconds", GaugeMetricFamily, LINK, "Time of the front's last payload byte"),
    ("atoll_link_bytes", CounterMetricFamily, (*LINK, "direction"), "Payload bytes between the front and all cores"),
    ("atoll_link_learners", GaugeMetricFamily, LINK, "Learners behind the front"),
    ("atoll_spool_bytes", GaugeMetricFamily, (), "Spool space that payloads use or reserve"),
    ("atoll_ledger_bytes", GaugeMetricFamily, (), "Size of the ledger's file and its write-ahead log"),
    ("atoll_disk_free_bytes", GaugeMetricFamily, (), "Free space of the run's file system"),
    ("atoll_snapshot_timestamp_seconds", GaugeMetricFamily, (), "Time of the newest snapshot"),
    ("atoll_restore_seconds", GaugeMetricFamily, (), "Time from locking the run's directory until the core served"),
    ("atoll_core_epoch", GaugeMetricFamily, (), "Epoch of the core, which each start increases by one"),
    ("atoll_paused", GaugeMetricFamily, (), "1 while an operator has paused the run"),
    ("atoll_data_units", GaugeMetricFamily, ("dataset", "state"), "Units of all epochs of a dataset, by state"),
    (
        "atoll_data_repeated_units",
        GaugeMetricFamily,
        ("dataset",),
        "Merged work on units that were trained again, in units",
    ),
    (
        "atoll_data_lost_units",
        GaugeMetricFamily,
        ("dataset",),
        "Parts of consumed units that were not merged, in units",
    ),
    ("atoll_wan_budget_bytes", GaugeMetricFamily, (), "WAN budget in bytes per month; absent without a budget"),
)
ACCEPTED, CLAMPED = "accepted", "clamped"  # counted in addition to fates
OTHERS = "others"  # label for the sum over regions without learners, once there are too many regions
READ_KINDS = ("update", "whole", "fixed")
SAMPLED_NAMES = frozenset(name for name, *_ in SAMPLED)

Samples = list[tuple[tuple[str, ...], float]]


@dataclass(slots=True)
class MetricSamples:
    """The values of the metrics in SAMPLED at one moment. values: by metric name, pairs of labels and value."""

    values: dict[str, Samples] = field(default_factory=dict)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Adds one value of a metric. labels: values in the order of SAMPLED."""
        assert name in SAMPLED_NAMES, f"{name} is not declared"
        self.values.setdefault(name, []).append((labels, value))


class Metrics(Collector):
    """One core's metrics. Each core has its own registry, so that one process can run several cores."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._wan = Counter(
            "atoll_wan_bytes_total",
            "Payload bytes between learners and this core",
            ["region", "direction"],
            registry=r,
        )
        self._payload = Counter(
            "atoll_payload_bytes_total",
            "Payload bytes by codec; whole fragments count as float32",
            ["region", "direction", "codec"],
            registry=r,
        )
        self._contributions = Counter(
            "atoll_contributions_total",
            "Contributions by event: accepted, clamped, merged, refused or turned_away",
            ["fate"],
            registry=r,
        )
        self.limited = Counter(
            "atoll_limited_total",
            "Calls refused, ended or delayed, by the limit that was reached, or for a revoked certificate",
            ["limit"],
            registry=r,
        )
        self.revoked = Gauge("atoll_revoked_certificates", "Entries in the list of revoked certificates", registry=r)
        self._declare_readers(r)
        self.rounds = Counter("atoll_rounds_total", "Rounds by outcome: merged or lapsed", ["outcome"], registry=r)
        self.closed = Counter(
            "atoll_rounds_closed_total",
            "Rounds by closing cause: all_answered, grace, deadline, all_silent, left, late (merged without a round)",
            ["cause"],
            registry=r,
        )
        self.quorum_wait = _seconds("atoll_quorum_wait_seconds", "Time from a round's opening to its quorum", r)
        self.grace_wait = _seconds("atoll_grace_wait_seconds", "Time from a round's quorum to its close", r)
        self.merge_seconds = _seconds("atoll_merge_seconds", "Time from a round's close until its merge is computed", r)
        self.publish_seconds = _seconds("atoll_publish_seconds", "Time from a computed merge to its publication", r)
        self.adopt_seconds = _seconds(
            "atoll_adopt_seconds", "Time from publication to a learner's adoption, excluding skipped versions", r
        )
        self.staleness = Histogram(
            "atoll_staleness_outer_steps", "Staleness at merge", registry=r, buckets=(0, 0.5, 1, 2, 3, 4, 8, 16)
        )
        self.weight = Histogram(
            "atoll_contribution_weight",
            "Weight of merged contributions, as a fraction of an outer step",
            registry=r,
            buckets=(0.001, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
        )
        self._begin_at_zero()
        self._regions: set[str] = set()  # regions with their own series
        self.read = MetricSamples()  # replaced only as a whole
        r.register(self)
        self.served = OpenCalls()
        r.register(self.served)
        ProcessCollector(registry=r)

    def _declare_readers(self, r: CollectorRegistry) -> None:
        self.readers = Gauge("atoll_readers", "Readers and fronts that watch for new versions at this core", registry=r)
        self._reads = Counter(
            "atoll_reader_bytes_total",
            "Payload bytes that this core sent to readers and fronts, by kind: update, whole or fixed",
            ["kind"],
            registry=r,
        )

    def _begin_at_zero(self) -> None:
        """Creates series with value 0, because Prometheus needs a value before the first event to compute a rate."""
        for counter, labels in (
            (self.limited, LIMITS),
            (self._contributions, (ACCEPTED, Fate.MERGED, Fate.REFUSED, Fate.TURNED_AWAY)),
            (self.rounds, ("merged", "lapsed")),
            (self.closed, tuple(Cause)),
            (self._reads, READ_KINDS),
        ):
            for label in labels:
                counter.labels(label)

    def on(self, entry: Entry, _now: float) -> None:
        """Updates the counters and histograms that depend on this entry."""
        match entry:
            case entries.TakenUp():
                self._count(ACCEPTED, entry.accepted)
                self._count(Fate.MERGED, entry.merged)
                self._count(Fate.REFUSED, entry.refused)
            case entries.Acknowledged():
                self._count(ACCEPTED)
            case entries.ArrivalRefused():
                self._count(ACCEPTED)
                self._count(Fate.REFUSED)
            case entries.PendingRefused():
                self._count(Fate.REFUSED)
            case entries.Published():
                self._count(Fate.MERGED, len(entry.merge.shares))
            case entries.TurnedAway():
                self._count(Fate.TURNED_AWAY)
            case entries.Clamped():
                self._count(CLAMPED)
            case (
                entries.Started()
                | entries.Restored()
                | entries.InitialParameters()
                | entries.InitialParametersRefused()
                | entries.PauseChanged()
                | entries.SnapshotTaken()
                | entries.SnapshotFailed()
                | entries.Trouble()
                | entries.OfLearners()
                | entries.OfFronts()
                | entries.OfCallers()
                | entries.UploadBegan()
                | entries.RoundOpened()
                | entries.Declined()
                | entries.RoundClosed()  # the timeline counts rounds, with their times
                | entries.RoundLapsed()
                | entries.MergeComputed()
                | entries.Adopted()
            ):
                pass
            case _:
                assert_never(entry)

    def _count(self, fate: str, count: int = 1) -> None:
        self._contributions.labels(fate).inc(count)

    def moved(self, region: str, direction: str, codec: Codec, size_bytes: int) -> None:
        """Counts payload bytes. region: the learner's region. direction: "up" (to the core) or "down"."""
        self._regions.add(region)
        self._wan.labels(region, direction).inc(size_bytes)
        self._payload.labels(region, direction, codec.name.lower()).inc(size_bytes)

    def sent_to_readers(self, kind: str) -> Callable[[int, int], None]:
        """Returns the function that counts a payload's bytes. kind: one of READ_KINDS."""
        counter = self._reads.labels(kind)
        return lambda size_bytes, _: counter.inc(size_bytes)

    def fold(self, used: Set[str], most: int) -> None:
        """If there are more than `most` regions, moves the counts of regions that are not in `used` to OTHERS."""
        if len(self._regions) <= most:
            return
        for counter in (self._wan, self._payload):
            for sample in [sample for metric in counter.collect() for sample in metric.samples]:
                if sample.name.endswith("_total") and sample.labels["region"] not in used | {OTHERS}:
                    counter.labels(**sample.labels | {"region": OTHERS}).inc(sample.value)
                    counter.remove(*sample.labels.values())
        self._regions &= used

    def collect(self) -> Iterator[Metric]:
        """Yields the series from the newest MetricSamples."""
        values = self.read.values
        for name, kind, labels, text in SAMPLED:
            if name in values:
                family = kind(name, text, labels=labels)
                for at, value in values[name]:
                    family.add_metric(at, value)
                yield family

    def describe(self) -> Iterator[Metric]:
        """Yields the sampled metrics without values, for registration."""
        return (kind(name, text, labels=labels) for name, kind, labels, text in SAMPLED)


def _seconds(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, text, registry=registry, buckets=SECONDS)
