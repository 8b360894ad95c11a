"""A learner's training throughput with syncs vs. without: python -m benchmarks.training_loop.throughput.

The learner uses one CPU for training and for Atoll's background work. The core uses the other CPU. Phases with one sync
of every fragment alternate with phases in which the same loop trains in a `pause`. Both therefore see the same machine
speed. The first pair warms up.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from atoll.agent.core_view import FragmentTrack
from atoll.demo.processes import children
from atoll.learner import Learner
from atoll.reference.model import SIZES, Transformer
from atoll.reference.train import optimizer_for
from atoll_wire.process.logs import configure

SIZE = "25m"
BATCH = 1
INNER_STEPS = 24
FRAGMENTS = 24
PAIRS = 4


@dataclass(frozen=True, slots=True)
class Throughput:
    """The measured throughput. ratios: per pair, tokens/s with syncs divided by tokens/s without.

    step_s: duration of a step without syncs. merged: merged fragments per pair.
    """

    ratios: list[float]
    step_s: float
    merged: float


def measure() -> Throughput:
    """Runs a core and a learner, each on its own CPU."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        options = ["--dir", f"{directory}/run", "--fragments", f"{FRAGMENTS}", "--inner-steps", f"{INNER_STEPS}"]
        command = [sys.executable, "-m", "atoll.cli", "core", *options, "--listen", "127.0.0.1:0"]
        core = group.start("core", command, piped=True)
        address = group.serving(core)
        for task in Path(f"/proc/{core.process.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {1})
        words = [sys.executable, "-m", "benchmarks.training_loop.throughput", address]
        told = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        group.stop(core)
    return Throughput(**json.loads(told.stdout.splitlines()[-1]))


def learn(address: str) -> Throughput:
    """Runs the learner through alternating phases with and without syncs. address: the core's."""
    os.sched_setaffinity(0, {0})
    configure("warning", json=False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer(SIZES[SIZE])
    optimizer = optimizer_for(model, 1e-3)
    window = torch.randint(0, 256, (BATCH, SIZES[SIZE].context + 1))

    def inner_step() -> None:
        logits = model(window[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    ratios = []
    alone = []
    merged = []
    with Learner(model, optimizer, server=address, name="a", drain_s=0.0) as learner:
        for number in range(PAIRS + 1):
            before, times = learner.stats().merged, dict[bool, float]()
            for synced in (True, False) if number % 2 else (False, True):
                began = time.perf_counter()
                with nullcontext() if synced else learner.pause():
                    for _ in range(INNER_STEPS):
                        inner_step()
                        if synced:
                            learner.step(tokens=window.numel())
                times[synced] = (time.perf_counter() - began + (rest_s(learner) if synced else 0.0)) / INNER_STEPS
            ratios.append(times[False] / times[True])
            alone.append(times[False])
            merged.append(learner.stats().merged - before)
    return Throughput(ratios[1:], statistics.median(alone[1:]), statistics.mean(merged[1:]))


def tracks(learner: Learner) -> list[FragmentTrack]:
    """Returns the agent's tracks, one per fragment."""
    assert learner._agent is not None and learner._agent._session is not None, "joined"  # noqa: PT018
    return list(learner._agent._session.core.tracks.values())


def rest_s(learner: Learner) -> float:
    """Completes the open uploads and fetches of a phase. Returns their CPU seconds, which count for that phase."""
    began = time.process_time()
    with learner.pause():
        while learner.stats().pending or any(track.behind() or track.fetching for track in tracks(learner)):
            time.sleep(0.01)
    return time.process_time() - began


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(asdict(learn(sys.argv[1]))))
    else:
        found = measure()
        print(
            f"{statistics.median(found.ratios):.4f} ({min(found.ratios):.4f} to {max(found.ratios):.4f}) of "
            f"{1 / found.step_s:.2f} steps/s, {found.merged:.1f} fragments merged per pair"
        )
