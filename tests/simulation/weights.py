"""Honest learners whose parameters move without their optimizer's steps.

Weights are loaded during training, or just before leaving. Or the optimizer has masters that undo adoptions. The
product's detection (`atoll.boundary.movement_watch`) runs in these worlds. It also runs in some others, where it must
find nothing.
"""

from __future__ import annotations

import random
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from atoll.boundary.movement import RELIABLE, Movement
from atoll.boundary.movement_watch import FOUND

from tests.simulation.island import Island
from tests.simulation.late_rows import STRANGE
from tests.simulation.training import Masters

if TYPE_CHECKING:
    from tests.simulation.world import World

MOVED = 0.06  # share of the seeds with such a learner
WATCHED = 0.12  # ... or with detection, but no such learner
LOADS = 3  # loads in a seed with late rows, because few of them are in work that is kept back
AGAIN_S = 0.5  # seconds until an ended learner restarts with named masters


class Strange(StrEnum):
    """The cause of a movement."""

    LOADED = "weights are loaded before a step"
    LOADED_LATE = "weights are loaded after a step"
    BEST = "weights are loaded before leaving"
    MASTERS = "the optimizer undoes adoptions"
    NAMED = "the optimizer has masters that Atoll knows"


class Weights:
    """Schedules the changes of weights in one world, from a separate random stream."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._rng = world, random.Random(f"{seed} weights")
        drawn = self._rng.random()
        self.strange = self._rng.choice(list(Strange)) if drawn < MOVED else None
        self.watched = drawn < WATCHED
        self._name = self._rng.choice(world.names)
        late = world.late_rows
        if self.strange is None and late.wanted and late.rng.random() < STRANGE:
            self.strange, self.watched = late.rng.choice(list(Strange)), True
        self._masters = {Strange.MASTERS: Masters.UNKNOWN, Strange.NAMED: Masters.NAMED}

    def begin(self, storm_s: float) -> None:
        """Schedules movements that happen once, or several times if rows are late."""
        if self.strange in {Strange.LOADED, Strange.LOADED_LATE, Strange.BEST}:
            for _ in range(LOADS if self._world.late_rows.wanted else 1):
                self._world.loop.after(self._rng.uniform(0.8, storm_s), self._load)

    def masters(self, name: str) -> Masters:
        """Returns the masters of a learner's next process."""
        kind = self._masters.get(self.strange, Masters.NONE) if self.strange is not None else Masters.NONE
        return kind if name == self._name else Masters.NONE

    def ended(self, island: Island) -> bool:
        """Returns whether a process ended as expected. If so, it restarts with named masters."""
        if island.model.masters is not Masters.UNKNOWN or FOUND[Movement.COPIES] not in str(island.error):
            return False
        self._world.counts["learners that undid adoptions, and ended"] += 1
        self._name_masters()
        self._world.loop.after(AGAIN_S, self._world.start_island, island.name)
        return True

    def peace(self) -> None:
        """Kills learners whose undone adoptions are too small to be detected. They restart with named masters."""
        self._name_masters()
        for island in self._world.islands.values():
            if island.model.masters is Masters.UNKNOWN:
                island.process.kill()

    def _name_masters(self) -> None:
        self._masters[Strange.MASTERS] = Masters.NAMED

    def _load(self) -> None:
        island, counts = self._world.islands.get(self._name), self._world.counts
        if not self._world.stormy or island is None or not island.process.alive or island.leaving:
            return
        if not island.tracks or not island.counters.steps or island.strayed:  # large steps would hide the load
            self._world.loop.after(0.1, self._load)
            return
        kept, late = self.strange is Strange.BEST, self._world.late_rows.wanted
        if late and (island.just_restored() or not island.has_work_on_its_way(kept=kept)):
            self._world.loop.after(0.02, self._load)
            return
        values = np.random.default_rng(self._rng.getrandbits(32))
        self._world.checks.note(f"{island.process.name}: {self.strange}")
        counts[f"weights: {self.strange.name.lower()}" if self.strange is not None else ""] += 1
        if self.strange is Strange.BEST:
            island.load(values)
            self._world.leave(island, drains=True)
            self._world.loop.after(self._rng.uniform(0.5, 3.0), self._world.start_island, self._name)
        else:
            island.overwrites = values
            island.late = self.strange is Strange.LOADED_LATE and island.counters.steps > RELIABLE + 2
