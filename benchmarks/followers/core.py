"""Measures what followers behind fronts cost the core: python -m benchmarks.followers.core [--json PATH].

A learner trains a small model at a fixed pace, once with no follower, once with few and once with many. The core's CPU
time from the first to the last version is compared. All followers must end at the newest versions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Self

import atoll
import torch
from atoll.demo.processes import children
from atoll.errors import FollowerError
from atoll.follower.cuts import CutExchange
from atoll.follower.follow_session import FollowSession, Source
from atoll_wire.process.clock import SystemClock
from atoll_wire.process.logs import configure
from torch import nn

from benchmarks.conditions import conditions, write_record
from benchmarks.data_plane.sync import cpu_s
from benchmarks.followers.link import OPTIONS, batches, started
from benchmarks.process_state import settled

WIDTH = 64
FRONTS = 2
VERSIONS = 15
STEP_S = 0.25  # two updates each second
FEW, MANY, MAX_MORE = 10, 1000, 1.1
SHARED = ["--quota-watches", "64"]  # 16 times as many followers may call from one address
ARRIVE_S = 600.0  # the followers of this process share one CPU


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run cost. front_cpu_s: of all fronts together."""

    followers: int
    seconds: float
    core_cpu_s: float
    front_cpu_s: float


def model() -> nn.Module:
    """Returns a model with 8,320 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


class Crowd:
    """Followers that share one thread and keep no model. Use it as a context manager.

    addresses: HOST:PORT of the fronts, among which the followers are divided.
    """

    def __init__(self, count: int, addresses: Sequence[str]) -> None:
        self._exchanges = [CutExchange() for _ in range(count)]
        self._addresses = addresses
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="followers")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._live())

    async def _live(self) -> None:
        tasks = []
        for number, exchange in enumerate(self._exchanges):
            source = Source([self._addresses[number % len(self._addresses)]], ARRIVE_S)
            session = FollowSession(source, exchange, partial(self._stop, exchange), SystemClock())
            tasks.append(asyncio.create_task(session.live()))
        await self._ended.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self, exchange: CutExchange, error: Exception) -> None:
        exchange.end(FollowerError(str(error)))

    def wait(self, versions: tuple[int, ...] | None = None) -> None:
        """Waits until all followers have these versions, or a first cut. Raises SystemExit after ARRIVE_S seconds."""
        deadline = time.monotonic() + ARRIVE_S
        for exchange in self._exchanges:
            cut = exchange.newest
            while cut is None or (versions is not None and cut.versions != versions):
                if time.monotonic() > deadline:
                    raise SystemExit(f"a follower did not get {versions or 'a model'} in time: {exchange.cause}")
                cut = exchange.wait(cut, 1.0) or cut


def cost(many: int) -> Cost:
    """Trains until every fragment has VERSIONS versions and all followers have the newest of them."""
    with (
        tempfile.TemporaryDirectory() as directory,
        children(Path(directory)) as group,
        contextlib.ExitStack() as stack,
    ):
        core, address = group.start_core(Path(directory) / "run", "127.0.0.1:0", OPTIONS)
        fronts = [started(group, f"front-{number}", address, SHARED) for number in range(FRONTS)]
        trained = model()
        optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
        learner = stack.enter_context(atoll.Learner(trained, optimizer, address, "trainer"))
        crowd = stack.enter_context(Crowd(many, [each.address for each in fronts]))
        crowd.wait()
        processes = [core, *(each.child for each in fronts)]
        before, began = list(map(cpu_s, processes)), time.monotonic()
        for batch in batches(learner, WIDTH, VERSIONS, STEP_S):
            optimizer.zero_grad()
            (trained(batch) - batch).square().mean().backward()
            optimizer.step()
        crowd.wait(tuple(each.version for each in settled(address).fragments))
        core_s, *front_s = [after - begun for after, begun in zip(map(cpu_s, processes), before, strict=True)]
        return Cost(many, time.monotonic() - began, core_s, sum(front_s))


def main() -> None:
    """Measures, prints, and exits with an error if many followers cost the core more than few do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under = parser.parse_args(), conditions()
    configure("warning", json=False)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = []
    for count in (0, FEW, MANY):
        found.append(each := cost(count))
        print(
            f"{count} followers: {each.seconds:.0f} s, core {each.core_cpu_s:.2f} CPU s, "
            f"fronts {each.front_cpu_s:.2f} CPU s",
            flush=True,
        )
    if arguments.json_path is not None:
        write_record(arguments.json_path, {"limit": MAX_MORE, "runs": [asdict(each) for each in found]}, under)
    _, few, many = found
    if many.core_cpu_s > MAX_MORE * few.core_cpu_s:
        raise SystemExit(
            f"{MANY} followers cost the core over {MAX_MORE} times as much as {FEW}: see the figures above"
        )


if __name__ == "__main__":
    main()
