"""The dashboard process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import structlog
import uvicorn
from atoll_wire.errors import UserError

from atoll_dashboard.feed.core_client import CoreClient
from atoll_dashboard.feed.history_file import HistoryFile
from atoll_dashboard.feed.run_feed import RunFeed
from atoll_dashboard.settings import DashboardSettings
from atoll_dashboard.web.app import application

log = structlog.get_logger()

STOP_S = 2  # seconds for open streams to end after SIGTERM
MAX_CONNECTIONS = 1000


class DashboardError(UserError):
    """The dashboard cannot serve. The message is one line with the fix."""


async def serve(settings: DashboardSettings, announce: Callable[[str], None]) -> None:
    """Runs a dashboard until SIGTERM or SIGINT. announce: function called with the page's URL.

    Raises DashboardError and HistoryFileError.
    """
    settings.check()
    file = None if settings.history is None else HistoryFile(settings.history)
    core = CoreClient(settings.server, settings.security, settings.own_token())
    feed = RunFeed(core, settings.price_per_gb, file)
    feed.open_file()
    listening = _bind(settings.listen)
    config = uvicorn.Config(
        application(feed, settings.names()),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_S,
        limit_concurrency=MAX_CONNECTIONS,
    )
    host, port = listening.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server, looking = _Server(config), asyncio.create_task(feed.keep())
    looking.add_done_callback(lambda _: server.stop())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    log.info("serving", address=address, server=settings.server)
    announce(address)
    await server.serve(sockets=[listening])
    if looking.done():
        looking.result()  # raises the error that stopped the feed
    looking.cancel()
    await asyncio.wait({looking})
    feed.close_file()
    await feed.core.close()
    log.info("stopped")


class _Server(uvicorn.Server):
    """A server without uvicorn's signal handling, so that the process ends with status 0 after a signal."""

    def stop(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        if not 0 <= int(port) < 1 << 16:
            raise ValueError(f"port {port} is not between 0 and 65535")
        family, kind, protocol, _, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen()
    except (OSError, OverflowError, ValueError) as error:
        raise DashboardError(f"--listen {address} cannot be bound ({error}): give another HOST:PORT") from error
    return listening
