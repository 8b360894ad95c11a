"""An operator sends a learner away, or lets it in again."""

from __future__ import annotations

from functools import partial

import structlog

from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.registry import unwanted
from atoll_server.rounds import events as ev
from atoll_server.run.core import Core
from atoll_server.storage import crash_points, ledger

log = structlog.get_logger()


async def evict(core: Core, name: str, reason: str, tokens: int | None = None) -> None:
    """What waits of its work is refused, what was merged stays merged. No reason: it may join again.

    tokens: what counts of all that it reported; None: what counted before. Schedules follow with the next update.

    Raises Refused for a name that is not known.
    """
    entry = core.roster.entries.get(name)
    if entry is None:
        raise Refused(Status.NOT_FOUND, f'this run has no learner "{name[:80]}": see `atoll status`')
    core.roster.evict(entry, reason, core.clock.now())
    if tokens is not None:
        core.roster.strike(entry, tokens)
    await core.writer.commit(partial(ledger.put_learner, row=core.row(entry)))
    crash_points.point("eviction.committed")
    if reason and core.engine is not None:
        core.engine.uploads.fence(name, entry.incarnation + 1)
        core.engine.dispatch(ev.Gone(name, unwanted(reason)))
    log.warning("evicted" if reason else "let in again", learner=name, reason=reason)
