"""The Prometheus metrics of a front."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector

from atoll_server.access.quotas import LIMITS
from atoll_server.rpc.open_calls import OpenCalls

MAX_NAMES, OTHERS = 1024, "others"


class FrontMetrics:
    """One front's metrics. Each front has its own registry, so that a process can run several fronts."""

    def __init__(self, region: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        wan = Counter(
            "atoll_front_wan_bytes_total",
            "Payload bytes between this front and the core",
            ["region", "direction", "kind"],
            registry=self.registry,
        )
        self._wan = wan
        self.up = wan.labels(region, "up", "contribution")
        self.whole_up = wan.labels(region, "up", "whole")
        self.updates = wan.labels(region, "down", "update")
        self.whole = wan.labels(region, "down", "whole")
        self.fixed = wan.labels(region, "down", "fixed")
        self.readers = Gauge("atoll_front_readers", "Readers that watch for new versions", registry=self.registry)
        self.readers_down = Counter(
            "atoll_front_reader_bytes_total", "Payload bytes that this front sent to readers", registry=self.registry
        )
        self._names: set[str] = set()
        self._learners = Counter(
            "atoll_front_learner_bytes_total",
            "Payload bytes between this front and a learner",
            ["learner", "direction"],
            registry=self.registry,
        )
        self.refused = Counter(
            "atoll_front_refused_total", "Calls that ended with an error, by status", ["status"], registry=self.registry
        )
        self.limited = Counter(
            "atoll_front_limited_total",
            "Calls refused, ended or delayed, by the limit that was reached, or for a revoked certificate",
            ["limit"],
            registry=self.registry,
        )
        for limit in LIMITS:
            self.limited.labels(limit)
        self.revoked = Gauge(
            "atoll_front_revoked_certificates", "Entries in the list of revoked certificates", registry=self.registry
        )
        self.cached = Gauge("atoll_front_cached_bytes", "Size of cached updates and fragments", registry=self.registry)
        self.served = OpenCalls()
        self.registry.register(self.served)
        core_up = Gauge("atoll_front_core_up", "1 while the core answers", ["region"], registry=self.registry)
        self.core_up = core_up.labels(region)

    def wan_bytes(self) -> tuple[int, int]:
        """Returns the payload bytes sent to the core and received from it."""
        samples = [sample for metric in self._wan.collect() for sample in metric.samples]
        totals = [sample for sample in samples if sample.name.endswith("_total")]
        up, down = (sum(s.value for s in totals if s.labels["direction"] == way) for way in ("up", "down"))
        return int(up), int(down)

    def vouched(self, name: str) -> None:
        """Records that the core knows this learner, so that the learner gets its own time series."""
        if len(self._names) < MAX_NAMES:
            self._names.add(name)

    def learner(self, name: str, direction: str) -> Counter:
        """Returns the counter of a learner's bytes.

        Learners beyond MAX_NAMES, and learners that the core has not confirmed, share one counter.
        """
        return self._learners.labels(name if name in self._names else OTHERS, direction)
