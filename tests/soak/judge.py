"""PURE: decides whether a quantity grew, from samples at quiet moments.

A sample is the lowest of several measurements of an idle system. It excludes calls that are just ending, but includes
leaked ones.

- The number of open calls is known: a learner has one Follow and one Report. A front and a core have those of all
learners. No sample may exceed this number. A comparison with earlier samples would be weaker, because a cut ends calls
that leaked over the connection, and limits end the oldest calls.
- Threads, and file descriptors other than connections, are compared over time: a leak makes the samples rise and stay
  up. The lowest sample of the last third must not exceed the highest sample of the first third and of the time before.
  One high sample is therefore not growth, but one leaked file is. "The time before" covers earlier samples of the same
  process. For threads, it covers any process of the same kind, since a pool may start a thread at any time.
- Connections are compared in the same way, with a tolerance of LAZY per learner. A process opens more of them when
  round trips become longer, as on a busy machine, and a cut ends them. A leak per cut or rejoin soon exceeds this
  tolerance.
- Memory: the median of the last third is at most 5 % above that of the first third.

A falling quantity has not grown. Series that are compared over time need LEAST samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 6
MEMORY_RATIO = 1.05
LAZY = 4  # tolerated additional connections per learner
MEMORY, THREADS, FILES, CONNECTIONS = "memory", "threads", "other file descriptors", "connections"


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one quantity, oldest first. values: counts, or bytes of memory. known: the maximum, if known.

    before: earlier samples. spare: tolerated growth.
    """

    process: str
    quantity: str
    values: tuple[float, ...]
    known: float | None = None
    before: tuple[float, ...] = ()
    spare: int = 0

    def ends(self) -> tuple[Sequence[float], Sequence[float]]:
        """Returns the first and the last third of the samples."""
        third = max(1, len(self.values) // 3)
        return self.values[:third], self.values[-third:]

    def grew(self) -> bool:
        """Returns whether the quantity exceeds the known value, or rose and stayed up."""
        if self.known is not None:
            return max(self.values) > self.known
        first, last = self.ends()
        if self.quantity == MEMORY:
            return statistics.median(last) > MEMORY_RATIO * statistics.median(first)
        return min(last) > max((*first, *self.before)) + self.spare

    def sentence(self) -> str:
        """Returns a sentence about the growth: process, quantity, first and last value."""
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
