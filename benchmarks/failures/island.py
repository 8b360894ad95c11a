"""A reference learner whose every inner step is timed.

python -m benchmarks.failures.island TIMES.npy NAME ADDRESS SEED

Writes float64 (steps, 4): when `Learner.step()` was entered and left, in monotonic seconds; the processor time that it
took; and, as a control, for how long plain computing of the same processor time went on right after it.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from atoll import learner
from atoll.reference import train
from atoll.reference.settings import Joining, TrainSettings
from atoll_wire.logs import configure

times: list[tuple[float, float, float, float]] = []


class Timed(learner.Learner):
    """Remembers when each step began and ended."""

    def step(self, tokens: int, loss: float | None = None) -> None:
        """As `Learner.step`."""
        began, began_cpu = time.monotonic(), time.thread_time()
        super().step(tokens, loss)
        left, worked = time.monotonic(), time.thread_time() - began_cpu
        times.append((began, left, worked, compute(worked)))


def compute(cpu_s: float) -> float:
    """Computes for so much processor time, and needs nothing else; returns the seconds that passed."""
    began, end = time.monotonic(), time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass
    return time.monotonic() - began


def main() -> None:
    """Trains, then writes the times."""
    path, name, address, seed = sys.argv[1:]
    configure("info", json=False)
    train.Learner = Timed  # type: ignore[attr-defined]
    settings = TrainSettings(seed=int(seed), device="cpu")
    train.train(settings, Joining(servers=(address,), name=name, region=name))
    np.save(path, np.array(times))


if __name__ == "__main__":
    main()
