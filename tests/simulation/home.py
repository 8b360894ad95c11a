"""The processes of a run with several shards: the registrar and each shard, on its own disk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

from atoll_server.checkpoints.rollback import follow
from atoll_server.processes.attachment import Attachment
from atoll_server.processes.core import Core
from atoll_server.processes.core_process import CoreProcess
from atoll_server.processes.shard_core import GenerationChangedError, ShardCore
from atoll_server.service.learner_service import OuterService
from atoll_server.service.registry_service import RegistryService
from atoll_server.service.shard_operator_service import ShardOperatorService
from atoll_server.settings import CoreSettings, Limits, ShardNumber

from tests.simulation.bookkeeping import DIRECTORY, Violation
from tests.simulation.database import Connection
from tests.simulation.disk import Platter, SimulatedDisk
from tests.simulation.loop import Process
from tests.simulation.network import CORE, Stub

if TYPE_CHECKING:
    from tests.simulation.sharded_world import ShardedWorld

HANG_UP_S = 0.05  # time for a stopping process to end its calls


class Home:
    """The disk and address of one process. number: 0 for the registrar, which may have no fragments.

    core: the process's core, once it has started.
    """

    def __init__(self, world: ShardedWorld, number: int, shard: ShardNumber | None) -> None:
        self.world, self.number, self.shard = world, number, shard
        self.name = f"shard {shard}" if number else "registrar"
        self.address = f"localhost:{number}" if number else CORE
        self.platter = Platter(world.rng)
        self.process: Process | None = None
        self.core: Core | ShardCore | None = None
        self.lives = 0
        self.stays_away = False  # a start that the storm planned is skipped
        world.network.observed[self.address] = partial(world.checks.said_by, self)

    def start(self) -> None:
        """Starts a new process on the same disk, unless one runs."""
        if self.stays_away or (self.process is not None and self.process.alive):
            return
        self.process = process = Process(f"{self.name}#{self.lives}")
        self.lives += 1
        process.on_death.append(lambda: self._died(process))
        process.start(self._live(process), name=process.name)

    def _settings(self) -> CoreSettings:
        rng = self.world.rng
        given: dict[str, Any] = {} if self.shard is None else {"shard": self.shard}
        given |= {"registrar": "localhost:9"} if self.number else {"registrar_only": self.shard is None}
        limits = Limits(
            norm_window=4, notifications=rng.choice((8, 64, 4096)), lease_s=rng.choice((1.0, 30.0)),
            units_silence_s=self.world.data.silence_s,
        )  # fmt: skip
        return CoreSettings.of(
            listen=("127.0.0.1:1",), directory=DIRECTORY, snapshot_every_s=rng.choice((0.5, 1.0, 60.0)), limits=limits,
            **given,
        )  # fmt: skip

    async def _live(self, process: Process) -> None:
        world = self.world
        disk: Any = SimulatedDisk(self.platter, process, Connection)
        core: Core | ShardCore
        if self.number:
            core = ShardCore(self._settings(), disk, world.loop.clock)
        else:
            core = Core(self._settings(), world.given, disk, world.loop.clock)
        try:
            await core.start()
            self.core = core
            world.checks.came_back(self, core)
            world.network.servers[self.address] = (Services(core), process)
            ends = [core.failed]
            if isinstance(core, Core):
                world.cuts.begin(core, process)
            else:
                attachment = Attachment(core, CORE, self.address, self._dialled)
                ends.append(asyncio.create_task(attachment.keep()))
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            try:
                for each in done:
                    each.result()
            except GenerationChangedError as changed:
                await self._follow(core, disk, changed)
        except Violation as violation:
            world.problem = violation
        except Exception as error:
            if process.alive:
                world.problem = Violation(8, f"{self.name} ended: {error!r}")
                world.problem.__cause__ = error
            process.kill()

    async def _follow(self, core: CoreProcess, disk: Any, changed: GenerationChangedError) -> None:
        """Rolls the stopped shard back to the run's checkpoint, then starts it again in another process."""
        world, process = self.world, self.process
        assert process is not None, "the process runs"
        world.checks.note(f"{process.name} rolls back")
        world.network.hang_up(self.address)
        await asyncio.sleep(HANG_UP_S)
        await core.stop()
        await asyncio.to_thread(follow, DIRECTORY, changed.generation, changed.snapshot, disk, world.loop.clock)
        world.counts["shards rolled back"] += 1
        world.loop.after(0.0, self.start)
        process.kill()

    @contextlib.asynccontextmanager
    async def _dialled(self) -> AsyncIterator[Stub]:
        process = self.process
        assert process is not None, "the process runs"
        stub = Stub(self.world.network, process, CORE)
        try:
            yield stub
        finally:
            await stub.close()

    def kill(self, *, power: bool) -> None:
        """Kills the process. power: with a power failure, which may lose unsynced data."""
        if self.process is not None:
            self.process.kill()
        if power:
            self.platter.crash()

    def _died(self, process: Process) -> None:
        world = self.world
        self.core = None
        world.counts[f"{'shard' if self.number else 'registrar'} crashes"] += 1
        world.checks.note(f"{process.name} dies")
        world.network.died(self.address)
        world.hang_up(process)
        if not world.stormy:
            return
        if world.rng.random() < 0.6:
            world.loop.after(0.0, self._power)  # later, because the process may be in the middle of a write
        long = world.rng.random() < 0.2
        world.counts["long absences"] += long
        world.loop.after(world.rng.uniform(4.0, 12.0) if long else world.rng.uniform(0.05, 1.5), self.start)

    def _power(self) -> None:
        if self.process is not None and not self.process.alive:
            self.world.counts["power failures"] += 1
            self.platter.crash()


class Services:
    """The services of one process at its address."""

    def __init__(self, core: Core | ShardCore) -> None:
        self._outer = OuterService(core)
        self._other = RegistryService(core) if isinstance(core, Core) else ShardOperatorService(core)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other if name in {"Attach", "FetchInitial", "TakeCheckpoint"} else self._outer, name)
