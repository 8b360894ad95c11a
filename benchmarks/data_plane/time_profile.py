"""Shows where the time of outer syncs goes: python -m benchmarks.data_plane.time_profile [--learners 2] [--json PATH].

py-spy samples the Python threads of the core and of the learners, including C code and compiled kernels, while
`benchmarks.data_plane.sync` repeats its sync. The table has the share of samples by process, thread and kind of work.
The table omits threads that wait for work and stacks of process starts, but counts waiting for the disk. py-spy cannot
see gRPC's threads, which run no Python, so their CPU seconds are printed below the table. py-spy needs permission to
trace the user's processes (ptrace).
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
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import conditions, write_record

RATE, SYNCS = 100, 12  # samples per second; number of syncs
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
WAITING = ("_worker (concurrent", "EpollSelector.select", "wait (threading", "main (benchmarks")  # waiting stacks
THREADS = {  # by a function at the bottom of a stack
    "Handle._run": "event loop",
    "BaseEventLoop": "event loop",
    "_WorkItem.run": "worker threads",
    "Learner.step": "training loop",
}
KINDS = {  # by the file of a function; the innermost function with a kind decides
    "kernels, compression, checksums": ("/codec/", "/merging/"),
    "disk": ("/storage/", "sqlite3", "pathlib"),
    "asyncio, gRPC": ("asyncio/", "grpc/", "selectors.py"),
}
OTHER = "other Python"
Place = tuple[str, str, str]  # process, thread, kind of work
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
            raise SystemExit(
                f"py-spy ended with status {recording.returncode}: check that this user may trace its own processes"
            )
        return out.read_text(), used


def _watch(recording: subprocess.Popen[bytes]) -> Counter[str]:
    """Reads the CPU seconds of all threads until the recording ends. Returns them by thread name."""
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
    """Yields the name and CPU seconds of each thread of a process."""
    try:
        for thread in process.threads():
            name = Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text().strip()
            yield (process.pid, thread.id), (name, thread.user_time + thread.system_time)
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return  # the process has ended; the values read before count


def places(stacks: str) -> Counter[Place]:
    """Returns the number of samples of syncs, by process, thread and kind of work. stacks: as py-spy writes them."""
    found = Counter[Place]()
    for line in stacks.splitlines():
        names, _, count = line.rpartition(" ")
        process = next((part for module, part in PARTS.items() if module in names), None)
        functions = [name for name in names.split(";") if not name.startswith("process ")]
        starting = any(one in name for name in functions for one in NOT_A_SYNC)
        if process is None or starting or not functions or functions[-1].startswith(WAITING):
            continue
        thread = next(
            (thread for start, thread in THREADS.items() if any(n.startswith(start) for n in functions)), None
        )
        if thread is not None:  # otherwise a starting process, or gRPC's poller
            found[process, thread, _kind(functions)] += int(count)
    return found


def _kind(functions: list[str]) -> str:
    for function in reversed(functions):
        for kind, files in KINDS.items():
            if any(file in function for file in files):
                return kind
    return OTHER


def main() -> None:
    """Prints the table, and CPU seconds by thread name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--json", type=Path, dest="json_path", help="write the shares to this file")
    arguments, under = parser.parse_args(), conditions()
    stacks, used = record(arguments.learners)
    found = places(stacks)
    whole = found.total()
    table = Table("process", "thread", "work", "share", title=f"{SYNCS} syncs, {whole} samples")
    rows = [(*place, samples / whole) for place, samples in sorted(found.items(), key=lambda each: -each[1])]
    for *place, share in rows:
        table.add_row(*place, f"{share:.1%}")
    Console().print(table)
    for name, seconds in used.most_common(12):
        print(f"{seconds:8.1f} s in threads named {name}")
    if arguments.json_path is not None:
        write_record(arguments.json_path, {"samples": whole, "rows": rows}, under)


if __name__ == "__main__":
    main()
