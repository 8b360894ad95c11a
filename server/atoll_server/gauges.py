"""What Prometheus is told of the run and its learners: set once a second, by the loop that owns the state."""

from __future__ import annotations

import asyncio
from collections import Counter

from atoll_server.core import Core
from atoll_server.status import status

EVERY_S = 1.0
STATES = ("joining", "live", "paused", "silent", "left", "evicted")


async def keep_gauges(core: Core) -> None:
    """For as long as the core runs."""
    while True:
        set_gauges(core)
        await asyncio.sleep(EVERY_S)


def set_gauges(core: Core) -> None:
    """Goodput and its losses, learners by state and each by itself, the spool."""
    seen, metrics = status(core), core.metrics
    metrics.goodput.set(seen.goodput.ratio)
    for cause, seconds in seen.goodput.lost_s.items():
        metrics.lost.labels(cause).set(seconds)
    for entry in core.roster.entries.values():
        metrics.inner_steps.labels(entry.name).set(entry.account.total("steps"))
        metrics.tokens.labels(entry.name).set(entry.account.total("tokens"))
        metrics.blocked.labels(entry.name).set(entry.account.total("blocked_s"))
        metrics.loss.labels(entry.name).set(entry.loss)
    states = Counter(each.state for each in seen.learners)
    for state in STATES:
        metrics.learners.labels(state).set(states[state])
    if core.engine is not None:
        metrics.spool_bytes.set(core.engine.spool.used_bytes)
