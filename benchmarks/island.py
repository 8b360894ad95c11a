"""A reference learner whose every inner step is timed: python -m benchmarks.island TIMES.npy NAME ADDRESS TOKENS SEED.

Writes float64 (steps, 4): when `Learner.step()` was entered and left, in monotonic seconds; the processor time that it
took; and how long its thread was ready meanwhile and had to wait for a processor (Linux: schedstat).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from atoll import learner
from atoll.reference import train
from atoll_wire.logs import configure

SCHEDULE = Path("/proc/thread-self/schedstat")
times: list[tuple[float, float, float, float]] = []


class Timed(learner.Learner):
    """Remembers when each step began and ended."""

    def step(self, tokens: int, loss: float | None = None) -> None:
        """As `Learner.step`."""
        began, worked, waited = time.monotonic(), time.thread_time(), waited_s()
        super().step(tokens, loss)
        waited = waited_s() - waited
        times.append((began, time.monotonic(), time.thread_time() - worked, waited))


def waited_s() -> float:
    """Seconds that this thread was ready to run and did not."""
    return int(SCHEDULE.read_text().split()[1]) / 1e9


def main() -> None:
    """Trains, then writes the times."""
    path, name, address, tokens, seed = sys.argv[1:]
    configure("info", json=False)
    train.Learner = Timed  # type: ignore[attr-defined]
    settings = train.TrainSettings(total_tokens=int(tokens), seed=int(seed), device="cpu")
    train.train(settings, train.Joining((address,), name, name))
    np.save(path, np.array(times))


if __name__ == "__main__":
    main()
