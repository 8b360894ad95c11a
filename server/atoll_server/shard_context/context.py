"""The dependencies of a shard, such as the settings, the clock, the ledger writer and the journal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll_wire.process.clock import Clock

from atoll_server.learners.learner_registry import LearnerRegistry
from atoll_server.ledger.ledger_writer import LedgerWriter
from atoll_server.settings import CoreSettings, RunSettings
from atoll_server.storage.disk import Disk
from atoll_server.telemetry.entries import Entry
from atoll_server.telemetry.journal import Journal
from atoll_server.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class ShardContext:
    """A shard's dependencies.

    number: the shard's position in `JoinReply.shards`. shards: number of shards that hold fragments. clock: the run's
    clock. fail: function that ends the process with an error. datasets: function that returns the accounts of the run's
    datasets for a snapshot (`data_ledger.as_data`).
    """

    settings: CoreSettings
    run: RunSettings
    generation: int
    number: int
    shards: int
    registry: LearnerRegistry
    journal: Journal
    writer: LedgerWriter
    metrics: Metrics
    disk: Disk
    clock: Clock
    fail: Callable[[BaseException], None]
    datasets: Callable[[], list[Any]] = list

    def record(self, entry: Entry) -> None:
        self.journal.record(entry, self.clock.monotonic())
