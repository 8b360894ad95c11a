"""Counts a server's open calls by method, for metrics and a clean shutdown."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
import grpc.aio
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import count_by_method, open_calls
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

METHODS = {
    f"/{service.full_name}/{method.name}": method.name
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
# Calls that may end early at little cost.
CARRYING = frozenset({"Follow", "Report", "Fetch", "Watch", "Read", "ExportCheckpoint", "Probe", "Announce"})


class OpenCalls(grpc.aio.ServerInterceptor, Collector):
    """Counts a server's open calls to the protocol's methods and exports the counts to Prometheus."""

    def __init__(self) -> None:
        self.open = count_by_method(())

    def doing(self) -> bool:
        """Returns whether any open call should not end early."""
        return any(count for method, count in self.open.items() if method not in CARRYING)

    def collect(self) -> Iterator[Metric]:
        """Yields a gauge of the open calls that this process answers and of those that it makes."""
        family = GaugeMetricFamily("atoll_open_calls", "Open gRPC calls", labels=["side", "method"])
        for side, calls in (("answered", self.open), ("opened", open_calls())):
            for method, count in sorted(calls.items()):
                family.add_metric([side, method], count)
        yield family

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - gRPC's handler
        """Implements gRPC's hook: wraps a method's handler, so that open calls are counted."""
        handler = await continuation(handler_call_details)
        method = METHODS.get(handler_call_details.method)
        if handler is None or method is None:
            return handler
        kind = "_".join(
            "stream" if many else "unary" for many in (handler.request_streaming, handler.response_streaming)
        )
        answer = getattr(handler, kind)
        counted = self._many(method, answer) if handler.response_streaming else self._one(method, answer)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(counted, handler.request_deserializer, handler.response_serializer)

    def _one(self, method: str, answer: Any) -> Any:  # noqa: ANN401 - gRPC's
        async def counted(request: Any, context: Any) -> Any:  # noqa: ANN401
            with self._while(method):
                return await answer(request, context)

        return counted

    def _many(self, method: str, answer: Any) -> Any:  # noqa: ANN401 - gRPC's
        async def counted(request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401
            with self._while(method):
                async with aclosing(answer(request, context)) as replies:
                    async for reply in replies:
                        yield reply

        return counted

    @contextmanager
    def _while(self, method: str) -> Iterator[None]:
        self.open[method] += 1
        try:
            yield
        finally:
            self.open[method] -= 1
