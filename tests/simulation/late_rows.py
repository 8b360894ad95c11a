"""Learners whose movement rows arrive late, as those of a GPU that is some steps behind its host.

Their contributions are kept back until the rows arrive. Some rows are lost: they do not arrive before the process ends,
or before the storm is over. Each process has its own random stream, so processes whose rows arrive at once do not
change.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from atoll.boundary.movement import Movement
from atoll.boundary.movement_watch import MovementWatch
from atoll.model.samples import Block, ParameterSamples
from atoll_wire.codec.block_kernels import F32
from atoll_wire.process.clock import Clock

from tests.simulation.bookkeeping import Violation

SEEDS = 0.2  # share of seeds that have such learners
PROCESSES = 0.75  # share of the processes in these seeds
STRANGE = 0.5  # share of these seeds in which a learner's parameters are overwritten (see `weights`)
DRAINS = 0.75  # share of these processes that send their remaining work when they leave
PROMPT = 0.3  # share of blocks of rows that arrive at once
MOST_BOUNDARIES, LONGEST_S = 6, 1.5  # limits on the delay of a block
MOST_KEPT = 12  # number of blocks after which a block is lost


class Late(StrEnum):
    """The ways in which a process's rows can be late."""

    BOUNDARIES = "some boundaries"
    SECONDS = "some time"
    LOST = "some boundaries, until one block of rows is lost"


class Lateness:
    """How late the rows of one process are. counts: of the world. stormy: whether blocks may be lost now."""

    def __init__(self, rng: random.Random, clock: Clock, stormy: Callable[[], bool], counts: Counter[str]) -> None:
        self._rng, self.clock, self.stormy, self.counts = rng, clock, stormy, counts
        self._late = rng.choice(list(Late))
        self._left = rng.randint(1, MOST_KEPT)  # blocks until one is lost
        self.drains = rng.random() < DRAINS

    def drawn(self) -> tuple[int, float, bool]:
        """Returns the next block's delay in boundaries and in seconds, and whether it is lost."""
        self._left -= 1
        lost = self._late is Late.LOST and not self._left
        if self._rng.random() < PROMPT:
            return 0, 0.0, lost
        if self._late is Late.SECONDS:
            return 0, self._rng.uniform(0.0, LONGEST_S), lost
        return self._rng.randint(1, MOST_BOUNDARIES), 0.0, lost


class LateRows:
    """The late rows of one world."""

    def __init__(self, seed: int, clock: Clock, stormy: Callable[[], bool], counts: Counter[str]) -> None:
        self._seed, self._clock, self._stormy, self._counts = seed, clock, stormy, counts
        self.rng = random.Random(f"{seed} late blocks")
        self.wanted = self.rng.random() < SEEDS

    def of(self, name: str, life: int) -> Lateness | None:
        """Returns how late the rows of a learner's next process are; None if they arrive at once."""
        rng = random.Random(f"{self._seed} late blocks of {name} {life}")
        if not self.wanted or rng.random() >= PROCESSES:
            return None
        self._counts["islands with late rows"] += 1
        return Lateness(rng, self._clock, self._stormy, self._counts)

    def leaves(self, storm_s: float) -> list[float]:
        """Returns the times at which further learners leave in this seed, and come back later."""
        return [self.rng.uniform(0.8, storm_s) for _ in range(self.rng.choice((0, 1, 2)))] if self.wanted else []

    def sums(self) -> dict[str, int]:
        """Returns 1 for each situation that the world had."""
        return {
            "seeds with late rows": min(1, self._counts["islands with late rows"]),
            "seeds with contributions kept back": min(1, self._counts["contributions kept back"]),
            "seeds that withdrew some of them": min(1, self._counts["kept back, and withdrawn"]),
        }


class LateBlock:
    """A block of rows that arrives late."""

    def __init__(self, watch: LateWatch, block: Block, lateness: Lateness) -> None:
        self._watch, self._block, self._lateness = watch, block, lateness
        boundaries, seconds, self._lost = lateness.drawn()
        self._boundary = watch.glances + boundaries
        self._at_s = lateness.clock.monotonic() + seconds
        lateness.counts["blocks of rows that are late"] += bool(boundaries or seconds)
        lateness.counts["blocks of rows that are lost"] += self._lost

    @property
    def there(self) -> bool:
        """See Block."""
        if self._lost and self._lateness.stormy():
            return False
        return self._watch.glances >= self._boundary and self._lateness.clock.monotonic() >= self._at_s

    def rows(self) -> F32:
        """See Block."""
        if not self.there and not self._watch.may_wait:
            raise Violation(8, "a step waits for the rows of a device")
        return self._block.rows()


class LateWatch(MovementWatch):
    """The product's watch, with late rows. glances: number of boundaries that looked for rows."""

    def __init__(self, samples: ParameterSamples, lateness: Lateness) -> None:
        self._lateness, self.glances, self.may_wait = lateness, 0, False
        super().__init__(samples)

    def glance(self, *, now: bool) -> Movement:
        """See MovementWatch."""
        self.glances += 1
        return super().glance(now=now)

    def judge(self) -> Movement:
        """See MovementWatch. A leaving learner waits for its rows."""
        self.may_wait = True
        try:
            return super().judge()
        finally:
            self.may_wait = False

    def _collect(self) -> None:
        super()._collect()
        if self._waiting is not None:
            block, *others = self._waiting
            late: Block = LateBlock(self, block, self._lateness)  # type: ignore[assignment]
            self._waiting = (late, *others)  # type: ignore[assignment]
