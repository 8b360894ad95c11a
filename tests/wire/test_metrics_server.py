"""A process's HTTP server: metrics, liveness, readiness."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import urllib.error
import urllib.request

import pytest
from atoll_wire.process import metrics_server
from atoll_wire.process.clock import SYSTEM
from prometheus_client import CollectorRegistry, Counter


def ask(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def health():
    return metrics_server.ProcessHealth(SYSTEM)


@pytest.fixture
def port(health):
    registry = CollectorRegistry()
    Counter("atoll_things", "Things", registry=registry).inc(3)
    scraped = metrics_server.serve(registry, "127.0.0.1:0", health.not_alive, health.not_ready)
    yield scraped.port
    scraped.end()


def test_only_metrics_are_served(port):
    assert "atoll_things_total 3.0" in ask(port, "/metrics")[1]
    assert ask(port, "/passwords")[0] == 404


def test_a_process_is_ready_once_nothing_is_missing(port, health):
    assert ask(port, "/livez") == (200, "yes\n")
    assert ask(port, "/readyz") == (503, "starting\n")
    health.waits_for = ""
    assert ask(port, "/readyz") == (200, "yes\n")
    health.waits_for = "stopping"
    assert ask(port, "/readyz") == (503, "stopping\n")


def test_a_blocked_loop_is_not_alive(port, health, monkeypatch):
    monkeypatch.setattr(metrics_server, "STUCK_S", 0.3)
    monkeypatch.setattr(metrics_server, "HEARTBEAT_S", 0.01)
    health.waits_for = ""

    async def turns_then_sticks():
        beating = asyncio.create_task(health.keep())
        for _ in range(50):
            await asyncio.sleep(0.01)
        assert not health.not_ready()
        while not health.not_alive():  # blocks the loop
            pass
        assert [ask(port, path)[0] for path in ("/livez", "/readyz")] == [503, 503]
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating

    asyncio.run(turns_then_sticks())


def test_ipv6_and_invalid_addresses():
    registry, yes = CollectorRegistry(), lambda: ""
    scraped = metrics_server.serve(registry, "[::1]:0", yes, yes)
    assert ask(scraped.port, "/livez", "[::1]") == (200, "yes\n")
    scraped.end()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        for address in (f"127.0.0.1:{taken.getsockname()[1]}", "127.0.0.1:99999", "nowhere"):
            with pytest.raises(metrics_server.MetricsServerError, match="give another HOST:PORT"):
                metrics_server.serve(registry, address, yes, yes)
    with pytest.raises(metrics_server.MetricsServerError, match="--metrics-plaintext"):
        metrics_server.check("0.0.0.0:9100", plaintext=False)
