"""Measures torchft's DiLoCo on gloo: outer syncs of the same model with the same number of workers as Atoll."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from atoll.demo.processes import children

from benchmarks.data_plane.loopback import Placed, on_loopback
from benchmarks.peers.environment import install as make
from benchmarks.peers.sync_cost import PeerSync

WORKER = Path(__file__).with_name("torchft_worker.py")
MAX_WAIT_S = 300.0


def install() -> Path:
    """Makes torchft's environment. Returns the path of its Python."""
    return make(Path("build/peers"), ("torch==2.13.0",), ("torchft-nightly", "numpy"))


def measure(python: Path, replicas: int, size: str, syncs: int, placed: Placed = on_loopback) -> PeerSync:
    """Runs `syncs` measured syncs. python: the path of the environment's Python. placed: where the replicas run."""
    with (
        tempfile.TemporaryDirectory() as directory,
        children(Path(directory)) as group,
        placed(group, Path(directory)) as placement,
    ):
        place = Path(directory)
        results = [place / f"{number}.json" for number in range(replicas)]
        path = f"PYTHONPATH={os.pathsep.join(str(Path(folder).resolve()) for folder in ('learner', 'proto'))}"
        started = []
        for number, result in enumerate(results):
            device = f"GLOO_SOCKET_IFNAME={placement.worker_device(number)}"
            words = ["env", path, device, "RUST_LOG=warn", str(python.absolute()), str(WORKER)]
            words += [str(number), placement.worker_host(number), str(replicas), size, str(syncs)]
            words += [str(place / "lighthouse"), str(result)]
            started.append(group.start(f"replica {number}", placement.at_worker(number, words)))
        for child in started:
            if child.process.wait(MAX_WAIT_S) != 0:
                raise SystemExit(f"{child.name} ended: {child.tail()}")
        told = [json.loads(result.read_text()) for result in results]
    walls = [min(each) for each in zip(*(one["wall_s"] for one in told), strict=True)]  # the last replica did not wait
    return PeerSync(walls, [sum(each) for each in zip(*(one["cpu_s"] for one in told), strict=True)])
