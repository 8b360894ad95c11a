"""A run with several shards: first a storm, then calm, then the last account.

The registrar, shards, fronts and learners run the product's code, on the simulated network, disk and clock. A seed of
this world has nothing in common with the same seed of `world`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from atoll_server.operators.status import status
from atoll_server.processes.core import Core
from atoll_server.processes.shard_core import ShardCore
from atoll_server.run.troubles import troubles
from atoll_server.settings import ShardNumber
from atoll_wire.codec import frame_codec

from tests.simulation.bookkeeping import Violation, is_stored, shard_of
from tests.simulation.cuts import Cuts
from tests.simulation.data_units import DataTruth
from tests.simulation.disk import Platter
from tests.simulation.gateway import Gateway
from tests.simulation.home import Home
from tests.simulation.island import Island
from tests.simulation.late_rows import LateRows
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import CORE, Network, Weather, compression_of
from tests.simulation.seed import simulating
from tests.simulation.sharded_checks import ShardedChecks, made_once

NAMES = ("a", "b", "c")
LATE = "late"  # the learner that joins while the registrar is unavailable
FRONT = "localhost:99"  # the front's address
FRAGMENTS, INNER_STEPS = 4, 8
STORM_S, PEACE_S = 5.0, 120.0
DATA = 0.4  # share of seeds with a dataset
AWAY_S = 25.0  # longest outage of the registrar in the calm
STEADY_S = 5.0  # seconds after which an unchanged count of merged units has ended


class ShardedWorld:
    """The world of one seed. `run` raises Violation. counts: events by kind."""

    def __init__(self, seed: int, loop: VirtualLoop, data: float) -> None:
        self.rng, self.loop = loop.rng, loop
        self.counts: Counter[str] = Counter()
        rng = self.rng
        self.checks = ShardedChecks(loop, max_staleness=rng.choice((1, 4)))
        self.network = Network(loop, self.checks.said)
        self.given = {
            "fragments": FRAGMENTS, "inner_steps": INNER_STEPS, "max_staleness": self.checks.max_staleness,
            "overlap_steps": rng.choice((2.0, 8.0)), "keep_snapshots": rng.choice((2, 3)),
            "compression": compression_of(seed),
        }  # fmt: skip
        count, alone = rng.choice((2, 2, 3, 4)), rng.random() < 0.4
        numbers = [ShardNumber(number=number, count=count) for number in range(count)]
        self.homes = [Home(self, 0, None if alone else numbers.pop(0))]
        self.homes += [Home(self, number, shard) for number, shard in enumerate(numbers, 1)]
        self.checks.homes = self.homes
        self.counts["registrars without fragments"] += alone
        self.fronts = rng.choice(((), (), (FRONT,)))
        self.gateways: dict[str, Gateway] = {}
        self.pace = {name: rng.uniform(0.06, 0.2) for name in (*NAMES, LATE)}
        self.islands: dict[str, Island] = {}
        self.lives: Counter[str] = Counter()
        self.stormy = True
        self.over = False  # whether the last account has begun: learners no longer start
        self.problem: BaseException | None = None
        self.data = DataTruth(seed, data)
        self.late_rows = LateRows(seed, loop.clock, lambda: self.stormy, self.counts)
        self.cuts = Cuts(self, seed)
        self._asked: Counter[str] = Counter()  # operators' requests by learner
        self._pauses = 0
        self._resumed = True  # whether an operator received a confirmation of the newest resume
        self._let_in: set[str] = set()  # evicted learners whose readmission was answered

    @property
    def registrar(self) -> Home:
        return self.homes[0]

    # ------------------------------------------------------------------------------ from start to end

    async def run(self) -> None:
        rng = self.rng
        self.network.weather = Weather(
            rng.uniform(0.001, 0.02), rng.choice((0.0, 0.01, 0.05)), rng.choice((0.0, 0.002, 0.01)),
            rng.choice((0.0, 0.02, 0.1)), rng.choice((0.0, 0.0, 0.005)),
        )  # fmt: skip
        for home in self.homes:
            self.loop.after(rng.uniform(0.0, 0.3), home.start)
        for front in self.fronts:
            self._start_front(front)
        for name in NAMES:
            self.loop.after(rng.uniform(0.0, 0.5), self._start_island, name)
        for at, fault in self._faults():
            self.loop.after(at, fault)
        for at in self.cuts.times(STORM_S):
            self.loop.after(at, self.cuts.ask)
        await self._until(lambda: self.loop.now >= STORM_S)
        await self._peace()

    async def _until(self, done: Callable[[], bool]) -> None:
        """Lets time pass until `done` returns True, and runs the checks meanwhile."""
        turn = 0
        while not done():
            turn += 1
            await asyncio.sleep(0.25)
            self.checks.always()
            core = self.registrar.core
            if isinstance(core, Core) and turn % 4 == 0:
                now = core.clock.monotonic()
                core.watch.look(troubles(core.run, "", now), now)
                status(core.run, core.settings, core.facts(), core.watch.since)
                self.data.look(core)
            self._look()

    def _look(self) -> None:
        if self.problem is not None:
            raise self.problem
        for context in self.loop.unhandled:
            error = context.get("exception")
            raise error if isinstance(error, Violation) else Violation(0, f"{context['message']}: {error!r}") from error
        for name, island in self.islands.items():
            if island.error is None:
                continue
            if "was evicted" in str(island.error):
                if not self.stormy:
                    self._start_island(name)  # its eviction arrived late, after the readmission
            else:
                raise Violation(8, f"{island.process.name} gave up: {island.error}") from island.error

    # ------------------------------------------------------------------------------ the storm

    def _faults(self) -> list[tuple[float, Callable[[], None]]]:
        rng, found = self.rng, list[tuple[float, Callable[[], None]]]()
        for home in self.homes:
            for _ in range(rng.choice((0, 1, 1, 2))):
                found.append((rng.uniform(0.1, STORM_S), partial(self._crash, home)))
            if home.number and rng.random() < 0.5:
                found.append((rng.uniform(0.3, STORM_S), partial(self._part, home)))
        for _ in range(rng.choice((0, 1, 2))):
            found.append((rng.uniform(0.3, STORM_S), self._crash_island))
        for front in self.fronts:
            found.append((rng.uniform(0.3, STORM_S), lambda name=front: self.gateways[name].process.kill()))
        if rng.random() < 0.35:
            found.append((rng.uniform(1.0, STORM_S), self._evict))
        if rng.random() < 0.35:
            found.append((rng.uniform(0.5, STORM_S), self._pause))
        return found

    def _crash(self, home: Home) -> None:
        process = home.process
        if process is None or not process.alive:
            return
        if self.rng.random() < 0.7:
            process.countdown = self.rng.randrange(1, 120)
        else:
            process.kill()

    def _part(self, home: Home) -> None:
        """Cuts a shard off from its registrar. Learners and fronts still reach both."""
        process = home.process
        if process is None or not process.alive or process in self.network.partitioned:
            return
        self.counts["shards cut off"] += 1
        self.checks.note(f"{process.name} is cut off from the registrar")
        self.network.part(process)

        def heal() -> None:
            if process in self.network.partitioned:
                self.checks.note(f"{process.name} is back")
                self.network.heal(process)

        self.loop.after(self.rng.choice((0.3, 1.0, 3.0, 9.0)), heal)

    def _crash_island(self) -> None:
        name = self.rng.choice(NAMES)
        island = self.islands.get(name)
        if island is not None and island.process.alive:
            self.counts["learner crashes"] += 1
            island.process.kill()
            self.loop.after(self.rng.uniform(0.05, 2.0), self._start_island, name)

    def hang_up(self, caller: Process) -> None:
        """Ends the calls of a dead process."""
        for call in [call for call in self.network.calls if call.learner is caller]:
            call.cut(self.rng.uniform(0.0, 4.0))
        self.network.partitioned.pop(caller, None)

    def _start_island(self, name: str) -> None:
        if self.over:
            return
        current = self.islands.get(name)
        if current is not None and current.process.alive:
            return
        addresses = (*self.fronts, CORE) if self.rng.random() < 0.7 else (CORE,)
        life, self.lives[name] = self.lives[name], self.lives[name] + 1
        lateness = self.late_rows.of(name, life)
        island = Island(
            self.network, self.checks, name, life, addresses, self.pace[name], self.rng.getrandbits(32),
            watched=lateness is not None, data=self.data, lateness=lateness,
        )  # fmt: skip
        island.process.on_death.append(lambda: self.hang_up(island.process))
        self.islands[name] = island

    def _start_front(self, name: str) -> None:
        if name in self.gateways and self.gateways[name].process.alive:
            return
        life, self.lives[name] = self.lives[name], self.lives[name] + 1
        self.gateways[name] = gateway = Gateway(self.network, name, life, self.rng)

        def died() -> None:
            self.counts["front crashes"] += 1
            self.network.died(name)
            self.hang_up(gateway.process)
            self.loop.after(self.rng.uniform(0.05, 1.5), self._start_front, name)

        gateway.process.on_death.append(died)

    # ------------------------------------------------------------------------------ operators

    def _evict(self) -> None:
        """Evicts a learner, and readmits it later, however often the registrar dies meanwhile."""
        name = self.rng.choice(NAMES)
        self.counts["evictions"] += 1
        self._let_in.discard(name)
        self._tell(name, "test")
        self.loop.after(self.rng.uniform(0.5, 6.0), self._readmit, name)

    def _readmit(self, name: str) -> None:
        core = self._asked_core()
        if core is not None and name in core.run.registry.entries:
            if name in self._let_in:
                self._start_island(name)
                return
            self._tell(name, "")
        self.loop.after(0.5, self._readmit, name)

    def _asked_core(self) -> Core | None:
        core, process = self.registrar.core, self.registrar.process
        return core if isinstance(core, Core) and process is not None and process.alive else None

    def _tell(self, name: str, reason: str) -> None:
        core, process = self._asked_core(), self.registrar.process
        if core is not None and process is not None and name in core.run.registry.entries:
            self._asked[name] += 1
            process.start(self._evicting(core, name, reason, self._asked[name]))

    async def _evicting(self, core: Core, name: str, reason: str, number: int) -> None:
        incarnation = core.run.registry.entries[name].incarnation
        for home in self.homes:
            self.checks.told_eviction.pop((home.number, name), None)
            if not reason:
                self.checks.shut_out.pop((home.number, name, incarnation), None)
        late = await core.run.evict(name, reason)
        self.checks.note(f"{name} is {'evicted' if reason else 'readmitted'}, late {late}")
        if not reason:
            self._let_in.add(name)  # the operator received the answer, so the change is durable
        self.counts["answers that name late shards"] += bool(late)
        if reason and number == self._asked[name]:
            for home in self._confirming(core, late):
                self.checks.shut_out.setdefault((home.number, name, incarnation), self.loop.now)
                self.checks.told_eviction[home.number, name] = reason

    def _confirming(self, core: Core, late: list[int]) -> list[Home]:
        """Returns the processes that confirmed a change. late: shards that did not.

        Before the first shard attaches, the registrar knows no shards, so it cannot name late ones.
        """
        confirmed = set(core.run.attached.remote) - set(late)
        return [
            home
            for home in self.homes
            if home is self.registrar or (home.shard is not None and home.shard.number in confirmed)
        ]

    def _pause(self) -> None:
        """Pauses the run, and resumes it later, however often the registrar dies meanwhile."""
        self.counts["runs paused"] += 1
        self._resumed = False
        self._set_pause("test")
        self.loop.after(self.rng.uniform(0.3, 4.0), self._resume)

    def _resume(self) -> None:
        if self._resumed:
            return
        self._set_pause("")
        self.loop.after(0.5, self._resume)

    def _set_pause(self, reason: str) -> None:
        core, process = self._asked_core(), self.registrar.process
        if core is not None and process is not None:
            self._pauses += 1
            self.checks.told_pause.clear()
            process.start(self._pausing(core, reason, self._pauses))

    async def _pausing(self, core: Core, reason: str, number: int) -> None:
        late = await core.run.pause(reason)
        self.checks.note(f"pause {reason!r}, late {late}")
        if number == self._pauses:
            self._resumed = not reason
            self.checks.told_pause = {home.number: reason for home in self._confirming(core, late)}

    # ------------------------------------------------------------------------------ calm

    async def _peace(self) -> None:
        """Ends all faults.

        All learners must train, even without the registrar, and each contribution must get a fate.
        """
        self.stormy = False
        self.checks.note("peace")
        self.network.weather = Weather(0.002, 0.0, 0.0, 0.0, 0.0)
        for process in list(self.network.partitioned):
            self.network.heal(process)
        for home in self.homes:
            if home.process is not None:
                home.process.countdown = None
            home.start()
        for name in NAMES:
            self._start_island(name)
        await self._train(NAMES)
        if self.rng.random() < 0.5:
            await self._without_registrar()
        await self.cuts.in_calm()
        if len(self.checks.lines) > 1:
            await self._train(NAMES)
        await self._last_account()

    def _connected(self, names: tuple[str, ...]) -> bool:
        core = self._asked_core()
        free = (
            core is not None
            and not core.run.paused
            and not any(entry.evicted for entry in core.run.registry.entries.values())
        )
        return free and all(name in self.islands and self.islands[name].counters.connected for name in names)

    def _attached(self) -> bool:
        core = self._asked_core()
        shards = [home.core for home in self.homes if home.number]
        return core is not None and all(
            isinstance(shard, ShardCore) and shard.run.attached and shard.run.sessions.start == core.run.sessions.start
            for shard in shards
        )

    async def _train(self, names: tuple[str, ...]) -> None:
        """Waits until all learners are connected, and all fragments have two more versions."""
        await self.guarded(lambda: self._connected(names) and len(self._versions()) == FRAGMENTS, "connect")
        before = self._versions()
        await self.guarded(lambda: all(self._versions().get(n, 0) >= v + 2 for n, v in before.items()), "train")

    async def _without_registrar(self) -> None:
        """Kills the registrar. Rounds continue at all shards. A learner that starts meanwhile joins afterwards.

        The shards must know the registrar's current sessions first. A joining learner could not continue without them.
        """
        await self.guarded(lambda: self._attached() and self._connected(NAMES), "attach")
        self.counts["registrars away in the calm"] += 1
        before = self._versions()
        remote = [index for index, number in self.checks.owners.items() if number]
        self.registrar.stays_away = True
        self.registrar.kill(power=self.rng.random() < 0.5)
        self._start_island(LATE)
        await self.guarded(
            lambda: all(self._versions().get(index, 0) > before[index] for index in remote),
            "go on without the registrar", AWAY_S,
        )  # fmt: skip
        if self.islands[LATE].counters.connected:
            raise Violation(8, "a learner joined while the registrar was away")
        self.registrar.stays_away = False
        self.registrar.start()
        await self._train((*NAMES, LATE))

    async def guarded(self, done: Callable[[], bool], what: str, within_s: float = PEACE_S) -> None:
        """Lets time pass until `done` returns True. what: what the run must do within this time."""
        deadline = self.loop.now + within_s

        def checked() -> bool:
            if self.loop.now > deadline:
                raise Violation(8, f"the run did not {what}; state: {self._seen()}")
            return done()

        await self._until(checked)

    def _versions(self) -> dict[int, int]:
        shards = [shard for home in self.homes if (shard := shard_of(home.core)) is not None]
        return {index: version for shard in shards for index, version in shard.versions().items()}

    def _seen(self) -> str:
        islands = [(i.process.name, i.process.alive, i.counters.connected, i.counters.steps, i.idle(),
                    [t.version for t in i.tracks], i.counters.last_error) for i in self.islands.values()]  # fmt: skip
        homes = [(h.name, h.core is not None, shard_of(h.core) is not None and shard_of(h.core).pending())  # type: ignore[union-attr]
                 for h in self.homes]  # fmt: skip
        return f"{self._versions()}, {homes}, {islands}"

    def _at_rest(self) -> bool:
        """Ends all training. Returns whether no work is in flight, and all learners have the newest versions."""
        for island in self.islands.values():
            island.training = False
        shards = [shard for home in self.homes if (shard := shard_of(home.core)) is not None]
        versions, generation = self._versions(), max(self.checks.lines)
        return (
            len(versions) == FRAGMENTS
            and all(island.follows(generation) for island in self.islands.values())
            and not any(shard.pending() for shard in shards)
            and all(island.idle() and len(island.tracks) == FRAGMENTS for island in self.islands.values())
            and all(i.tracks[index].version == v for i in self.islands.values() for index, v in versions.items())
        )

    def _fates(self) -> dict[Any, Any]:
        fates: dict[Any, Any] = {}
        for home in self.homes:
            core, shard = home.core, shard_of(home.core)
            assert core is not None and shard is not None, "every shard runs at rest"  # noqa: PT018
            fates |= self.checks.in_ledger_of(core, shard)
        return fates

    async def _last_account(self) -> None:
        """Checks that every acknowledged contribution has one fate, and that a restart gives the same state."""

        def complete() -> bool:
            if not self._at_rest():
                return False
            core = self._asked_core()
            if core is None or not is_stored(core):
                return False
            counted = self.data.counted(core, self._fates())
            if counted != steady[0]:
                steady[:] = counted, self.loop.now
            # After a restore, merges can be uncounted (see DataTruth), so that only time tells the end of the count.
            restored = core.run.generation > 1
            return len(set(counted)) == 1 or (restored and self.loop.now >= steady[1] + STEADY_S)

        steady: list[Any] = [None, 0.0]
        await self.guarded(self._at_rest, "come to rest")
        await self.guarded(complete, "count all merged units")
        fates = self._fates()
        for home in self.homes:
            core, shard = home.core, shard_of(home.core)
            assert core is not None and shard is not None, "every shard runs at rest"  # noqa: PT018
            made_once(core)
            self.checks.work_counted_once(core, (*NAMES, LATE))  # type: ignore[arg-type]
            counts = shard.contributions
            if counts.accepted != counts.merged + counts.refused:
                raise Violation(2, f"{home.name}: {counts.accepted} accepted, {counts.merged}, {counts.refused}")
        if missing := [name for name in self.checks.acknowledged if name not in fates]:
            raise Violation(2, f"{missing} have no final fate")
        registrar = self._asked_core()
        assert registrar is not None, "it runs at rest"
        self.data.last_account(registrar, fates)
        before, datasets = self._checksums(), registrar.datasets.as_data()
        for island in self.islands.values():
            island.check_conservation()
            island.check_held()
            for fragment in range(len(island.tracks)):
                if frame_codec.vector_crc32c(island.anchor(fragment)) != before[fragment][1]:
                    raise Violation(4, f"{island.process.name} ends with another anchor of fragment {fragment}")
        self.over = True
        for island in self.islands.values():
            island.process.kill()  # otherwise, their later work would be merged as soon as the shards are back
        for home in self.homes:
            home.kill(power=True)
            home.start()
        await self.guarded(lambda: all(shard_of(home.core) is not None for home in self.homes), "restart")
        if self._checksums() != before:
            raise Violation(10, "the state after a restart differs")
        await self.guarded(
            lambda: (core := self._asked_core()) is not None and core.datasets.as_data() == datasets,
            f"restore the datasets' accounts {datasets}",
        )  # fmt: skip

    def _checksums(self) -> dict[int, tuple[int, int, int]]:
        shards = [shard for home in self.homes if (shard := shard_of(home.core)) is not None]
        return {index: each.state.checksums() for shard in shards for index, each in shard.fragments.items()}

    def sums(self) -> dict[str, int]:
        """Returns counts of events that are not in `counts`."""
        network = self.network
        return {
            "events": network.events, "streams cut": network.cuts, "calls repeated": network.replays,
            "payloads changed": network.changes, "writes lost": sum(h.platter.lost_writes for h in self.homes),
            "contributions": len(self.checks.acknowledged), "versions": sum(self.checks.newest.values()),
            "checkpoints": self.checks.manifests.taken, **self.data.counts, **self.late_rows.sums(),
        }  # fmt: skip

    @property
    def disks(self) -> list[Platter]:
        return [home.platter for home in self.homes]

    def processes(self) -> list[Process]:
        """Returns all processes that may still run."""
        homes = [home.process for home in self.homes if home.process is not None]
        fronts = [gateway.process for gateway in self.gateways.values()]
        return [*homes, *fronts, *(island.process for island in self.islands.values())]


def simulate_sharded(seed: int, *, data: float = DATA) -> ShardedWorld:
    """Runs one seed to its end. data: chance of a dataset. Raises Violation, with the world as `world`."""
    loop = VirtualLoop(random.Random(f"{seed} sharded"))
    with simulating(loop, lambda: ShardedWorld(seed, loop, data)) as world, ExitStack() as stack:
        if world.cuts.wanted:
            stack.enter_context(world.checks.manifests.watching())
        loop.run_until_complete(world.run())
    return world
