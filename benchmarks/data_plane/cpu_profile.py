"""Shows where the CPU time of outer syncs goes.

python -m benchmarks.data_plane.cpu_profile [--learners 2] [--json PATH]

Linux's perf samples all processes while `benchmarks.data_plane.sync` repeats its sync. The table has the CPU seconds
per sync by process and kind of work, including compiled kernels, gRPC's own threads and system calls. Only samples
within syncs count. Needs perf (Debian: linux-perf), and root or a low kernel.perf_event_paranoid.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import conditions, write_record

RATE = 997  # samples per second and CPU
SYNCS = 12
POLL_S = 0.5  # seconds between two looks at processes
PROCESSES = {"benchmarks.data_plane.sync_core": "core", "benchmarks.data_plane.sync_learner": "learners"}
KINDS = {  # by the file that contains the code
    r"perf-\d+\.map|\[anon.*|//anon": "compiled kernels",
    r"libpython.*|python3?[.\d]*|_asyncio\..*|_struct\..*|_json\..*": "Python interpreter",
    r"cygrpc\..*": "gRPC",
    r"_message\..*": "protobuf",
    r"\[.*": "Linux",
    r"_crc32c\..*": "checksums",
    r"backend_c\..*": "zstd",
    r"libc\..*|ld-linux.*": "C library: copies, allocations",
    r"libtorch.*|libc10.*|_multiarray_umath\..*": "torch, NumPy",
}
OTHER = "other"
SAMPLE = re.compile(r"\s*(\d+)\s+([\d.]+):\s.*\((.*)\)$")  # PID TIME: ADDRESS SYMBOL (FILE)


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample. at: monotonic seconds. file: name of the file that contains the code, as perf writes it."""

    pid: int
    at: float
    file: str


def record(learners: int, place: Path) -> tuple[list[tuple[float, float]], dict[int, str], Iterable[Sample]]:
    """Returns the beginning and end of each sync in monotonic seconds, the processes by PID, and all samples."""
    if (perf := shutil.which("perf")) is None:
        raise SystemExit("perf is not installed: install it (Debian: linux-perf)")
    data, told = str(place / "perf.data"), place / "sync.json"
    sync = [sys.executable, "-m", "benchmarks.data_plane.sync", "--learners", str(learners), "--syncs", str(SYNCS)]
    options = ["-q", "-e", "cpu-clock", "-F", str(RATE), "-k", "CLOCK_MONOTONIC", "-o", data]
    with subprocess.Popen(
        [perf, "record", *options, "--", *sync, "--json", str(told)], stdout=subprocess.DEVNULL
    ) as running:
        processes = _watch(running)
    if running.returncode:
        raise SystemExit(f"perf ended with status {running.returncode}: run as root, or allow it (perf_event_paranoid)")
    spans = [(each["began"], each["began"] + each["wall_s"]) for each in json.loads(told.read_text())["syncs"]]
    fields = [perf, "script", "-i", data, "-G", "-F", "pid,time,ip,sym,dso"]
    lines = subprocess.run(fields, capture_output=True, text=True, check=True).stdout.splitlines()
    return spans, processes, samples(lines)


def _watch(running: subprocess.Popen[bytes]) -> dict[int, str]:
    """Waits for the end of the recording. Returns the name of each process by PID."""
    found = dict[int, str]()
    while running.poll() is None:
        for process in psutil.Process(running.pid).children(recursive=True):
            try:
                words = process.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue  # it has ended
            found.update((process.pid, name) for module, name in PROCESSES.items() if module in words)
        time.sleep(POLL_S)
    return found


def samples(lines: Iterable[str]) -> Iterable[Sample]:
    """Yields the samples in perf's output."""
    for line in lines:
        if (found := SAMPLE.match(line)) is not None:
            yield Sample(int(found[1]), float(found[2]), found[3].rpartition("/")[2])


def seconds(
    spans: Sequence[tuple[float, float]], processes: Mapping[int, str], taken: Iterable[Sample]
) -> dict[tuple[str, str], float]:
    """Returns the CPU seconds per sync by process and kind of work. spans: beginning and end of each sync."""
    found = Counter[tuple[str, str]]()
    for each in taken:
        if each.pid in processes and any(begins <= each.at <= ends for begins, ends in spans):
            found[processes[each.pid], kind_of(each.file)] += 1
    return {place: count / RATE / len(spans) for place, count in found.most_common()}


def kind_of(file: str) -> str:
    """Returns the kind of work of the code in a file."""
    return next((kind for pattern, kind in KINDS.items() if re.fullmatch(pattern, file)), OTHER)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--json", type=Path, dest="json_path", help="write the seconds to this file")
    arguments, under = parser.parse_args(), conditions()
    with tempfile.TemporaryDirectory() as directory:
        found = seconds(*record(arguments.learners, Path(directory)))
    whole = sum(found.values())
    table = Table("process", "work", "CPU s per sync", "share", title=f"{arguments.learners} learners, {SYNCS} syncs")
    for (process, kind), spent in found.items():
        table.add_row(process, kind, f"{spent:.3f}", f"{spent / whole:.1%}")
    table.add_row("all", "", f"{whole:.3f}", "")
    Console().print(table)
    if arguments.json_path is not None:
        rows = [(*place, spent) for place, spent in found.items()]
        write_record(arguments.json_path, {"learners": arguments.learners, "cpu_s": whole, "rows": rows}, under)


if __name__ == "__main__":
    main()
