"""Runs the process of a front."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from functools import partial

import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.messages import frame_messages
from atoll_wire.process import allocator, metrics_server
from atoll_wire.process.certificate_expiry import CertificateExpiry, expiry_times
from atoll_wire.process.clock import SYSTEM
from atoll_wire.security.certificate import Role, check_role
from atoll_wire.security.transport import on_loopback

from atoll_server.access.audit_log import AuditLog
from atoll_server.access.identity import Caller
from atoll_server.access.revocations import RevokedCertificates
from atoll_server.front.announcing import Announcement
from atoll_server.front.answering import Answering
from atoll_server.front.metrics import FrontMetrics
from atoll_server.front.pass_through import pass_on
from atoll_server.front.reader_service import FrontReaderService
from atoll_server.front.region_reads import RegionReads
from atoll_server.front.service import FrontService
from atoll_server.front.settings import FrontSettings
from atoll_server.rpc.calls import message_options
from atoll_server.rpc.limiter import CallLimiter
from atoll_server.rpc.process import RpcServer, prepare, stop_signal
from atoll_server.rpc.reader_slots import ReaderSlots
from atoll_server.upstream.routes import Routes

log = structlog.get_logger()

GOODBYE_S = 2.0  # seconds in which open calls may end after the front has told learners to reconnect


async def serve(settings: FrontSettings, announce: Callable[[str], None]) -> None:
    """Runs a front until SIGTERM or SIGINT. announce: called with each served address. Raises SettingsError."""
    settings.check()
    check_role(settings.security.tls, Role.FRONT)
    allocator.return_freed_memory()
    prepare()
    told, metrics = stop_signal(), FrontMetrics(settings.region)
    routes, audit_log = Routes(settings.core, settings.security, SYSTEM), _audit_log(settings)
    answering = Answering(routes, metrics, audit_log)
    announcement = Announcement(routes, metrics, settings.region, answering)
    service = FrontService(routes, metrics, settings.cache, answering)
    reads = RegionReads(routes, service.fetching)
    slots = _slots(settings, metrics)
    readers = FrontReaderService(routes, service.fetching, reads, slots, metrics, answering)
    revoked = _revoked(settings, metrics)
    gate = CallLimiter(settings.quotas, _said, metrics.limited, partial(_limited, audit_log), SYSTEM, revoked)
    public = _public(settings, gate, metrics)
    frame_messages.serve(service, public.server)
    frame_messages.serve(readers, public.server, frame_messages.READER)
    pass_on(public.server, routes.core, settings.region, audit_log, near=on_loopback(settings.listen))
    addresses = [public.bind(address) for address in settings.listen]
    health = metrics_server.ProcessHealth(SYSTEM)
    scraped = _scraped(settings, metrics, health)
    beating = asyncio.create_task(health.keep())
    watching = asyncio.gather(routes.watch(), revoked.keep_reading())
    watching.add_done_callback(partial(_tell, told))
    await public.begin()
    health.waits_for = ""
    log.info(
        "serving",
        addresses=addresses,
        core=settings.core,
        region=settings.region,
        metrics_port=scraped.port if scraped else None,
    )
    for address in addresses:
        announce(address)
    announcement.begin()
    try:
        await told.wait()
        if watching.done():
            watching.result()
    finally:
        health.waits_for = "stopping"
        watching.cancel()
        service.stop()
        readers.stop()
        await public.end(GOODBYE_S)
        await announcement.end()
        await reads.end()
        await service.fetching.end()
        await routes.close()
        beating.cancel()
        if scraped:
            scraped.end()
        audit_log.close()
    log.info("stopped")


def _tell(told: asyncio.Event, watching: asyncio.Future[object]) -> None:
    """Ends the process when a watching task ends. Retrieves the task's error, which asyncio would otherwise log."""
    told.set()
    if not watching.cancelled():
        watching.exception()


def _audit_log(settings: FrontSettings) -> AuditLog:
    audit_log = AuditLog(settings.audit_log, SYSTEM)
    audit_log.start()
    return audit_log


def _revoked(settings: FrontSettings, metrics: FrontMetrics) -> RevokedCertificates:
    revoked = RevokedCertificates(settings.revoked, metrics.limited.labels("revoked").inc)
    revoked.load()
    metrics.revoked.set_function(lambda: len(revoked))
    return revoked


def _slots(settings: FrontSettings, metrics: FrontMetrics) -> ReaderSlots:
    limits = settings.limits
    return ReaderSlots(limits.readers, limits.reads, settings.quotas.max_wait_s, metrics.limited)


def _public(settings: FrontSettings, gate: CallLimiter, metrics: FrontMetrics) -> RpcServer:
    limits = settings.limits
    options = message_options(settings.quotas.window_bytes, limits.message_bytes)
    return RpcServer.of(settings.listen, settings.security, options, limits.calls, gate, metrics.served)


def _scraped(
    settings: FrontSettings, metrics: FrontMetrics, health: metrics_server.ProcessHealth
) -> metrics_server.MetricsServer | None:
    """Serves the metrics, unless the settings name no address for them."""
    metrics.registry.register(CertificateExpiry(partial(expiry_times, settings.security)))
    where = settings.metrics_listen
    return metrics_server.serve(metrics.registry, where, health.not_alive, health.not_ready) if where else None


def _limited(audit_log: AuditLog, method: str, peer: str, detail: str) -> None:
    audit_log.refused("limited", peer, method=method, detail=detail)


def _said(who: Caller, session: pb.Session) -> Hashable:
    """Returns the owner of a session's quotas: the learner's name, with the token if the caller has no certificate.

    Only the core can check a token. A front therefore treats callers with different tokens as different owners.
    """
    return session.learner if who.role is not None else (session.learner, session.token)
