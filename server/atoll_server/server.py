"""One core as a process: gRPC server, health, reflection, metrics, signals; from SERVING to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import sqlite3
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog
from atoll_wire import frames, memory
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.errors import UserError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from atoll_server.audit import Audit
from atoll_server.calls import message_options
from atoll_server.core import STANDBY_S, Core
from atoll_server.gauges import keep_gauges
from atoll_server.operators import OperatorService
from atoll_server.service import OuterService
from atoll_server.settings import LOOPBACK, CoreSettings, SettingsError

log = structlog.get_logger()


class CoreFailed(UserError):  # noqa: N818 - what it says is that the core failed
    """Acknowledged work cannot be carried on with; one line with the remedy."""


T = TypeVar("T")

PORT_S = 5.0
UNLIMITED_FILES = 10_240  # what macOS takes where it says that there is no limit
GRACE_S = 10.0  # for calls that run when the core is asked to stop
SERVICES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())


async def serve(settings: CoreSettings, given: dict[str, Any], announce: Callable[[str], None]) -> None:
    """Runs a core until SIGTERM or SIGINT. announce: told each address once it serves.

    Raises SettingsError for what the operator can mend, and whatever made acknowledged work impossible to carry on.
    """
    settings.check()
    memory.lean()
    _open_files()
    core = Core(settings, given)
    told = _told(core)
    if settings.standby:
        log.info("standing by for --dir", directory=str(settings.directory))
    if not await _unless(told, core.take_directory()):
        return
    server = grpc.aio.server(
        options=message_options(settings.limits.message_bytes), maximum_concurrent_rpcs=settings.limits.calls
    )
    health = health_aio.HealthServicer()
    frames.serve(OuterService(core), server)
    rpc.add_OperatorServicer_to_server(OperatorService(core), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if all(address.startswith(LOOPBACK) for address in settings.listen):
        reflection.enable_server_reflection((*SERVICES, reflection.SERVICE_NAME), server)
    addresses = [await _patiently(partial(_bind, server, address), settings) for address in settings.listen]
    metrics_port = await _patiently(partial(_serve_metrics, core, settings.metrics_listen), settings)
    try:
        if await _unless(told, core.start()):
            gauges = asyncio.create_task(keep_gauges(core))
            gauges.add_done_callback(core.watched)
            await server.start()
            for name in ("", *SERVICES):
                await health.set(name, health_pb2.HealthCheckResponse.SERVING)
            log.info("serving", addresses=addresses, run=core.run_id, epoch=core.epoch, metrics_port=metrics_port)
            audit = Audit(settings.directory, core.disk, partial(setattr, core, "damage"))
            audit.begin(core.initial_sha256)
            with contextlib.suppress(OSError):  # nobody reads it, or its disk is full
                for address in addresses:
                    announce(address)
            await _serve_until(told, core, server, health, gauges)
            audit.end()
        elif core.failed.done():
            core.failed.result()
    except (OSError, sqlite3.Error) as error:
        raise CoreFailed(
            f"the disk failed ({error}): nothing acknowledged is lost; make room or mend it, then start the core again"
        ) from error
    log.info("stopped", run=core.run_id)


async def _unless(told: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether it came to its end; False when this process was asked to stop before: it is given up then."""
    working, asked = asyncio.create_task(work), asyncio.create_task(told.wait())
    await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not working.done():
        working.cancel()
        return False
    working.result()
    return True


def _open_files() -> None:
    """As many as this process may have: each contribution of a merge is one, and a learner up to 65 connections."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = UNLIMITED_FILES if most == resource.RLIM_INFINITY else most
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), most))


async def _serve_until(
    told: asyncio.Event,
    core: Core,
    server: grpc.aio.Server,
    health: health_aio.HealthServicer,
    gauges: asyncio.Task[None],
) -> None:
    try:
        await told.wait()
        if core.failed.done():
            core.failed.result()
    finally:
        gauges.cancel()
        await health.enter_graceful_shutdown()
        core.happenings.close()
        await server.stop(0 if core.failed.done() else GRACE_S)
    await core.stop()


async def _patiently(bind: Callable[[], T], settings: CoreSettings) -> T:
    """A standby waits a moment: of a process that dies the lock may go before its ports."""
    deadline = time.monotonic() + (PORT_S if settings.standby else 0.0)
    while True:
        try:
            return bind()
        except SettingsError:
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(STANDBY_S)


def _bind(server: grpc.aio.Server, address: str) -> str:
    """Returns the address with its port, which may be the system's choice."""
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise SettingsError(
            f"--listen {address} cannot be bound: the port is in use or not yours; give another"
        ) from error
    if port == 0 and not address.startswith("unix:"):
        raise SettingsError(f"--listen {address} cannot be bound: the port is in use or not yours; give another")
    return f"{address.rpartition(':')[0]}:{port}" if port else address


def _serve_metrics(core: Core, address: str | None) -> int | None:
    if address is None:
        return None
    try:
        return core.metrics.serve(address)
    except (OSError, OverflowError, ValueError) as error:
        raise SettingsError(f"--metrics-listen {address} cannot be bound ({error}): give another HOST:PORT") from error


def _told(core: Core) -> asyncio.Event:
    """Is set by a signal, or when the engine could not carry something out."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    core.failed.add_done_callback(lambda _: told.set())
    return told
