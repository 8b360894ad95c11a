"""A process's HTTP server for metrics, liveness and readiness.

`/metrics` is for Prometheus. `/livez` and `/readyz` are for Kubernetes or Docker. They answer 200, or 503 with the
reason on one line.
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

from atoll_wire.errors import UserError
from atoll_wire.process.clock import Clock
from atoll_wire.security.transport import on_loopback

HEARTBEAT_S = 1.0
STUCK_S = 30.0  # a process is not alive if its event loop has not run for this long
CALLER_S = 10.0  # timeout of reading a request and of sending the answer

Reason = Callable[[], str]  # returns why the process fails a check, or "" if it passes


class MetricsServerError(UserError):
    """Metrics cannot be served at an address. The message is one line with the fix."""


@dataclass(slots=True)
class ProcessHealth:
    """Liveness and readiness of a process with an event loop. waits_for: why the process is not ready, or ""."""

    clock: Clock
    waits_for: str = "starting"
    turned_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.turned_at = self.clock.monotonic()

    async def keep(self) -> None:
        """Periodically records that the event loop runs. Run this coroutine as a task."""
        while True:
            self.turned_at = self.clock.monotonic()
            await asyncio.sleep(HEARTBEAT_S)

    def not_alive(self) -> str:
        """Returns why this process should be restarted, or "" if it is alive."""
        silent_s = self.clock.monotonic() - self.turned_at
        return "" if silent_s < STUCK_S else f"the event loop has not run for {silent_s:.0f} s"

    def not_ready(self) -> str:
        """Returns why the process is not ready, or ""."""
        return self.not_alive() or self.waits_for


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A running HTTP server. end: a function that stops the server."""

    port: int
    end: Callable[[], None]


def check(address: str | None, *, plaintext: bool) -> None:
    """Raises MetricsServerError for an address beyond loopback, unless `plaintext`, because the server has no TLS."""
    if address is not None and not on_loopback([address]) and not plaintext:
        raise MetricsServerError(
            f"--metrics-listen {address} is not loopback, and metrics have no TLS: give a loopback address, or add "
            "--metrics-plaintext (in Python: metrics_plaintext=True)"
        )


def serve(registry: CollectorRegistry, address: str, not_alive: Reason, not_ready: Reason) -> MetricsServer:
    """Starts a server at HOST:PORT. Its own thread answers requests, even if the event loop is stuck.

    Raises MetricsServerError if the address cannot be bound.
    """
    metrics, reasons = make_wsgi_app(registry), {"/livez": not_alive, "/readyz": not_ready}

    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:  # noqa: ANN401 - WSGI's
        path = environ["PATH_INFO"]
        if path in {"/", "/metrics"}:
            return metrics(environ, start)  # type: ignore[no-any-return]
        if path not in reasons:
            start("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"not found: use /metrics, /livez or /readyz\n"]
        why = reasons[path]()
        start("503 Service Unavailable" if why else "200 OK", [("Content-Type", "text/plain; charset=utf-8")])
        return [(why or "yes").encode() + b"\n"]

    host, _, port = address.rpartition(":")
    try:
        server = make_server(host.strip("[]"), int(port), app, _Server6 if ":" in host else _Server, _Handler)
    except (OSError, OverflowError, ValueError) as error:
        raise MetricsServerError(
            f"--metrics-listen {address} cannot be bound ({error}): give another HOST:PORT"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def end() -> None:
        server.shutdown()
        server.server_close()

    return MetricsServer(server.server_port, end)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Binds the socket without HTTPServer's DNS query for the name of this host."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = CALLER_S

    def log_message(self, *_: object) -> None:
        """Logs nothing, because requests arrive every few seconds."""
