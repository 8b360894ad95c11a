"""Operators take checkpoints of a run with several shards, in the storm and in the calm, and restore some of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

from atoll_server.access.refusals import Refused
from atoll_server.checkpoints.rollback import roll_back
from atoll_server.ledger.manifests import Manifest
from atoll_server.operators.run_checkpoints import RunCheckpoints
from atoll_server.operators.shard_calls import ShardCalls
from atoll_server.processes.core import Core
from atoll_wire.errors import UserError

from tests.simulation.bookkeeping import DIRECTORY, Violation
from tests.simulation.database import Connection
from tests.simulation.disk import SimulatedDisk
from tests.simulation.loop import Process
from tests.simulation.manifest_checks import ManifestChecks
from tests.simulation.network import Stub

if TYPE_CHECKING:
    from tests.simulation.sharded_world import ShardedWorld

CHANCE = 0.15  # share of seeds; they take up to twice as long
RESTORES = 0.35  # share of these seeds in which the run is restored
KILLS = 0.5  # share of the storm's requests during which a process dies
TRIES = 4  # most starts of a restore
MIN_TOUCHES, MAX_TOUCHES = 2, 60  # accesses to the disk until a process dies


class WatchedCheckpoints(RunCheckpoints):
    """The product's checkpoints. The checks see each manifest as soon as it is durable."""

    checks: ManifestChecks

    async def _write(self, outcomes: dict[int, Any], datasets: list[Any]) -> Manifest:
        manifest = await super()._write(outcomes, datasets)
        self.checks.count(self._run.manifests)
        return manifest


class Cuts:
    """The checkpoints of one world, from a separate random stream. wanted: whether it has any."""

    def __init__(self, world: ShardedWorld, seed: int) -> None:
        self._world, self._rng = world, random.Random(f"{seed} cuts")
        self.wanted = self._rng.random() < CHANCE
        self._restores = self.wanted and self._rng.random() < RESTORES
        self._checkpoints: RunCheckpoints | None = None  # of the registrar's newest process
        self._answers = 0  # number of checkpoints that operators received
        self._rolled_back = False

    def times(self, storm_s: float) -> list[float]:
        """Returns the times at which operators ask for a checkpoint in the storm."""
        return [self._rng.uniform(0.5, storm_s) for _ in range(self._rng.choice((1, 2, 3)))] if self.wanted else []

    def begin(self, core: Core, process: Process) -> None:
        """Takes checkpoints at the core's interval, as the registrar's process does."""
        if not self.wanted:
            return
        calls = ShardCalls(core.run.attached, partial(self._dialled, process))
        self._checkpoints = checkpoints = WatchedCheckpoints(core, calls)
        checkpoints.checks = self._world.checks.manifests
        process.start(checkpoints.keep_taking()).add_done_callback(core.watched)

    @contextlib.asynccontextmanager
    async def _dialled(self, process: Process, address: str) -> AsyncIterator[Stub]:
        stub = Stub(self._world.network, process, address)
        try:
            yield stub
        finally:
            await stub.close()

    # ------------------------------------------------------------------------------ checkpoints

    def ask(self) -> None:
        """Asks the registrar for a checkpoint. Sometimes a process dies meanwhile."""
        registrar = self._world.registrar
        if registrar.core is None or registrar.process is None or not registrar.process.alive:
            return
        registrar.process.start(self._ask(self._checkpoints))
        victim = self._rng.choice(self._world.homes).process
        if self._world.stormy and self._rng.random() < KILLS and victim is not None and victim.alive:
            victim.countdown = self._rng.randrange(MIN_TOUCHES, MAX_TOUCHES)

    async def _ask(self, checkpoints: Any) -> None:
        world, asked_at = self._world, self._world.loop.now
        world.counts["checkpoints asked for"] += 1
        try:
            world.checks.manifests.answered(await checkpoints.take(), asked_at)
        except Refused as refused:
            world.counts["checkpoints that were refused"] += 1
            world.checks.note(f"a checkpoint is refused: {refused.detail}")
        except Violation as violation:
            world.problem = violation
        else:
            self._answers += 1

    # ------------------------------------------------------------------------------ in the calm

    async def in_calm(self) -> None:
        """Takes a checkpoint. In some seeds, restores one, after which the learners train again."""
        if not self.wanted:
            return
        before, world = self._answers, self._world
        at = [world.loop.now]

        def taken() -> bool:
            if world.loop.now >= at[0]:
                at[0] += 1.0
                self.ask()
            return self._answers > before

        await world.guarded(taken, "take a checkpoint")
        if self._restores:
            await self._restore()

    async def _restore(self) -> None:
        """Restores a checkpoint at the stopped registrar. Other shards may run meanwhile, and die as they follow."""
        world, rng = self._world, self._rng
        wanted = rng.choice(list(world.checks.manifests.counting))
        for home in world.homes:
            if not home.number or rng.random() < 0.3:
                home.stays_away = True
                home.kill(power=rng.random() < 0.5)
        generation = max(world.checks.lines) + 1
        self._roll_back(wanted, TRIES)
        await world.guarded(lambda: self._rolled_back, "restore a checkpoint")
        for home in world.homes:
            home.stays_away = False
            if home.process is not None and home.process.alive and rng.random() < 0.5:
                home.process.countdown = rng.randrange(MIN_TOUCHES, MAX_TOUCHES)

        def begun() -> bool:
            for home in world.homes:
                home.start()  # again, if it died
            return all(home.core is not None and home.core.run.generation == generation for home in world.homes)

        await world.guarded(begun, f"begin generation {generation}")
        for home in world.homes:
            assert home.process is not None, "it has begun the generation"
            home.process.countdown = None
        world.counts["checkpoints restored"] += 1

    def _roll_back(self, wanted: int, tries: int) -> None:
        process = Process("operator")
        if tries > 1 and self._rng.random() < 0.5:
            process.countdown = self._rng.randrange(MIN_TOUCHES, MAX_TOUCHES)
        process.on_death.append(lambda: self._died(wanted, tries))
        process.start(self._asked_to_roll_back(process, wanted))

    async def _asked_to_roll_back(self, process: Process, wanted: int) -> None:
        world = self._world
        world.checks.manifests.restoring(wanted)
        disk = SimulatedDisk(world.registrar.platter, process, Connection)
        try:
            done = await asyncio.to_thread(roll_back, DIRECTORY, wanted, disk, world.loop.clock)
        except (UserError, OSError, sqlite3.Error) as error:
            if process.alive:
                world.problem = Violation(13, f"checkpoint {wanted} cannot be restored: {error}")
            return
        if process.alive:
            process.on_death.clear()
            world.checks.manifests.rolled_back(done)
            self._rolled_back = True

    def _died(self, wanted: int, tries: int) -> None:
        world = self._world
        world.counts["restores that died"] += 1
        if self._rng.random() < 0.5:
            world.loop.after(0.0, world.registrar.platter.crash)
        world.loop.after(0.01, self._roll_back, wanted, tries - 1)
