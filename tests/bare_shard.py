"""A shard for tests of the intake, which has a list as its ledger and opens no rounds."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from atoll_server.checkpoints.restore import Restored
from atoll_server.learners.goodput import TimeAccount
from atoll_server.learners.learner_registry import LearnerRegistry, RegistryEntry
from atoll_server.ledger.rows import ContributionRow, FateRow
from atoll_server.merging import merge
from atoll_server.rounds.liveness import LearnerLiveness
from atoll_server.settings import CoreSettings, Limits, RunSettings
from atoll_server.shard.shard import Shard
from atoll_server.shard_context.context import ShardContext
from atoll_server.shard_context.run_view import RunView
from atoll_server.storage.disk import DISK
from atoll_server.telemetry.journal import Journal
from atoll_server.telemetry.metrics import Metrics
from atoll_wire.layout.layout import Layout

from tests.clocks import SetClock

NEVER: Any = None  # in place of dependencies that this shard does not use


class Rows:
    """Stands in for the ledger's writer. A commit waits for `may_commit`."""

    def __init__(self) -> None:
        self.rows: list[tuple[ContributionRow, FateRow | None]] = []
        self.at_commit, self.may_commit = asyncio.Event(), asyncio.Event()
        self.may_commit.set()

    async def commit(self, operation: partial[None]) -> None:
        """Records the contribution that the operation would write to the ledger."""
        self.at_commit.set()
        await self.may_commit.wait()
        self.rows.append((operation.keywords["row"], operation.keywords.get("fate")))


def bare_shard(directory: Path, layout: Layout, limits: Limits, rows: Rows, failures: list, **run: Any) -> Shard:
    """Returns a shard with learners a and b, which drops all dispatched events. failures: a list for the errors that
    would end the process.
    """
    registry = LearnerRegistry(limits.learners)
    for name in ("a", "b"):
        registry.entries[name] = RegistryEntry(name, "here", 1, [1], TimeAccount(0.0, 0.0))
    states = {each.index: merge.start(np.zeros(each.length, np.float32)) for each in layout.fragments}
    writer: Any = rows
    settings = CoreSettings(listen=(), directory=directory, limits=limits)
    context = ShardContext(
        settings, RunSettings(**run), 1, 0, 1, registry, Journal(), writer, Metrics(), DISK, SetClock(), failures.append
    )
    shard = Shard(context, Restored(layout, NEVER, states, {}, []), RunView(), damaged=False)
    shard.dispatch = lambda _: None
    shard.start()
    shard.syncer.liveness = {name: LearnerLiveness(1, 0.0, 0.0) for name in registry.entries}
    shard.spool.directory.mkdir()
    shard.spool.prepare(1, shard.fragments)
    return shard
