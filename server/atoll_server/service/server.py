"""Runs a core's process: its gRPC server, health service, reflection, metrics, signals and clean shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire import shards_pb2_grpc
from atoll_wire.errors import SettingsError, UsageError, UserError
from atoll_wire.messages import frame_messages
from atoll_wire.process import allocator, metrics_server
from atoll_wire.process.clock import Clock
from atoll_wire.security.certificate import Role, check_role

from atoll_server.access.audit_log import AuditLog
from atoll_server.access.identity import Caller
from atoll_server.access.refusals import Refused
from atoll_server.access.revocations import RevokedCertificates
from atoll_server.access.tokens import OperatorTokens
from atoll_server.checkpoints.rollback import follow
from atoll_server.checkpoints.verification import RunVerifier
from atoll_server.operators.gauges import keep_gauges, keep_shard_gauges
from atoll_server.operators.run_checkpoints import RunCheckpoints
from atoll_server.operators.shard_calls import ShardCalls, dial_shards
from atoll_server.processes.attachment import Attachment, dial
from atoll_server.processes.core import Core
from atoll_server.processes.core_process import STANDBY_S, CoreProcess
from atoll_server.processes.shard_core import GenerationChangedError, ShardCore
from atoll_server.rpc.calls import message_options
from atoll_server.rpc.limiter import CallLimiter
from atoll_server.rpc.process import GRACE_S, RpcServer, prepare, stop_signal
from atoll_server.run.known_run import KnownRun
from atoll_server.service.doctor_service import DoctorService
from atoll_server.service.front_service import FrontService
from atoll_server.service.learner_service import OuterService
from atoll_server.service.operator_service import OperatorService
from atoll_server.service.reader_service import ReaderService
from atoll_server.service.registry_service import RegistryService
from atoll_server.service.shard_operator_service import ShardOperatorService
from atoll_server.settings import CoreSettings
from atoll_server.telemetry import entries
from atoll_server.telemetry.audited import audited

log = structlog.get_logger()


class CoreFailed(UserError):  # noqa: N818 - says what happened
    """A running core failed and cannot continue. The message is one line with the fix."""


T = TypeVar("T")
Service: TypeAlias = OuterService | ReaderService | RegistryService | FrontService

PORT_S = 5.0
AUDIT_LOG = "audit.jsonl"


async def serve(settings: CoreSettings, given: dict[str, Any], announce: Callable[[str], None]) -> None:
    """Runs a core until SIGTERM or SIGINT. given: run settings from the command line.

    announce: called with each address that the core serves. Raises SettingsError if the core cannot start with these
    settings. Raises CoreFailed or another error if a running core fails.
    """
    settings.check()
    check_role(settings.security.tls, Role.CORE)
    allocator.return_freed_memory()
    prepare()
    signalled = stop_signal()
    while not signalled.is_set() and (after := await _serve(settings, given, announce, signalled)) is not None:
        changed = after.changed
        log.warning(
            "the run was restored: rolling this shard back", generation=changed.generation, snapshot=changed.snapshot
        )
        try:
            await asyncio.to_thread(follow, settings.directory, changed.generation, changed.snapshot)
        except (OSError, sqlite3.Error) as error:
            raise CoreFailed(
                f"this shard cannot roll back to the checkpoint ({error}): "
                "check its disk's free space and permissions, then restart it"
            ) from error
        settings = settings.model_copy(update={"listen": after.addresses})  # learners know these addresses
        announce = _announced


@dataclass(frozen=True, slots=True)
class _Restart:
    """Signals that a shard must start again at these addresses, since the run was restored to a checkpoint."""

    changed: GenerationChangedError
    addresses: tuple[str, ...]


def _announced(_address: str) -> None:
    """Does nothing, because the first start has already announced the address."""


async def _serve(
    settings: CoreSettings, given: dict[str, Any], announce: Callable[[str], None], signalled: asyncio.Event
) -> _Restart | None:
    """Runs a core until `signalled` is set or its shard must start again."""
    core = _core(settings, given)
    told = asyncio.Event()
    passing_on = asyncio.create_task(_pass_on(signalled, told))
    if settings.standby:
        log.info("standby: this core takes over when the other core ends", directory=str(settings.directory))
    if not await _unless(told, core.take_directory()):
        return None
    core.failed.add_done_callback(lambda _: told.set())  # a failed core stops as if it had received a signal
    audit_log = _audit_log(core)
    revoked = _revoked(core)
    gate = _gate(core, revoked)
    options = message_options(settings.quotas.window_bytes, settings.limits.message_bytes)
    public = RpcServer.of(settings.listen, settings.security, options, settings.limits.calls, gate, core.metrics.served)
    services, checkpoints = _services(core, _tokens(settings.operator_tokens), public)
    addresses = [await _patiently(partial(public.bind, address), settings, core.clock) for address in settings.listen]
    health = metrics_server.ProcessHealth(core.clock)
    where = settings.metrics_listen
    serve_http = partial(metrics_server.serve, core.metrics.registry, where or "", health.not_alive, health.not_ready)
    scraped = await _patiently(serve_http, settings, core.clock) if where else None
    beating = asyncio.create_task(health.keep())
    try:
        if await _unless(told, core.start()):
            background = [asyncio.create_task(_gauges(core)), asyncio.create_task(revoked.keep_reading())]
            if isinstance(core, ShardCore):
                background.append(asyncio.create_task(_attached(core, addresses[0], told)))
            if checkpoints is not None:
                background.append(asyncio.create_task(checkpoints.keep_taking()))
            for task in background:
                task.add_done_callback(core.watched)
            await public.begin()
            health.waits_for = ""
            log.info("serving", addresses=addresses, metrics_port=scraped and scraped.port, **_names(core.run))
            audit = RunVerifier(settings.directory, core.disk, core.clock, core.damaged)
            audit.begin(core.run.initial_sha256)
            with contextlib.suppress(OSError):  # stdout may be closed, or its disk may be full
                for address in addresses:
                    announce(address)
            await _serve_until(told, core, public, services, background, health)
            audit.end()
        elif core.failed.done():
            core.failed.result()
    except (OSError, sqlite3.Error) as error:
        raise CoreFailed(
            f"the disk failed ({error}): no acknowledged work is lost; fix the disk, then restart the core"
        ) from error
    finally:
        passing_on.cancel()
        beating.cancel()
        if scraped:
            scraped.end()
        audit_log.close()
    log.info("stopped", run=core.run.run_id)
    changed = core.changed if isinstance(core, ShardCore) else None
    return None if changed is None else _Restart(changed, tuple(addresses))


async def _pass_on(signalled: asyncio.Event, told: asyncio.Event) -> None:
    await signalled.wait()
    told.set()


def _core(settings: CoreSettings, given: dict[str, Any]) -> Core | ShardCore:
    """Returns the core that these settings describe. Raises UsageError if run settings are given to a shard."""
    if settings.registrar is None:
        return Core(settings, given)
    given = {"preset": settings.preset} | given
    if named := [name.replace("_", "-") for name, value in given.items() if value is not None]:
        raise UsageError(f"--{named[0]} belongs to the run: give it to the registrar, not to shard {settings.shard}")
    return ShardCore(settings)


def _services(
    core: Core | ShardCore, tokens: OperatorTokens | None, public: RpcServer
) -> tuple[list[Service], RunCheckpoints | None]:
    """Adds the core's services to its server.

    Returns the services whose calls must be ended when the core stops and, at the registrar, the run's checkpoints.
    """
    outer, reader = OuterService(core), ReaderService(core, tokens)
    frame_messages.serve(outer, public.server)
    frame_messages.serve(reader, public.server, frame_messages.READER)
    rpc.add_DoctorServicer_to_server(DoctorService(core), public.server)
    if isinstance(core, ShardCore):
        rpc.add_OperatorServicer_to_server(ShardOperatorService(core), public.server)
        return [outer, reader], None
    registry, fronts = RegistryService(core), FrontService(core)
    rpc.add_FrontsServicer_to_server(fronts, public.server)
    shards_pb2_grpc.add_RegistryServicer_to_server(registry, public.server)
    calls = ShardCalls(core.run.attached, dial_shards(core.settings.security))
    checkpoints = RunCheckpoints(core, calls)
    rpc.add_OperatorServicer_to_server(OperatorService(core, calls, checkpoints, tokens), public.server)
    return [outer, reader, registry, fronts], checkpoints


def _audit_log(core: CoreProcess) -> AuditLog:
    audit_log = AuditLog(core.settings.directory / AUDIT_LOG, core.clock)
    audit_log.start()
    core.journal.subscribe(partial(audited, audit_log), only_shows=True)
    return audit_log


def _revoked(core: CoreProcess) -> RevokedCertificates:
    revoked = RevokedCertificates(core.settings.revoked, core.metrics.limited.labels("revoked").inc)
    revoked.load()
    core.metrics.revoked.set_function(lambda: len(revoked))
    return revoked


def _gate(core: CoreProcess, revoked: RevokedCertificates) -> CallLimiter:
    vouched, limited = partial(_vouched, core), partial(_limited, core)
    return CallLimiter(core.settings.quotas, vouched, core.metrics.limited, limited, core.clock, revoked)


def _tokens(path: Path | None) -> OperatorTokens | None:
    if path is None:
        return None
    tokens = OperatorTokens(path)
    tokens.load()
    return tokens


def _names(run: KnownRun) -> dict[str, Any]:
    return {"run": run.run_id, "epoch": run.epoch}


async def _attached(core: ShardCore, address: str, told: asyncio.Event) -> None:
    """Keeps a shard attached. Stops the process cleanly if the run was restored, so that the shard can roll back."""
    settings = core.settings
    assert settings.registrar is not None, "other processes are registrars"
    connect = dial(settings.registrar, settings.security)
    try:
        await Attachment(core, settings.registrar, settings.advertise or address, connect).keep()
    except GenerationChangedError as changed:
        core.changed = changed
        told.set()


def _gauges(core: Core | ShardCore) -> Coroutine[Any, Any, None]:
    if isinstance(core, ShardCore):
        return keep_shard_gauges(core.run, core.metrics, core.settings.directory, core.facts)
    return keep_gauges(core.run, core.settings, core.metrics, core.watch, core.events, core.facts)


def _limited(core: CoreProcess, method: str, peer: str, detail: str) -> None:
    core.run.record(entries.CallLimited(method, peer, detail))


def _vouched(core: CoreProcess, _: Caller, session: pb.Session) -> str | None:
    """Returns the name of the learner with this session, or None if this core does not know the session."""
    try:
        return core.run.session(session).entry.name
    except Refused:
        return None


async def _unless(told: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Runs `work`. Cancels it if the process must stop first. Returns whether `work` finished."""
    working, asked = asyncio.create_task(work), asyncio.create_task(told.wait())
    await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not working.done():
        working.cancel()
        return False
    working.result()
    return True


async def _serve_until(
    told: asyncio.Event,
    core: CoreProcess,
    public: RpcServer,
    services: list[Service],
    background: list[asyncio.Task[None]],
    health: metrics_server.ProcessHealth,
) -> None:
    try:
        await told.wait()
        if core.failed.done():
            core.failed.result()
    finally:
        health.waits_for = "stopping"
        for task in background:
            task.cancel()
        if (shard := core.run.shard) is not None:
            shard.follower_log.close()
        for service in services:
            service.stop()
        await public.end(0 if core.failed.done() else GRACE_S)
    await core.stop()


async def _patiently(bind: Callable[[], T], settings: CoreSettings, clock: Clock) -> T:
    """Binds a port. A standby retries for PORT_S seconds: a process that ends may release its lock before its ports."""
    deadline = clock.monotonic() + (PORT_S if settings.standby else 0.0)
    while True:
        try:
            return bind()
        except (SettingsError, metrics_server.MetricsServerError):
            if clock.monotonic() >= deadline:
                raise
            await asyncio.sleep(STANDBY_S)
