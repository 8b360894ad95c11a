"""Parts that all server processes share: listening addresses, health, shutdown, the limit on open files and signals."""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Iterable
from dataclasses import dataclass

import grpc
import grpc.aio
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.errors import SettingsError
from atoll_wire.process.certificate_expiry import expiry_times
from atoll_wire.process.clock import SYSTEM
from atoll_wire.process.worker_threads import started_pool
from atoll_wire.security.transport import TransportSecurity, on_loopback
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from atoll_server.rpc.open_calls import OpenCalls

log = structlog.get_logger()

WORKERS = 6  # threads for calls that block, mostly on the disk
UNLIMITED_FILES = 10_240  # the largest limit that macOS accepts, although macOS reports no limit
GRACE_S = 10.0  # seconds within which a stopping server finishes calls, such as a checkpoint or an acknowledgement
QUICK_S = 0.5  # seconds for calls that only transfer data, since callers continue the transfer later
LOOK_S = 0.02  # seconds between two checks of the open calls during a shutdown
SERVICES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())


@dataclass(frozen=True, slots=True)
class RpcServer:
    """A gRPC server and its health service.

    served: counter of the server's open calls. credentials: None without TLS.
    """

    server: grpc.aio.Server
    served: OpenCalls
    health: health_aio.HealthServicer
    credentials: grpc.ServerCredentials | None

    @classmethod
    def of(
        cls,
        listen: Iterable[str],
        security: TransportSecurity,
        options: list[tuple[str, int]],
        most_calls: int,
        gate: grpc.aio.ServerInterceptor,
        served: OpenCalls,
    ) -> RpcServer:
        """Returns a server with a health service, and with gRPC reflection if all addresses are on loopback.

        options: as returned by `message_options`. most_calls: limit on concurrent calls. gate: the limiter of the
        calls. Raises TransportSecurityError if the certificates cannot be used.
        """
        credentials = security.serving()
        if old := [file for file, at in expiry_times(security).items() if at < SYSTEM.wall()]:
            log.warning("peers refuse this process, because a certificate has expired: issue it again", files=old)
        server = grpc.aio.server(interceptors=[gate, served], options=options, maximum_concurrent_rpcs=most_calls)
        health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        if on_loopback(listen):
            reflection.enable_server_reflection((*SERVICES, reflection.SERVICE_NAME), server)
        return cls(server, served, health, credentials)

    def bind(self, address: str) -> str:
        """Binds HOST:PORT. Returns the address with the chosen port if PORT is 0. Raises SettingsError."""
        text = (
            f"--listen {address} cannot be bound: the port is in use or not permitted, or the host is not local; "
            "give another address"
        )
        try:
            port = (
                self.server.add_insecure_port(address)
                if self.credentials is None
                else self.server.add_secure_port(address, self.credentials)
            )
        except RuntimeError as error:
            raise SettingsError(text) from error
        if port == 0 and not address.startswith("unix:"):
            raise SettingsError(text)
        return f"{address.rpartition(':')[0]}:{port}" if port else address

    async def begin(self) -> None:
        """Starts the server and reports all services as healthy."""
        await self.server.start()
        for name in ("", *SERVICES):
            await self.health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def end(self, grace_s: float = GRACE_S) -> None:
        """Stops the server. Open calls get grace_s seconds to finish. Calls that only transfer data may end earlier."""
        await self.health.enter_graceful_shutdown()
        stopping = asyncio.create_task(self.server.stop(grace_s))
        await asyncio.wait({stopping}, timeout=QUICK_S)
        while not stopping.done() and self.served.doing():
            await asyncio.wait({stopping}, timeout=LOOK_S)
        await self.server.stop(None)
        await stopping


def prepare() -> None:
    """Starts the threads for blocking calls and raises the limit on open files as far as the system permits.

    A merge opens one file per contribution. Each learner opens up to 65 connections.
    """
    asyncio.get_running_loop().set_default_executor(started_pool(WORKERS, "worker"))
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = UNLIMITED_FILES if most == resource.RLIM_INFINITY else most
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), most))


def stop_signal() -> asyncio.Event:
    """Returns an event that SIGTERM and SIGINT set."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    return told
