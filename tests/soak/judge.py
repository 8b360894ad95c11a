"""PURE: whether a quantity grew, from samples that were taken in quiet moments.

A sample is the lowest of some looks at an idle system: a call that is just ending is not in it, and a leaked one is.

- Open calls have a value that is known: a learner has one Follow and one Report, a front and a core have those of all
  learners, and nothing else is open. No sample may have more. A comparison with earlier samples would be weaker: a cut
  ends what leaked over that connection, and the limits of a front or core end the oldest of too many.
- Threads, and file descriptors that are no connections, are compared over time: what leaks makes the samples rise and
  stay up. The lowest sample of the last third must be no higher than the highest of the first third and of what came
  before it. One high sample is no growth, and one leaked file is one. What came before it is what the same process had;
  of threads, what any process of its kind had: a pool starts a thread when it first needs it, in whichever minute.
- Connections are compared in the same way, with LAZY to spare: a front opens them when it first needs them, and a cut
  ends them. What leaks with each cut or rejoin is beyond that after some of them.
- Memory: the median of the last third is at most 5 % above that of the first third.

What falls has not grown. Series that are compared over time need LEAST samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 6
MEMORY_RATIO = 1.05
LAZY = 4  # connections
MEMORY, THREADS, FILES, CONNECTIONS = "memory", "threads", "other file descriptors", "connections"


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one quantity, oldest first. values: counts, or bytes of memory; known: what a count has to be.

    before: what came before; spare: so much more is no growth.
    """

    process: str
    quantity: str
    values: tuple[float, ...]
    known: float | None = None
    before: tuple[float, ...] = ()
    spare: int = 0

    def ends(self) -> tuple[Sequence[float], Sequence[float]]:
        """The first and the last third of the samples."""
        third = max(1, len(self.values) // 3)
        return self.values[:third], self.values[-third:]

    def grew(self) -> bool:
        """Whether it is beyond what is known, or rose and stayed up."""
        if self.known is not None:
            return max(self.values) > self.known
        first, last = self.ends()
        if self.quantity == MEMORY:
            return statistics.median(last) > MEMORY_RATIO * statistics.median(first)
        return min(last) > max((*first, *self.before)) + self.spare

    def sentence(self) -> str:
        """What grew: process, quantity, first and last value."""
        if self.known is not None:
            high = sum(value > self.known for value in self.values)
            return (
                f"{self.process}: {self.quantity} grew from {self.known:.0f} to {max(self.values):.0f}: "
                f"{high} of {len(self.values)} samples are above {self.known:.0f}"
            )
        if self.quantity == MEMORY:
            first, last = map(statistics.median, self.ends())
            return (
                f"{self.process}: {self.quantity} grew from {first / 2**20:.1f} to {last / 2**20:.1f} MiB, by "
                f"{100 * (last / first - 1):.1f} %; at most {100 * (MEMORY_RATIO - 1):.0f} % is allowed"
            )
        return f"{self.process}: {self.quantity} grew from {self.values[0]:.0f} to {self.values[-1]:.0f}"
