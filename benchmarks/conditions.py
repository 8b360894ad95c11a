"""The conditions of a measurement, which a record names: commit, machine, versions and load."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "numpy", "numba", "grpcio", "protobuf", "zstandard")


def conditions() -> dict[str, Any]:
    """Returns what a figure depends on. load: of all processes, the mean over the last minute."""
    return {
        "commit": _git("rev-parse", "--short=8", "HEAD") + ("+changes" if _git("status", "--porcelain") else ""),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def write_record(path: Path, figures: Mapping[str, Any], under: Mapping[str, Any]) -> None:
    """Writes figures as JSON. under: `conditions` from before the measurement, because the measurement is a load."""
    path.write_text(json.dumps({**figures, "conditions": under}, indent=2) + "\n")


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git(*words: str) -> str:
    """Returns git's answer, or "unknown" outside a checkout."""
    git = ["git", *words]
    done = subprocess.run(git, capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
