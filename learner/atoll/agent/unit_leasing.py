"""Asks the registrar for units of a dataset until an answer arrives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import grpc.aio
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import LinkLost, unary_reply
from atoll_wire.errors import ExitStatus

from atoll.agent.core_view import CoreView
from atoll.errors import LearnerError
from atoll.transfers.call_errors import Remedy, backoff_s, detail, one_line, remedy

log = structlog.get_logger()

LEASE_S = 20.0  # timeout of a call
MANY = 3  # consecutive failures before a warning


async def lease_units(
    core: CoreView, request: Callable[[], pb.LeaseUnitsRequest], after_s: float, rng: random.Random
) -> tuple[pb.LeaseUnitsReply, int]:
    """Returns the reply and the run's generation when the request was sent.

    request: called for each attempt; returns the request without its session. after_s: the seconds to wait first.
    Raises LearnerError if a retry cannot help.
    """
    await asyncio.sleep(after_s)
    failures = 0
    while True:
        shard = core.near()[0]
        await shard.connected.wait()
        session, asked = core.session, request()
        asked.session.CopyFrom(session)
        try:
            with core.link.quick.use() as connection:
                reply: pb.LeaseUnitsReply = await unary_reply(connection.stub.LeaseUnits(asked, timeout=LEASE_S))
            return reply, session.generation
        except LinkLost:
            pass  # another link replaces this link
        except grpc.aio.AioRpcError as error:
            match remedy(error):
                case Remedy.STOP:
                    raise LearnerError(detail(error), ExitStatus.REFUSED) from error
                case Remedy.GIVE_UP:
                    raise LearnerError(detail(error)) from error
                case Remedy.JOIN_AGAIN:
                    shard.lose(session)
            if failures == MANY:
                log.warning("requests for data units keep failing", dataset=asked.dataset.name, error=one_line(error))
        await asyncio.sleep(backoff_s(failures, rng))
        failures += 1
