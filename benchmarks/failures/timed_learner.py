"""A reference learner that records the time of every `Learner.step()`.

python -m benchmarks.failures.timed_learner TIMES.npy NAME ADDRESS SEED [SIZE [BATCH]]

Trains until the run's end or SIGTERM. SIZE: of the reference model. BATCH: windows per step. Writes float64 (steps, 4).
The first two columns are the times when `Learner.step()` was entered and left, in monotonic seconds. The third is the
CPU time of the call. The last is a control: the wall-clock time of a busy loop that uses the same CPU time right
afterwards.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
from atoll import learner
from atoll.reference import train
from atoll.reference.settings import JoinSettings, TrainSettings
from atoll_wire.process.logs import configure

times: list[tuple[float, float, float, float]] = []


class Timed(learner.Learner):
    """A learner that records when each step began and ended."""

    def step(self, tokens: int, loss: float | None = None) -> None:
        began, began_cpu = time.monotonic(), time.thread_time()
        super().step(tokens, loss)
        left, worked = time.monotonic(), time.thread_time() - began_cpu
        times.append((began, left, worked, compute(worked)))


def compute(cpu_s: float) -> float:
    """Computes for `cpu_s` seconds of CPU time. Returns the wall-clock seconds that passed."""
    began, end = time.monotonic(), time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass
    return time.monotonic() - began


def main() -> None:
    """Trains one learner, then writes the times."""
    path, name, address, seed, *more = sys.argv[1:]
    configure("info", json=False)
    train.Learner = Timed  # type: ignore[attr-defined]

    def end(*_: object) -> None:
        np.save(path, np.array(times))
        os._exit(0)  # without leaving the run, which may take half a minute

    signal.signal(signal.SIGTERM, end)
    model = dict(zip(("size", "batch"), more, strict=False))
    settings = TrainSettings.model_validate({"seed": int(seed), "device": "cpu", **model})
    train.train(settings, JoinSettings(servers=(address,), name=name, region=name))
    np.save(path, np.array(times))


if __name__ == "__main__":
    main()
