"""Measures the cost of many idle learners for a core: python -m benchmarks.data_plane.idle_learners [COUNT].

Each learner runs the real agent (`atoll.agent.run_session`) with its own connections. All learners run on one event
loop of one process. They join, follow, take a step every 10 s and report. A round is due after 10,000 steps. The cost
is the core's CPU time over half a minute, and the growth of its resident memory since the first learner joined.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from atoll.agent.join_request import Identity, ModelDescription
from atoll.agent.run_session import RunSession
from atoll.demo.processes import Child, children
from atoll.fragments.exchange import ThreadExchange
from atoll.model.parameters import Parameters
from atoll.stats import Counters
from atoll.transfers.call_errors import GOODBYE_S
from atoll_wire.codec import frame_codec
from atoll_wire.layout.layout import Layout
from atoll_wire.process.clock import SYSTEM
from atoll_wire.process.logs import configure

from benchmarks.data_plane.sync import cpu_s, wait

COUNT = 1000
STEP_S, WINDOW_S, WINDOWS, LEFT_OUT = 10.0, 10.0, 5, 2  # the first windows include work that follows joining
AT_ONCE = 50  # number of learners that join at a time


@dataclass(frozen=True, slots=True)
class IdleCost:
    """The cost of idle learners. cpus: CPUs that the core used, per window.

    bytes_each: growth of its resident memory in bytes per learner.
    """

    learners: int
    cpus: list[float]
    bytes_each: float

    @property
    def cpu(self) -> float:
        """The number of CPUs that the core used: the median over the windows."""
        return statistics.median(self.cpus)


def measure(count: int = COUNT) -> IdleCost:
    """Runs a core, its first learner and the other learners. Returns their cost. count: number of learners."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        place = Path(directory)
        options = ["--dir", f"{directory}/run", "--inner-steps", "10000", "--listen", "127.0.0.1:0"]
        core = group.start("core", [sys.executable, "-m", "atoll.cli", "core", *options], piped=True)
        address = group.serving(core)
        crowd = group.start(
            "crowd", [sys.executable, "-m", "benchmarks.data_plane.idle_learners", str(count), address, directory]
        )
        wait([crowd], [place / "first"])
        before = resident_bytes(core)
        crowd.process.send_signal(signal.SIGUSR1)
        wait([crowd], [place / "all"])
        cpus = []
        for _ in range(WINDOWS):
            used, began = cpu_s(core), time.monotonic()
            time.sleep(WINDOW_S)
            cpus.append((cpu_s(core) - used) / (time.monotonic() - began))
        added = resident_bytes(core) - before
        crowd.process.send_signal(signal.SIGTERM)
        wait([crowd], [place / "lost"])
        lost = int((place / "lost").read_text())
        group.stop(crowd)
        group.stop(core)
    if lost:
        raise SystemExit(f"{lost} of {count} learners lost their connection")
    return IdleCost(count, cpus[LEFT_OUT:], added / (count - 1))


def resident_bytes(child: Child) -> int:
    """Returns the current resident memory of a child process."""
    lines = Path(f"/proc/{child.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) << 10


class Member:
    """One learner without a training loop."""

    def __init__(self, number: int, address: str, model: ModelDescription) -> None:
        self.counters = Counters()
        self.here = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        identity = Identity(f"learner-{number}", "", (address,), 60.0)
        self.session = RunSession(
            identity, model, ThreadExchange(SYSTEM), self.counters, self._ready, self._stop, SYSTEM
        )
        self.living = self._loop.create_task(self.session.live())

    def _ready(self, _layout: Layout) -> None:
        self.here.set()

    def _stop(self, error: Exception) -> None:
        raise SystemExit(f"a learner stopped: {error}")

    async def train(self) -> None:
        """Counts a step every STEP_S seconds."""
        while True:
            self.counters.steps += 1
            self.counters.tokens += 1
            self.counters.step_time_s = STEP_S
            self.counters.stepping_s += STEP_S
            await asyncio.sleep(STEP_S)


async def crowd(count: int, address: str, place: Path, layers: int) -> None:
    """Runs the learners. The first learner sends the parameters. The others join on SIGUSR1. All leave on SIGTERM.

    place: a folder for the files `first`, `all`, and `lost` (number of lost connections). layers: of the model.
    """
    told = asyncio.Event()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, told.set)
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    parameters = Parameters(net, torch.optim.SGD(net.parameters(), 0.1))
    model = ModelDescription(parameters.tensors, parameters.frozen_digest(), parameters.save)
    await asyncio.to_thread(frame_codec.warm_up)
    members, training = [Member(0, address, model)], []
    await members[0].here.wait()
    (place / "first").touch()
    await told.wait()
    for begin in range(1, count, AT_ONCE):
        members += [Member(number, address, model) for number in range(begin, min(begin + AT_ONCE, count))]
        await asyncio.gather(*(member.here.wait() for member in members[begin:]))
    training = [asyncio.create_task(member.train()) for member in members]
    (place / "all").touch()
    await ended.wait()
    (place / "part").write_text(str(sum(member.counters.reconnects for member in members)))
    (place / "part").rename(place / "lost")
    for task in (*training, *(member.living for member in members)):
        task.cancel()
    await asyncio.wait([member.living for member in members], timeout=GOODBYE_S)


def main() -> None:
    """Measures the cost, or runs the learners if the arguments contain an address and a folder."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if len(sys.argv) > 2:
        configure("warning", json=False)
        layers = int(sys.argv[4]) if len(sys.argv) > 4 else 1
        asyncio.run(crowd(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), layers))
    else:
        found = measure(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT)
        print(f"{found.learners} learners: {found.cpu:.2f} CPUs, {found.bytes_each / 1e3:.0f} kB per learner")


if __name__ == "__main__":
    main()
