"""torchft's DiLoCo on gloo beside Atoll: one outer sync of the same model with as many workers."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from atoll.demo.processes import children

WORKER = Path(__file__).with_name("torchft_worker.py")
ENVIRONMENT = Path("build/peers")
WANTED = ("torchft-nightly", "numpy")
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class PeerSync:
    """Of each sync: seconds until the last worker had it, and processor seconds of all workers."""

    wall_s: list[float]
    cpu_s: list[float]

    @property
    def median_wall_s(self) -> float:
        """Of the syncs."""
        return statistics.median(self.wall_s)

    @property
    def median_cpu_s(self) -> float:
        """Of the syncs."""
        return statistics.median(self.cpu_s)


def install() -> Path:
    """An environment of its own for the peer, made once; returns its Python. Raises CalledProcessError."""
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, *WANTED], check=True)
        (ENVIRONMENT / "ready").touch()
    return python


def measure(python: Path, replicas: int, size: str, syncs: int) -> PeerSync:
    """python: of an environment that has torchft."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        place = Path(directory)
        results = [place / f"{number}.json" for number in range(replicas)]
        path = f"PYTHONPATH={os.pathsep.join(str(Path(folder).resolve()) for folder in ('learner', 'proto'))}"
        words = ["env", path, "RUST_LOG=warn", str(python), str(WORKER)]
        common = [str(replicas), size, str(syncs), str(place / "lighthouse")]
        started = [
            group.start(f"replica {number}", [*words, str(number), *common, str(result)])
            for number, result in enumerate(results)
        ]
        for child in started:
            if child.process.wait(PATIENCE_S) != 0:
                raise SystemExit(f"{child.name} ended: {child.tail()}")
        told = [json.loads(result.read_text()) for result in results]
    walls = [min(each) for each in zip(*(one["wall_s"] for one in told), strict=True)]  # who came last did not wait
    return PeerSync(walls, [sum(each) for each in zip(*(one["cpu_s"] for one in told), strict=True)])
