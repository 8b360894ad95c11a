"""Where and from what a record was made: the commit, the date and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CODE = ("benchmarks", "learner", "proto", "server")
PACKAGES = ("torch", "numpy", "numba", "grpcio")


def provenance() -> dict[str, Any]:
    """Returns what a record says about its origin, as JSON values. Call it when the measurement begins."""
    return {"commit": commit(), "date": datetime.now(UTC).date().isoformat(), "machine": machine()}


def commit() -> str:
    """Returns the commit of the code. The text says if the code has uncommitted changes; "unknown" without git."""
    try:
        of = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *CODE)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{of} with uncommitted changes" if changed else of


def machine() -> dict[str, Any]:
    """Returns the machine's CPUs, memory, load and software. load: mean number of running processes, one minute."""
    return {
        "cpus": os.cpu_count(),
        "cpu": _cpu_model(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def _cpu_model() -> str:
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=ROOT)  # noqa: S607 - any git
    return done.stdout.strip()
