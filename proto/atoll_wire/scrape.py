"""What a process tells over plain HTTP: its metrics, whether it lives, and whether it can be used.

`/metrics` is for Prometheus; `/livez` and `/readyz` are for whoever restarts processes or sends them work (Kubernetes,
Docker): 200, or 503 with the reason in a line.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from atoll_wire.access import on_loopback
from atoll_wire.clock import Clock
from atoll_wire.errors import UserError

BEAT_S = 1.0
STUCK_S = 30.0  # without a turn of its loop a process does not live
CALLER_S = 10.0  # for whoever asks, to ask and to take the answer

Reason = Callable[[], str]  # why not; "" is yes


class ScrapeError(UserError):
    """An address that metrics cannot be served at; one line, with the remedy."""


@dataclass(slots=True)
class Pulse:
    """Of a process with an event loop. waits_for: what it does before it can be used, or instead; "": it can be."""

    clock: Clock
    waits_for: str = "starting"
    turned_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.turned_at = self.clock.monotonic()

    async def keep(self) -> None:
        """For as long as the loop turns."""
        while True:
            self.turned_at = self.clock.monotonic()
            await asyncio.sleep(BEAT_S)

    def not_alive(self) -> str:
        """Why this process should be started anew."""
        silent_s = self.clock.monotonic() - self.turned_at
        return "" if silent_s < STUCK_S else f"the event loop has not turned for {silent_s:.0f} s"

    def not_ready(self) -> str:
        """Why it cannot be used now."""
        return self.not_alive() or self.waits_for


@dataclass(frozen=True, slots=True)
class Scraped:
    """Where it is told, until it is ended."""

    port: int
    end: Callable[[], None]


def check(address: str | None, *, plaintext: bool) -> None:
    """Raises ScrapeError for an address beyond loopback: this is plain HTTP."""
    if address is not None and not on_loopback([address]) and not plaintext:
        raise ScrapeError(f"--metrics-listen {address} is not loopback: say --metrics-plaintext if that may be")


def serve(registry: CollectorRegistry, address: str, not_alive: Reason, not_ready: Reason) -> Scraped:
    """Tells it from a thread of its own: a loop that is stuck is seen. Raises ScrapeError."""
    metrics, reasons = make_wsgi_app(registry), {"/livez": not_alive, "/readyz": not_ready}

    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:  # noqa: ANN401 - WSGI's
        path = environ["PATH_INFO"]
        if path in {"/", "/metrics"}:
            return metrics(environ, start)  # type: ignore[no-any-return]
        if path not in reasons:
            start("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"/metrics, /livez and /readyz are here\n"]
        why = reasons[path]()
        start("503 Service Unavailable" if why else "200 OK", [("Content-Type", "text/plain; charset=utf-8")])
        return [(why or "yes").encode() + b"\n"]

    host, _, port = address.rpartition(":")
    try:
        server = make_server(host.strip("[]"), int(port), app, _Server6 if ":" in host else _Server, _Handler)
    except (OSError, OverflowError, ValueError) as error:
        raise ScrapeError(f"--metrics-listen {address} cannot be bound ({error}): give another HOST:PORT") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def end() -> None:
        server.shutdown()
        server.server_close()

    return Scraped(server.server_port, end)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without asking name servers for this host's name, as HTTPServer does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = CALLER_S

    def log_message(self, *_: object) -> None:
        """Nothing: it is asked every few seconds."""
