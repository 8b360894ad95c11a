"""The faults of a seed, at random times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.bookkeeping import shard_of
from tests.simulation.training import STRIDE

if TYPE_CHECKING:
    import random

    from atoll_server.processes.core import Core

    from tests.simulation.loop import Process
    from tests.simulation.world import World

STORM_S = 2.2
ROTTING_STORM_S = 6.5
UNNOTICED = 0.3  # share of seeds with data units in which a learner does not notice its eviction


class Storm:
    """The faults of one world, drawn from its seed."""

    def __init__(self, world: World) -> None:
        self._world, self._rng = world, world.rng
        self.let_in: set[str] = set()  # evicted learners that were readmitted
        self._asked: Counter[str] = Counter()  # number of operator actions per name
        self._pauses = 0  # requests to pause or resume

    def begin(self) -> None:
        """Schedules each fault."""
        for at, fault in self._faults():
            self._world.loop.after(at, fault)

    def _faults(self) -> Iterator[tuple[float, Callable[[], None]]]:
        for number in range(3 if self._world.rotting else 0):  # each later damage needs new data
            yield self._rng.uniform(1.8, 2.5) * (number + 1), self._crash_core
        for _ in range(self._rng.choice((0, 0, 1, 1, 2))):
            yield self._rng.uniform(0.1, STORM_S), self._crash_core
        for _ in range(self._rng.choice((0, 1, 2))):
            yield self._rng.uniform(0.5, STORM_S), self._crash_island
        for _ in range(self._rng.choice((1, 1, 2))):
            yield self._rng.uniform(0.5, STORM_S), self._partition
        for chance, fault in (
            (0.2, self._replace), (0.2, self._world.told_to_stop.set), (0.3, self._leave), (0.3, self._pause),
            (0.2, self._stillborn), (0.3, self._cancelled_checkpoint), (0.15, self._evict), (0.2, self._go_astray),
            (0.15, self._end_of_job),
        ):  # fmt: skip
            if self._rng.random() < chance:
                yield self._rng.uniform(1.0, STORM_S), fault
        if self._rng.random() < 0.1:
            yield self._rng.uniform(1.0, STORM_S), self._sick_disk
        if self._world.operators.random() < 0.25:
            yield self._world.operators.uniform(0.3, STORM_S), self._pause_run
        for at in self._world.restoring.times(STORM_S):
            yield at, self._world.restoring.stop_and_restore
        for at in self._world.late_rows.leaves(STORM_S):
            yield at, self._leave
        data = self._world.data
        if data.wanted and data.rng.random() < UNNOTICED:
            yield data.rng.uniform(1.0, STORM_S), partial(self._evict_unnoticed, data.rng)
        gates = self._world.gates
        for front in self._world.fronts:
            for harm in gates.choices((self._crash_front, self._part_front), k=gates.choice((1, 1, 2))):
                yield gates.uniform(0.3, STORM_S), partial(harm, front)

    def _crash_core(self) -> None:
        process = self._world.core_process
        if process is not None and process.alive:
            if self._rng.random() < 0.7:
                process.countdown = self._rng.randrange(1, 120)
            else:
                process.kill()

    def _crash_island(self) -> None:
        name = self._rng.choice(self._world.names)
        island = self._world.islands.get(name)
        if island is not None and island.process.alive:
            self._world.counts["learner crashes"] += 1
            island.process.kill()
            self._world.loop.after(self._rng.uniform(0.05, 2.0), self._world.start_island, name)

    def _crash_front(self, name: str) -> None:
        self._world.gateways[name].process.kill()

    def _part_front(self, name: str) -> None:
        """Cuts a region off. Its learners reach their front, but the front reaches no core."""
        front, network = self._world.gateways[name].process, self._world.network
        if not front.alive or front in network.partitioned:
            return
        self._world.counts["regions cut off"] += 1
        self._world.checks.note(f"{front.name} is cut off")
        network.part(front)

        def heal() -> None:
            if front in network.partitioned:
                self._world.checks.note(f"{front.name} is back")
                network.heal(front)

        self._world.loop.after(self._world.gates.choice((0.3, 1.0, 3.0, 9.0)), heal)

    def _cancelled_checkpoint(self) -> None:
        """An operator requests a snapshot and disconnects."""
        core, process = self._world.core, self._world.core_process
        shard = shard_of(core)
        if shard is not None and process is not None and process.alive:
            asked = process.start(shard.snapshots.take())
            self._world.loop.after(self._rng.uniform(0.0, 0.03), asked.cancel)

    def _go_astray(self) -> None:
        """Makes a learner's training diverge for some time."""
        island = self._world.islands.get(self._rng.choice(self._world.names))
        if island is not None:
            self._world.counts["gone astray"] += 1
            island.strayed = True
            island.stride = self._rng.choice((0.1, 3.0))
            self._world.loop.after(self._rng.uniform(0.3, 1.5), setattr, island, "stride", STRIDE)

    def _evict(self) -> None:
        """Evicts a learner, and readmits it later, however often the core dies meanwhile."""
        name = self._rng.choice(self._world.names)
        self._world.counts["evictions"] += 1
        self.let_in.discard(name)
        self._tell(name, "test")
        self._world.loop.after(self._rng.uniform(0.3, 2.0) ** 3, self._undo, name)  # up to 8 s, mostly less

    def _evict_unnoticed(self, rng: random.Random) -> None:
        """Evicts and readmits a learner while it is cut off. It then continues with its work."""
        island = self._world.islands.get(rng.choice(self._world.names))
        if island is None or not island.process.alive or island.process in self._world.network.partitioned:
            return
        self._world.counts["evictions that the learner did not notice"] += 1
        self.let_in.discard(island.name)
        self._world.network.part(island.process)
        for call in [call for call in self._world.network.calls if call.learner is island.process]:
            call.hang_up(0.0)
        self._tell(island.name, "test")
        self._world.loop.after(0.1, self._undo, island.name)
        self._world.loop.after(rng.uniform(0.3, 0.8), self._reconnect, island.process)

    def _reconnect(self, process: Process) -> None:
        if process in self._world.network.partitioned:
            self._world.network.heal(process)

    def _undo(self, name: str) -> None:
        if name in self.let_in:
            self._world.start_island(name)
            return
        self._tell(name, "")
        self._world.loop.after(0.3, self._undo, name)

    def _tell(self, name: str, reason: str) -> None:
        core, process = self._world.core, self._world.core_process
        if core is not None and process is not None and process.alive and name in core.run.registry.entries:
            self._asked[name] += 1
            process.start(self._evicting(core, name, reason, self._asked[name]))

    async def _evicting(self, core: Core, name: str, reason: str, number: int) -> None:
        checks, incarnation = self._world.checks, core.run.registry.entries[name].incarnation
        if not reason:
            checks.fenced_at.pop((name, incarnation), None)
        await core.run.evict(name, reason)
        if not reason:
            self.let_in.add(name)  # the operator received the answer, so the change is durable
        checks.note(f"{name} is evicted" if reason else f"{name} is readmitted")
        if reason and number == self._asked[name]:  # no readmission was requested meanwhile
            checks.fenced_at.setdefault((name, incarnation), self._world.loop.now)

    def _pause_run(self) -> None:
        """Pauses the run, and resumes it later, however often the core dies meanwhile."""
        self._world.counts["runs paused"] += 1
        self._ask_for_pause("test")
        self._world.loop.after(self._world.operators.uniform(0.2, 3.0), self._resume_run)

    def _resume_run(self) -> None:
        if self._world.checks.paused != "":
            self._ask_for_pause("")
            self._world.loop.after(0.3, self._resume_run)

    def _ask_for_pause(self, reason: str) -> None:
        core, process = self._world.core, self._world.core_process
        if core is not None and process is not None and process.alive:
            self._world.checks.paused = None  # unknown until the newest request has an answer
            self._pauses += 1
            process.start(self._set_pause(core, reason, self._pauses))

    async def _set_pause(self, core: Core, reason: str, number: int) -> None:
        """Sends a request. On a full disk, requests wait, and one transaction then commits all of them."""
        await core.run.pause(reason)
        if number == self._pauses:
            self._world.checks.paused = reason
        self._world.checks.note("the run is paused" if reason else "the run is resumed")

    def _stillborn(self) -> None:
        """Kills and restarts a learner several times, each time before its Join arrives."""
        name = self._rng.choice(self._world.names)
        old = self._world.islands.get(name)
        if old is None or not old.process.alive:
            return
        self._world.counts["learner crashes"] += 2
        old.process.kill()

        def born() -> None:
            self._world.start_island(name)
            process = self._world.islands[name].process
            self._world.network.late_s[process] = self._rng.uniform(0.2, 2.0)
            self._world.loop.after(self._rng.uniform(0.01, 0.1), process.kill)
            self._world.loop.after(self._rng.uniform(0.12, 0.3), self._world.start_island, name)
            self._world.loop.after(self._rng.uniform(0.2, 2.0), self._disconnect, name)

        self._world.loop.after(self._rng.uniform(0.0, 1.0), born)

    def _disconnect(self, name: str) -> None:
        island = self._world.islands.get(name)
        for call in [call for call in self._world.network.calls if island and call.learner is island.process]:
            call.cut(self._rng.uniform(0.0, 0.05))

    def _end_of_job(self) -> None:
        """Ends all learners cleanly, and kills the core while it merges their last work."""
        for name in self._world.names:
            self._world.loop.after(self._rng.uniform(0.0, 0.1), self._leave, name)
        self._world.loop.after(0.1, self._when_all_left, 500)

    def _when_all_left(self, most: int) -> None:
        process = self._world.core_process
        if process is None or not process.alive or most == 0:
            return
        if any(island.process.alive for island in self._world.islands.values()):
            self._world.loop.after(0.001, self._when_all_left, most - 1)
        else:
            process.countdown = self._rng.randrange(1, 30)

    def _leave(self, name: str = "", away_s: float | None = None) -> None:
        """Ends a learner cleanly, and starts it again later."""
        name = name or self._rng.choice(self._world.names)
        island = self._world.islands.get(name)
        if island is not None and island.process.alive:
            self._world.counts["good-byes"] += 1
            self._world.leave(island)
            away_s = self._rng.uniform(0.5, 3.0) if away_s is None else away_s
            self._world.loop.after(away_s, self._world.start_island, name)

    def _pause(self) -> None:
        island = self._world.islands.get(self._rng.choice(self._world.names))
        if island is not None:
            self._world.counts["pauses"] += 1
            island.paused_until = self._world.loop.now + self._rng.uniform(0.3, 3.0)

    def _partition(self) -> None:
        island = self._world.islands.get(self._rng.choice(self._world.names))
        if island is None or not island.process.alive or island.process in self._world.network.partitioned:
            return
        self._world.counts["partitions"] += 1
        self._world.checks.note(f"{island.process.name} is cut off")
        self._world.network.part(island.process)

        def heal() -> None:
            if island.process in self._world.network.partitioned:
                self._world.checks.note(f"{island.process.name} is back")
                self._world.network.heal(island.process)

        self._world.loop.after(self._rng.choice((0.3, 1.0, 3.0, 9.0)), heal)

    def _replace(self) -> None:
        """Cuts a learner off and starts it elsewhere with the same name. Then the first process comes back."""
        name = self._rng.choice(self._world.names)
        old = self._world.islands.get(name)
        if old is None or not old.process.alive or old.process in self._world.network.partitioned:
            return
        self._world.counts["zombies"] += 1
        self._world.checks.note(f"{old.process.name} is cut off and replaced")
        self._world.network.part(old.process)
        self._world.zombies.append(old)
        del self._world.islands[name]
        for call in [call for call in self._world.network.calls if call.learner is old.process]:
            call.hang_up(self._rng.uniform(0.0, 2.0))
        self._world.loop.after(self._rng.uniform(0.5, 3.0), self._world.start_island, name)
        self._world.loop.after(
            self._rng.uniform(1.0, 9.0),
            lambda: old.process in self._world.network.partitioned and self._world.network.heal(old.process),
        )

    def _sick_disk(self) -> None:
        what = self._rng.choice(("full", "broken"))
        self._world.counts[f"disk {what}"] += 1
        setattr(self._world.platter, what, True)
        self._world.loop.after(self._rng.uniform(0.2, 3.0), setattr, self._world.platter, what, False)
