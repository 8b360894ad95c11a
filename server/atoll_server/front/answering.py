"""Ends a front's failed calls with the right status and records refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import LinkLost
from atoll_wire.connections.link import Link, is_atoll_status, is_connection_lost

from atoll_server.access.audit_log import AuditLog
from atoll_server.access.refusals import Refused, Status
from atoll_server.front.metrics import FrontMetrics
from atoll_server.rpc.calls import Context, end
from atoll_server.upstream.core_connection import UpstreamShard
from atoll_server.upstream.routes import Routes


class Route:
    """The shard that receives a call. link: the connections to this shard at the time when the front selected it."""

    def __init__(self, shard: UpstreamShard) -> None:
        self.to(shard)

    def to(self, shard: UpstreamShard) -> Link:
        """Selects this shard and returns its current connections."""
        self.shard = shard
        self.address = shard.core_connection.address
        self.link = shard.link
        return self.link


class Answering:
    """Ends the failed calls of one front."""

    def __init__(self, routes: Routes, metrics: FrontMetrics, audit_log: AuditLog) -> None:
        self._routes = routes
        self._metrics = metrics
        self._audit_log = audit_log

    @asynccontextmanager
    async def __call__(
        self, context: Context, shard: UpstreamShard | None = None, session: pb.Session | None = None
    ) -> AsyncIterator[Route]:
        """Context manager for a call's body. If the body fails, the call ends with the error's status.

        shard: the shard that receives the call; None if it is not known yet. session: the session that the shard must
        check again if the call fails; None if a failure does not concern a session.
        """
        route = Route(shard or self._routes.default)
        try:
            yield route
        except Refused as refused:
            code, details = grpc.StatusCode[refused.status.name], refused.detail
            if refused.status is not Status.UNAVAILABLE:  # UNAVAILABLE is not the caller's fault
                self._audit_log.refused("refused", context.peer(), status=refused.status.value, detail=details)
        except grpc.aio.AioRpcError as error:
            code, details, fault = error.code(), error.details() or "", ""
            if is_connection_lost(error):
                fault = await route.shard.core_connection.tls_fault()
                self.answered(route.shard, up=False)
                route.shard.core_connection.suspect(route.link)
            if is_atoll_status(error):
                route.shard.core_connection.answered(route.link)
            else:  # from gRPC or another server on the core's port; this status must not stop a learner
                fix = "check the core and any proxy in front of it"
                text = f"a call to the core at {route.address} failed ({details}): {fix}"
                text = f"the front cannot call the core: {fault}" if fault else text
                code, details = grpc.StatusCode.UNAVAILABLE, text
            if session is not None:
                route.shard.sessions.refused(session)
        except LinkLost:
            code, details = grpc.StatusCode.UNAVAILABLE, f"the core at {route.address} does not answer: try again later"
        else:
            return
        self._metrics.refused.labels(code.name.lower()).inc()
        await end(context, code, details)

    def answered(self, shard: UpstreamShard, *, up: bool) -> None:
        """Records whether a shard answered its last call."""
        shard.up = up
        self._metrics.core_up.set(self._routes.up)
