"""Measures hivemind's 8-bit averaging: outer syncs of the same model with the same number of peers as Atoll."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from atoll.demo.processes import Child, children

from benchmarks.data_plane.sync import wait
from benchmarks.peers.environment import install as make
from benchmarks.peers.sync_cost import CostSoFar, PeerSync

MAX_WAIT_S = 60.0


def install() -> Path:
    """Makes hivemind's environment. Returns the path of its Python.

    Excludes NumPy 2.4, with which hivemind's 8-bit codec silently averages nothing.
    """
    return make(Path("build/peers-hivemind"), ("torch==2.13.0",), ("hivemind", "numpy<2.4"))


@contextlib.contextmanager
def ended(peers: list[Child]) -> Iterator[None]:
    """Context manager that kills the peers and all processes in their sessions at the end."""
    try:
        yield
    finally:
        for child in peers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)


def measure(python: Path, peers: int, size: str, syncs: int) -> PeerSync:
    """Runs one sync to warm up, and then `syncs` measured ones."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        place = Path(directory)
        paths = os.pathsep.join(str(Path(folder).resolve()) for folder in (".", "learner", "proto"))
        words = ["env", f"PYTHONPATH={paths}", "HIVEMIND_LOGLEVEL=ERROR", str(python)]
        words += ["-m", "benchmarks.peers.hivemind_worker"]
        started = [
            group.start(f"peer {number}", [*words, str(number), str(peers), size, str(syncs), directory])
            for number in range(peers)
        ]
        walls = list[float]()
        cpus = list[float]()
        sizes = list[int]()
        with ended(started):
            for sync in range(syncs + 1):
                wait(started, [place / f"{number}.ready.{sync}" for number in range(peers)])
                before = CostSoFar.of(os.getpid())
                (place / f"go.{sync}").touch()
                done = [place / f"{number}.{sync}" for number in range(peers)]
                wait(started, done)
                after = CostSoFar.of(os.getpid())
                walls.append(max(float(path.read_text()) for path in done) - before.at_s)
                cpus.append(after.cpu_s - before.cpu_s)
                sizes.append(after.wire_bytes - before.wire_bytes)
            (place / "leave").touch()
            for child in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(MAX_WAIT_S)
    return PeerSync(walls[1:], cpus[1:], sizes[1:])
