"""The end of a dataset in the calm: all learners but one leave, and a new process of this one must finish the units.

The new process may have to wait for units of a learner that has left, until the pending work on them is merged. No
other learner's contribution can start this merge.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from tests.simulation.bookkeeping import Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

WITHIN_S = 60.0  # for at most 120 units; less than the longest limit on a learner's silence, which also returns units


async def hand_over(world: World, rng: random.Random) -> None:
    """Lets one new process finish the dataset. Afterwards, the other learners start again."""
    heir = rng.choice(world.names)
    leaving = [island for name, island in world.islands.items() if name != heir]
    for island in world.islands.values():
        island.training = True
    await asyncio.sleep(rng.uniform(0.2, 2.0))
    world.checks.note(f"all learners leave, and {heir} starts again")
    world.islands[heir].process.kill()
    world.start_island(heir)
    known = world.core
    farewells = [] if known is None else [n for n, entry in known.run.registry.entries.items() if entry.session]
    for island in leaving:
        world.leave(island, drains=True)
    began, feed = world.loop.now, world.islands[heir].feed

    def finished() -> bool:
        core = world.core
        datasets = [] if core is None else list(core.run.data.datasets.values())
        if any(island.process.alive for island in leaving):
            return False
        entries = [] if core is None else [core.run.registry.entries[island.name] for island in leaving]
        back = [entry.name for entry in entries if not entry.session and entry.account.left_at is None]
        if core is known and (undone := [name for name in back if name in farewells]):
            raise Violation(6, f"{undone} left, and count as present again without a Join")
        if back or any(entry.session for entry in entries):
            world.counts["departures that the core does not know"] += 1
            return True  # only the limit on silence returns the units of a process that may be alive
        if world.loop.now > began + WITHIN_S:
            raise Violation(8, f"{heir} did not finish the dataset: {datasets}")
        return feed is None or {each.consumed == each.declared.positions for each in datasets} == {True}

    await world.watch(finished)
    world.counts["datasets handed over"] += feed is not None
    for name in world.names:
        world.start_island(name)
