"""An operator pauses the run, or lets it go on: learners stand in step(), and no round opens."""

from __future__ import annotations

from functools import partial

import structlog
from atoll_wire import outer_pb2 as pb

from atoll_server.rounds import events as ev
from atoll_server.run.core import Core
from atoll_server.storage import crash_points, ledger

log = structlog.get_logger()


async def pause(core: Core, reason: str) -> None:
    """Durable, then told to everybody: a core that is started again is still paused. No reason: the run goes on."""
    await core.writer.commit(partial(ledger.put_meta, key="paused", value=reason))
    crash_points.point("pause.committed")
    core.paused = reason
    if core.engine is not None:
        core.engine.dispatch(ev.Paused(bool(reason)))
    core.happenings.append(pb.Happening(paused=pb.Paused(reason=reason)))
    log.warning("paused" if reason else "goes on", reason=reason)
