"""Measures Flower's FedAvg over gRPC, with the same numbers of parameters and clients as Atoll.

`start_server` and `start_client` are deprecated, but avoid the polling and the processes of Flower's SuperLink.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from atoll.demo.processes import Child, children, free_port

from benchmarks.peers.environment import install as make
from benchmarks.peers.sync_cost import CostSoFar, PeerSync, between

MAX_WAIT_S = 900.0


def install() -> Path:
    """Makes Flower's environment. Returns the path of its Python."""
    return make(Path("build/peers-flwr"), ("flwr", "numpy", "psutil"))


def await_listening(server: Child, port: int) -> None:
    """Waits until the server listens, because a client that starts earlier fails. Raises SystemExit."""
    deadline = time.monotonic() + MAX_WAIT_S
    while server.process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            return
    raise SystemExit(f"Flower's server does not listen: {server.tail()}")


def measure(python: Path, clients: int, parameters: int, rounds: int) -> PeerSync:
    """Runs one warm-up round, and then `rounds` measured rounds. The clients' training time is subtracted."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        result, address = Path(directory) / "result.json", f"127.0.0.1:{(port := free_port())}"
        paths = f"PYTHONPATH={Path.cwd()}"
        words = ["env", paths, "FLWR_TELEMETRY_ENABLED=0", f"FLWR_HOME={directory}"]
        words += [str(python), "-m", "benchmarks.peers.flower_worker"]
        counts = [str(clients), str(parameters), str(rounds + 1)]
        server = group.start("server", [*words, "server", address, *counts, str(result)])
        await_listening(server, port)
        for number in range(clients):
            group.start(f"client {number}", [*words, "client", address, str(number + 1)])
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(MAX_WAIT_S)
        if server.process.poll() != 0:
            raise SystemExit(f"Flower's server ended: {server.tail()}")
        told = json.loads(result.read_text())
    walls, cpus, sizes = between([CostSoFar(**one) for one in told["moments"]])
    training = told["training"][1:]
    walls = [wall - spent for wall, (spent, _) in zip(walls[1:], training, strict=True)]
    cpus = [cpu - spent for cpu, (_, spent) in zip(cpus[1:], training, strict=True)]
    return PeerSync(walls, cpus, sizes[1:], told["peak_bytes"])
