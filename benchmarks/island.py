"""A reference learner whose every inner step is timed: python -m benchmarks.island TIMES.npy NAME ADDRESS TOKENS SEED.

Writes float64 (steps, 3): when `Learner.step()` was entered and left, in monotonic seconds, and the processor time
that it took: what is missing to the wall's is waiting for a processor.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from atoll import learner
from atoll.reference import train
from atoll_wire.logs import configure

times: list[tuple[float, float, float]] = []


class Timed(learner.Learner):
    """Remembers when each step began and ended."""

    def step(self, tokens: int, loss: float | None = None) -> None:
        """As `Learner.step`."""
        began, worked = time.monotonic(), time.thread_time()
        super().step(tokens, loss)
        times.append((began, time.monotonic(), time.thread_time() - worked))


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
