"""Draws a flame graph of outer syncs: python -m benchmarks.data_plane.flame --plot PATH [--learners 2].

py-spy samples the Python threads of the core and of the learners, including C code and compiled kernels, while
`benchmarks.data_plane.sync` repeats its sync. The graph leaves out threads that wait for work and stacks of the start,
but shows waiting for the disk. py-spy cannot see gRPC's threads, which run no Python: their CPU seconds are printed. It
needs the permission to trace one's own processes (ptrace).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import psutil

from benchmarks.data_plane import plots

RATE, SYNCS = 100, 12  # samples per second; syncs
PARTS = {"benchmarks.data_plane.sync_core": "core", "benchmarks.data_plane.sync_learner": "learners"}
NOT_A_SYNC = (
    "_find_and_load",
    "warm_up",
    "measure",
    "__enter__",
    "configure",
    "Transformer",
    "normal_",
    "randn",
    "initial",
)
WAITING = ("_worker (concurrent", "EpollSelector.select", "wait (threading", "main (benchmarks")  # top of a stack
BELOW = {  # the frames below these are the same in every stack
    "Handle._run": "event loop",
    "BaseEventLoop": "event loop",
    "_WorkItem.run": "threads",
    "Learner.step": "training loop",
}
POLL_S = 0.5


def record(learners: int) -> tuple[str, Counter[str]]:
    """Returns collapsed stacks, one per line, and CPU seconds by thread name."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "stacks"
        sync = [sys.executable, "-m", "benchmarks.data_plane.sync", "--learners", str(learners), "--syncs", str(SYNCS)]
        options = ["--subprocesses", "--function", "--rate", str(RATE), "--format", "raw", "--output", str(out)]
        py_spy = str(Path(sys.executable).with_name("py-spy"))
        with subprocess.Popen([py_spy, "record", *options, "--", *sync], stdout=subprocess.DEVNULL) as recording:
            used = _watch(recording)
        if recording.returncode:
            raise SystemExit(f"py-spy ended with status {recording.returncode}: may this user trace its processes?")
        return out.read_text(), used


def _watch(recording: subprocess.Popen[bytes]) -> Counter[str]:
    """Reads the CPU seconds of all threads until the recording ends; returns them by thread name."""
    seconds = dict[tuple[int, int], tuple[str, float]]()
    while recording.poll() is None:
        for process in psutil.Process(recording.pid).children(recursive=True):
            seconds.update(_threads(process))
        time.sleep(POLL_S)
    used = Counter[str]()
    for name, spent in seconds.values():
        used[name] += spent  # type: ignore[assignment]  # a Counter of seconds
    return used


def _threads(process: psutil.Process) -> Iterable[tuple[tuple[int, int], tuple[str, float]]]:
    """The name and CPU seconds of each thread of a process."""
    try:
        for thread in process.threads():
            name = Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text().strip()
            yield (process.pid, thread.id), (name, thread.user_time + thread.system_time)
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return  # it has ended: what was read before counts


def tree(stacks: str) -> plots.Node:
    """The tree of the syncs' stacks; the core and the learners are its lowest level."""
    root = plots.Node()
    for line in stacks.splitlines():
        names, _, count = line.rpartition(" ")
        kind = next((part for module, part in PARTS.items() if module in names), None)
        functions = [name for name in names.split(";") if not name.startswith("process ")]
        start = any(one in name for name in functions for one in NOT_A_SYNC)
        if kind is None or start or not functions or functions[-1].startswith(WAITING):
            continue
        for marker, place in BELOW.items():
            at = max((n for n, name in enumerate(functions) if name.startswith(marker)), default=None)
            if at is not None:
                functions = [place, *functions[at + 1 :]]
                break
        else:
            continue  # a starting process, or gRPC's poller
        node = root
        for name in [kind, *functions]:
            node.samples += int(count)
            node = node.above.setdefault(name, plots.Node())
        node.samples += int(count)
    return root


def main() -> None:
    """Draws the flame graph, and prints CPU seconds by thread name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--plot", type=Path, default=Path("build/sync-flame.svg"))
    arguments = parser.parse_args()
    stacks, used = record(arguments.learners)
    arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    plots.flame(tree(stacks), arguments.plot)
    for name, seconds in used.most_common(12):
        print(f"{seconds:8.1f} s of threads named {name}")


if __name__ == "__main__":
    main()
