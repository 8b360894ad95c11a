"""One front as a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
import structlog
from atoll_wire import allocator, frames
from atoll_wire.access import on_loopback
from atoll_wire.certificate import Role, check_role

from atoll_server.acts import Acts
from atoll_server.calls import message_options
from atoll_server.front.metrics import FrontMetrics
from atoll_server.front.passing import pass_on
from atoll_server.front.service import FrontService
from atoll_server.front.settings import FrontSettings
from atoll_server.front.upstream import Upstream
from atoll_server.process import Public, open_files, serve_metrics, told_to_stop

log = structlog.get_logger()

WINDOW_BYTES = 512 << 10  # on its way to a stream: learners are near
GOODBYE_S = 2.0  # for calls that run: whoever follows was told to go elsewhere


async def serve(settings: FrontSettings, announce: Callable[[str], None]) -> None:
    """Runs a front until SIGTERM or SIGINT. announce: told each address once it serves. Raises SettingsError."""
    settings.check()
    check_role(settings.access.tls, Role.FRONT)
    allocator.lean()
    open_files()
    told, metrics = told_to_stop(), FrontMetrics(settings.region)
    upstream, acts = Upstream(settings.core, settings.access), Acts(settings.audit_log)
    service = FrontService(upstream, metrics, settings.cache_bytes, settings.pushes, acts)
    server = grpc.aio.server(
        options=message_options(settings.message_bytes, WINDOW_BYTES), maximum_concurrent_rpcs=settings.calls
    )
    public = Public.of(server, settings.listen, settings.access)
    frames.serve(service, server)
    pass_on(server, upstream, settings.region, acts, near=on_loopback(settings.listen))
    addresses = [public.bind(address) for address in settings.listen]
    scraped = None if settings.metrics_listen is None else serve_metrics(metrics.registry, settings.metrics_listen)
    watching = asyncio.create_task(upstream.watch())
    watching.add_done_callback(lambda _: told.set())
    await public.begin()
    log.info(
        "serving", addresses=addresses, core=settings.core, region=settings.region,
        metrics_port=None if scraped is None else scraped.server_port,
    )  # fmt: skip
    for address in addresses:
        announce(address)
    try:
        await told.wait()
        if watching.done():
            watching.result()
    finally:
        watching.cancel()
        service.stop()
        await public.end(GOODBYE_S)
        await service.fetching.end()
        await upstream.close()
        if scraped is not None:
            scraped.shutdown()
            scraped.server_close()
        acts.close()
    log.info("stopped")
