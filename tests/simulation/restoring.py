"""An operator restores the run to an older checkpoint, sometimes in a process that dies during the restore."""

from __future__ import annotations

import random
import sqlite3
from typing import TYPE_CHECKING

from atoll_server.checkpoints.rollback import roll_back
from atoll_wire.errors import UserError

from tests.simulation.bookkeeping import DIRECTORY, shard_of
from tests.simulation.database import Connection
from tests.simulation.disk import SimulatedDisk
from tests.simulation.loop import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

CHANCE = 0.25  # share of seeds
MIN_TOUCHES, MAX_TOUCHES = 2, 40  # accesses to the disk until the operator's process dies
TRIES = 5


class Restoring:
    """Schedules the restores in one world, from a separate random stream."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._rng = world, random.Random(f"{seed} restores")
        self.wanted = self._rng.random() < CHANCE

    def times(self, storm_s: float) -> list[float]:
        """Returns the times of restores in this seed."""
        return [self._rng.uniform(1.0, storm_s) for _ in range(self._rng.choice((1, 1, 2)))] if self.wanted else []

    def stop_and_restore(self) -> None:
        """Kills the core, and restores a checkpoint before the next start. Retries later if there is no checkpoint."""
        world = self._world
        shard, process = shard_of(world.core), world.core_process
        if not world.stormy or world.platter.full or world.platter.broken:
            return
        if shard is None or process is None or not process.alive or not shard.snapshots.all():
            world.loop.after(0.1, self.stop_and_restore)
            return
        wanted = self._rng.choice(shard.snapshots.all()).id
        process.kill()
        world.loop.after(self._rng.uniform(0.001, 0.04), self._restore, wanted, TRIES)

    def _restore(self, wanted: int, tries: int) -> None:
        process = Process("operator")
        if tries > 1 and self._rng.random() < 0.6:
            process.countdown = self._rng.randrange(MIN_TOUCHES, MAX_TOUCHES)
        process.start(self._asked(process, wanted, tries))

    async def _asked(self, process: Process, wanted: int, tries: int) -> None:
        world = self._world
        if world.core_process is not None and world.core_process.alive:
            return  # the core was started meanwhile
        process.on_death.append(lambda: self._died(wanted, tries))
        world.checks.restoring(wanted)
        try:
            done = roll_back(DIRECTORY, wanted, SimulatedDisk(world.platter, process, Connection), world.loop.clock)
        except (UserError, OSError, sqlite3.Error) as error:
            if process.alive:
                world.counts["restores that were refused"] += 1
                world.checks.note(f"checkpoint {wanted} is not restored: {error}")
                process.on_death.clear()
            return
        if process.alive:
            process.on_death.clear()
            world.counts["checkpoints restored"] += 1
            world.checks.rolled_back(done)

    def _died(self, wanted: int, tries: int) -> None:
        self._world.counts["restores that died"] += 1
        self._world.checks.note(f"the restore of checkpoint {wanted} dies")
        self._world.loop.after(0.0, self._restore, wanted, tries - 1)
