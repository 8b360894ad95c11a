"""A core, its learners, a network and a disk: first a storm, then calm, then the last account."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Set

from atoll_server.checkpoints.restore import Origin, restore
from atoll_server.checkpoints.snapshot import snapshot_path
from atoll_server.ledger import run_ledger
from atoll_server.ledger.rows import SnapshotRow
from atoll_server.operators.status import status
from atoll_server.processes.core import Core
from atoll_server.run.troubles import troubles
from atoll_server.service.learner_service import OuterService
from atoll_server.settings import CoreSettings, Limits
from atoll_server.shard.shard import Shard
from atoll_wire.codec import frame_codec
from atoll_wire.errors import UserError

from tests.simulation.bookkeeping import DIRECTORY, Violation, is_stored, shard_of, sums, the_shard
from tests.simulation.caller import FROM_THE_START, GATED, LEASE_S, MERGES, Caller, Harm
from tests.simulation.checks import Checks
from tests.simulation.data_units import DataTruth
from tests.simulation.database import Connection
from tests.simulation.disk import Platter, SimulatedDisk
from tests.simulation.gateway import Gateway
from tests.simulation.handover import hand_over
from tests.simulation.hostile import LIES, Hostile, Lie, check_influence, is_usual_known, may_come
from tests.simulation.island import Island
from tests.simulation.joins import Entrance
from tests.simulation.late_rows import LateRows
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import CORE, Network, Weather, compression_of
from tests.simulation.rank_faults import RankFaults
from tests.simulation.restoring import Restoring
from tests.simulation.storm import ROTTING_STORM_S, STORM_S, Storm
from tests.simulation.training import Masters
from tests.simulation.weights import Weights

NAMES = ("a", "b", "c", "d")
FRAGMENTS, INNER_STEPS = 4, 8
PEACE_S = 90.0
MIN_EVENTS = 300
HARMED = 0.12  # share of the seeds with a hostile learner from LIES
HARMED_TOO = 0.08  # share of the other seeds with another kind
EARLY = 0.5  # share of Lie.INFLATE that becomes Lie.EARLY
MORE_EARLY = 0.01  # share of all others with Lie.EARLY, to hold tokens back more often
MORE_LATER = 0.015  # share of all others with one of LATER_LIES
LATER_LIES = (Lie.BOAST, Lie.INFLATE)
LIE_S, LATEST_LIE_S = 3.0, 25.0  # a storm with one of LATER_LIES lasts until the liar has trained for LIE_S
STRANGE_STORM_S = 3.5
LATE_STORM_S = 6.0  # with late rows, so that weights are loaded while learners have much work
STANDING = ("Follow", "Report")  # calls that last as long as a learner is connected


class World:
    """The world of one seed. `run` raises Violation. counts: events by kind."""

    def __init__(self, seed: int, loop: VirtualLoop, storm: Callable[[World], Storm], data: float) -> None:
        """storm: a constructor of the world's faults. data: chance of a dataset."""
        self.rng, self.loop, self._storm = loop.rng, loop, storm
        self.checks = Checks(loop, max_staleness=self.rng.choice((1, 4)))
        self.network = Network(loop, self.checks.said)
        self.platter = Platter(self.rng)
        self.counts: Counter[str] = Counter()
        self.overlap_steps = self.rng.choice((2.0, 8.0))
        self.clip_norm = self.rng.choice((0.0, 0.0, 1.5))
        self.record = self.rng.random() < 0.3
        self.rotting = self.rng.random() < 0.15  # whether a power failure damages data on the disk
        self.names = NAMES[: self.rng.choice((3, 3, 4))]
        self.pace = {name: self.rng.uniform(0.06, 0.2) for name in self.names}
        gates = random.Random(seed + 0.5)  # a separate stream, so that seeds without fronts do not change
        self.fronts = gates.choice(((), (), ("front-1",), ("front-1", "front-2")))
        self.addresses = {name: self._addresses(gates) for name in self.names}
        self.gates, self.gateways = gates, dict[str, Gateway]()
        self.operators = random.Random(seed + 0.25)  # a separate stream
        quorum, grace = random.Random(seed + 0.75).choice(((2, 0.8), (2, 0.8), (1, 0.0), (2, 0.0)))
        self.waiting = {"quorum": {"learners": quorum}, "grace_ratio": grace} if grace == 0.0 else {}
        self.islands: dict[str, Island] = {}
        self._readmitted: Set[str] = set()  # learners that were evicted before
        self.zombies: list[Island] = []
        self._harm = random.Random(f"{seed} hostile")  # a separate stream
        self.harmed = self._harm.random() < HARMED
        self.hostile: Hostile | None = None
        self._hostile_since = 0.0
        self._later = random.Random(f"{seed} hostile kinds")  # a separate stream
        self.harm: Lie | Harm | None = None
        if self._later.random() < HARMED_TOO and not self.harmed:
            self.harm = self._later.choice((*LATER_LIES, *Harm))
            if self.harm is Lie.INFLATE and random.Random(f"{seed} hostile before others").random() < EARLY:
                self.harm = Lie.EARLY
        elif not self.harmed and random.Random(f"{seed} hostile and early").random() < MORE_EARLY:
            self.harm = Lie.EARLY
        elif not self.harmed and (more := random.Random(f"{seed} hostile and later")).random() < MORE_LATER:
            self.harm = more.choice(LATER_LIES)
        self.caller: Caller | None = None
        self.late_rows = LateRows(seed, loop.clock, lambda: self.stormy, self.counts)
        self.weights = Weights(self, seed)
        self.restoring = Restoring(self, seed)
        self.rank_faults = RankFaults(self, seed)
        self.data = DataTruth(seed, data)
        calm = not self.harmed and self.harm is None and self.weights.strange is None
        self.data.hands_over = self.data.may_hand_over and calm
        self.compression = compression_of(seed)
        self.lives: Counter[str] = Counter()
        self.core_process: Process | None = None
        self.core: Core | None = None
        self.told_to_stop = asyncio.Event()
        self.snapshots: list[SnapshotRow] = []  # the core's snapshots when it died, oldest first
        self.rotted_at = 0.0
        self.stormy = True
        self.over = False  # whether the last account has begun: learners no longer start
        self.problem: BaseException | None = None

    # ------------------------------------------------------------------------------ from start to end

    async def run(self) -> None:
        self.network.weather = Weather(
            self.rng.uniform(0.001, 0.02), self.rng.choice((0.0, 0.01, 0.05)), self.rng.choice((0.0, 0.002, 0.01)),
            self.rng.choice((0.0, 0.02, 0.1)), self.rng.choice((0.0, 0.0, 0.005)),
        )  # fmt: skip
        self.start_core()
        for front in self.fronts:
            self.start_front(front)
        for name in self.names:
            self.loop.after(self.rng.uniform(0, 0.5), self.start_island, name)
        storm = self._storm(self)
        self._readmitted = storm.let_in
        storm.begin()
        late = self.late_rows.wanted and self.weights.strange is not None
        self.weights.begin(LATE_STORM_S if late else STRANGE_STORM_S)
        if self.harmed:
            self.loop.after(self._harm.uniform(0.3, 1.5), self._harm_comes, self._harm.choice(LIES), self._harm)
        elif isinstance(self.harm, Lie):
            self.loop.after(self._later.uniform(0.3, 1.5), self._harm_comes, self.harm, self._later)
        elif self.harm is not None:
            at = 0.0 if self.harm in FROM_THE_START else self._later.uniform(0.5, 1.5)
            self.loop.after(at, self._caller_comes, self.harm)
        long = self.rotting or self.harmed or isinstance(self.harm, Lie)
        strange_s = LATE_STORM_S if late else STRANGE_STORM_S
        storm_s = ROTTING_STORM_S if long else strange_s if self.weights.strange is not None else STORM_S
        await self.watch(
            lambda: self.loop.now >= storm_s and not self.rank_faults.awaited() and not self._is_lie_awaited()
        )
        await self._peace()

    def _is_lie_awaited(self) -> bool:
        """Returns whether the storm must last longer, because a liar must still train."""
        trained = self.hostile is not None and self.loop.now >= self._hostile_since + LIE_S
        return self.harm in LATER_LIES and not trained and self.loop.now < LATEST_LIE_S

    async def watch(self, done: Callable[[], bool]) -> None:
        """Lets time pass until `done` returns True, and runs the checks meanwhile."""
        for turn in itertools.count():
            if done():
                return
            await asyncio.sleep(0.25)
            self.checks.always()
            if turn % 4 == 0 and shard_of(self.core) is not None:
                self._look_as_an_operator(self.core)
            self._look()

    def _look_as_an_operator(self, core: Core) -> None:
        now = core.clock.monotonic()
        core.watch.look(troubles(core.run, "", now), now)
        status(core.run, core.settings, core.facts(), core.watch.since)

    def _look(self) -> None:
        if shard_of(self.core) is not None:
            self.data.look(self.core)
        if self.problem is not None:
            raise self.problem
        for context in self.loop.unhandled:
            error = context.get("exception")
            raise error if isinstance(error, Violation) else Violation(0, f"{context['message']}: {error!r}") from error
        if self.caller is not None:
            self.caller.check()
        for name, island in self.islands.items():
            older = next((z for z in self.zombies if z.name == name and z.process.alive), None)
            if any(self.network.open(method, caller=island.process) > 1 for method in STANDING):
                raise Violation(9, f"calls are left open: {self._leaks()}")
            if island.error is not None and older is not None and self._took_over(older, island):
                self.islands[name] = older
            elif island.error is not None and "was evicted" in str(island.error):
                if not self.stormy:
                    self.start_island(name)  # its eviction arrived late, after the readmission
            elif island.error is not None and self.weights.ended(island):
                island.error = None
            elif island.error is not None:
                raise Violation(8, f"{island.process.name} gave up: {island.error}") from island.error

    def _took_over(self, older: Island, newer: Island) -> bool:
        """Returns whether a process that was cut off and replaced rightly trains instead of its replacement.

        Either it came back before the replacement joined. Or the replacement was evicted, and the older process joined
        for the first time after the readmission: the core cannot know that it is older.
        """
        if "is already connected" in str(newer.error):
            return True
        first = older.counters.connected and not older.counters.reconnects
        return first and newer.name in self._readmitted and "was started again elsewhere" in str(newer.error)

    async def _peace(self) -> None:
        """Ends all faults. All learners must come back and train, and each contribution must get a fate."""
        self.stormy = False
        self.network.weather = Weather(0.002, 0.0, 0.0, 0.0, 0.0)
        self.platter.full = self.platter.broken = False
        for process in list(self.network.partitioned):
            self.network.heal(process)
        self.told_to_stop.clear()
        if self.hostile is not None:
            self.hostile.process.kill()
        for island in (*self.zombies, *self.islands.values()):
            if island in self.zombies or island.leaving:
                island.process.kill()
        self.weights.peace()
        for name in self.names:
            if name not in self.islands or not self.islands[name].process.alive:
                self.start_island(name)
        if self.core_process is None or not self.core_process.alive:
            self.start_core()
        for front in self.fronts:
            self.start_front(front)
        assert self.core_process is not None
        self.core_process.countdown = None
        self.checks.note("peace")
        deadline = self.loop.now + PEACE_S
        trained = {name: self.islands[name].counters.steps for name in self.names}
        versions = sum(self.checks.newest.values()) + (0 if self.caller is None else MERGES)

        trained_on: set[str] = set()

        def useful() -> bool:
            assert self.loop.now < deadline, self._stuck("did not train on")
            if self.caller is not None and sum(self.checks.newest.values()) < versions:
                return False  # merges must continue in the presence of the hostile learner
            for name, island in self.islands.items():
                trains_on = island.counters.connected and island.counters.steps > trained[name] + 1
                if trains_on and self.network.events >= MIN_EVENTS:
                    trained_on.add(name)
                    island.training = island.feed is not None and island.feed.others_wait()
            return trained_on >= self.islands.keys()

        await self._guarded(useful)
        if self.caller is not None:
            self.caller.process.kill()

        if self.data.hands_over:
            await hand_over(self, self.data.rng)

        def at_rest() -> bool:
            for island in self.islands.values():
                island.training = False  # again, because learners may have been readmitted since
            assert self.loop.now < deadline, self._stuck("did not come to rest")
            shard = shard_of(self.core)
            return (
                shard is not None
                and not shard.pending()
                and all(i.idle() and i.follows(shard.context.generation) for i in self.islands.values())
                and all(len(i.tracks) == len(shard.fragments) for i in self.islands.values())
                and all(
                    i.tracks[index].version == version
                    for i in self.islands.values()
                    for index, version in shard.versions().items()
                )
                and not self._leaks()
                and is_stored(self.core)
            )

        while True:
            await self._guarded(at_rest)
            await self.core.datasets.look()  # this counts the newest merges
            if at_rest():
                break
        await self._last_account()

    async def _guarded(self, done: Callable[[], bool]) -> None:
        try:
            await self.watch(done)
        except AssertionError as error:
            raise Violation(8, str(error)) from error

    def _stuck(self, what: str) -> str:
        islands = ", ".join(
            f"{i.process.name} steps {i.counters.steps} connected {i.counters.connected} idle {i.idle()} "
            f"versions {[t.version for t in i.tracks]}"
            for i in self.islands.values()
        )
        shard = shard_of(self.core)
        core = (
            None
            if shard is None
            else (shard.versions(), [str(key) for each in shard.fragments.values() for key in each.held])
        )
        return f"{what}: {islands}; core {core}; leaks {self._leaks()}"

    def _leaks(self) -> list[str]:
        """Returns unneeded open calls. Per connection to the core, a learner needs one call of each kind."""
        found = [
            f"{island.process.name} has {count} calls of {method}"
            for island in self.islands.values()
            for method in STANDING
            if (count := self.network.open(method, caller=island.process)) > 1
        ]
        for front in self.gateways.values():
            for method in STANDING:
                up, down = (
                    self.network.open(method, caller=front.process),
                    self.network.open(method, address=front.name),
                )
                if up > down:
                    found.append(f"{front.process.name} has {up} calls of {method} for {down} of learners")
        entries = self.core.run.registry.entries.values() if self.core is not None else ()
        return found + [
            f"the core has {len(e.streams)} streams of {e.name}" for e in entries if len(e.streams) > len(STANDING)
        ]

    async def _last_account(self) -> None:
        """Checks that every acknowledged contribution has one fate, and that a restart gives the same state."""
        core = self.core
        assert core is not None
        shard = the_shard(core)
        fates = self.checks.in_ledger(core)
        for name in self.checks.acknowledged:
            if name not in fates:
                raise Violation(2, f"{name} has no fate at the end")
        sums(core)
        counts = shard.contributions
        if counts.accepted != counts.merged + counts.refused:
            text = f"{counts.accepted} accepted, {counts.merged} merged, {counts.refused} refused"
            raise Violation(2, f"the core's own sums do not add up: {text}")
        self.checks.work_counted_once(core, self.names)
        if self.hostile is not None:
            self.counts["hostile contributions"] += self.hostile.sent
            trained = sum(tokens for (name, _), tokens in self.checks.trained.items() if name in self.names)
            check_influence(core, self.hostile, self.names, trained, self.loop.now)
        self.data.last_account(core, fates)
        before, datasets = checksums_of(shard), core.datasets.as_data()
        for island in self.islands.values():
            island.check_conservation()
            island.check_held()
        for island in self.islands.values():
            for fragment in range(len(island.tracks)):
                if frame_codec.vector_crc32c(island.anchor(fragment)) != before[fragment][1]:
                    raise Violation(4, f"{island.process.name} ends with another anchor of fragment {fragment}")
        self.over = True
        for island in self.islands.values():
            island.process.kill()  # otherwise, their later work would be merged as soon as the core is back
        self.kill_core(power=True)
        self.start_core()
        await self._guarded(lambda: shard_of(self.core) is not None)
        assert self.core is not None
        if checksums_of(the_shard(self.core)) != before:
            raise Violation(10, "the state after a restart differs")
        if (again := self.core.datasets.as_data()) != datasets:
            raise Violation(14, f"the accounts of the datasets are {again} after a restart, and were {datasets}")
        if self.record:
            assert self.core_process is not None
            self.counts["replays beside a core about to die"] += self.core_process.countdown is not None
            auditor = SimulatedDisk(self.platter, Process("auditor"), Connection)  # the core may be about to die
            try:
                db = self.core.run.writer._db
                origin = Origin.of(run_ledger.get_meta(db))
                replayed = restore(db, origin, DIRECTORY, auditor, self.loop.clock, from_start=True)
            except UserError as error:
                raise Violation(10, f"the run cannot be replayed from the start: {error}") from error
            if {index: state.checksums() for index, state in replayed.states.items()} != before:
                raise Violation(10, "a replay from the start gives another state")
            self.counts["replayed from the start"] += 1

    # ------------------------------------------------------------------------------ processes

    def sums(self) -> dict[str, int]:
        """Returns counts of events that are not in `counts`."""
        network = self.network
        return {
            "events": network.events, "streams cut": network.cuts, "calls repeated": network.replays,
            "payloads changed": network.changes, "writes lost": self.platter.lost_writes, "syncs": self.platter.syncs,
            "contributions": len(self.checks.acknowledged), "versions": sum(self.checks.newest.values()),
            **self.data.counts, **self.late_rows.sums(),
        }  # fmt: skip

    @property
    def disks(self) -> list[Platter]:
        return [self.platter]

    def processes(self) -> list[Process]:
        """Returns all processes that may still run."""
        islands = [island.process for island in (*self.islands.values(), *self.zombies)]
        islands += [hostile.process for hostile in (self.hostile, self.caller) if hostile is not None]
        servers = [gateway.process for gateway in self.gateways.values()]
        return [*servers, *islands] if self.core_process is None else [self.core_process, *servers, *islands]

    def start_core(self) -> None:
        """Starts a new core process on the same disk."""
        process = Process(f"core#{self.lives['core']}")
        self.lives["core"] += 1
        self.core_process = process
        process.on_death.append(lambda: self._core_died(process))
        process.start(self._core(process), name=process.name)

    async def _core(self, process: Process) -> None:
        every_s = 0.3 if self.rotting else self.rng.choice((0.5, 1.0, 60.0))
        keep_snapshots = self.rng.choice((2, 3))
        self.rng.choice((1, 2, 256))  # unused; still drawn, so that seeds keep their meaning
        settings = CoreSettings.of(
            listen=("127.0.0.1:1",), directory=DIRECTORY, snapshot_every_s=every_s,
            limits=Limits(
                lease_s=LEASE_S if self.harm in FROM_THE_START else Limits().lease_s,
                norm_window=4, notifications=self.rng.choice((8, 64, 4096)),
                update_cache_versions=self.rng.choice((1, 4, 16)), units_silence_s=self.data.silence_s,
            ),
        )  # fmt: skip
        given = {"record": self.record, "keep_snapshots": keep_snapshots,
                 "fragments": FRAGMENTS, "inner_steps": INNER_STEPS, "max_staleness": self.checks.max_staleness,
                 "overlap_steps": self.overlap_steps, "clip_norm": self.clip_norm, "compression": self.compression,
                 **self.waiting}  # fmt: skip
        core = Core(settings, given, SimulatedDisk(self.platter, process, Connection), self.loop.clock)
        try:
            await core.start()
            self.core = core
            self.checks.restored(core)
            self._harm_stays_if_judged(core)
            self.network.servers[CORE] = (self._service(core), process)
            await asyncio.wait(
                {core.failed, asyncio.create_task(self.told_to_stop.wait())}, return_when="FIRST_COMPLETED"
            )
            if core.failed.done():
                core.failed.result()
            await self._end_cleanly(core)
            process.kill()
        except Violation as violation:
            self.problem = violation
        except Exception as error:
            if process.alive and not (self.platter.full or self.platter.broken):
                self.problem = Violation(8, f"the core ended: {error!r}")
                self.problem.__cause__ = error
            self.checks.note(f"core ended: {error!r}")
            self.counts["cores that ended by themselves"] += 1
            process.kill()

    def _service(self, core: Core) -> OuterService:
        service = OuterService(core)
        if self.harm in GATED:
            service.entrance = Entrance(core, service)  # type: ignore[attr-defined]
        return service

    async def _end_cleanly(self, core: Core) -> None:
        """Ends the core cleanly, as `server.serve` does at SIGTERM."""
        self.told_to_stop.clear()
        if (shard := core.run.shard) is not None:
            shard.follower_log.close()
        self.network.servers.pop(CORE, None)
        await core.stop()
        self.counts["clean ends"] += 1

    def kill_core(self, *, power: bool) -> None:
        """Kills the core with SIGKILL. power: with a power failure, which may lose unsynced data."""
        process = self.core_process
        if process is not None and process.alive:
            process.kill()
        if power:
            self.platter.crash()
            self.counts["power failures"] += 1

    def _core_died(self, process: Process) -> None:
        self.counts["core crashes"] += 1
        self.checks.note(f"{process.name} dies")
        if (shard := shard_of(self.core)) is not None:
            self.snapshots = list(shard.snapshots.rows)
        self.checks.core = self.core = None
        self.network.died(CORE)
        if self.stormy and self.rng.random() < 0.6:
            self.loop.after(0.0, self._power)  # later, because the process may be in the middle of a write
        self.loop.after(self.rng.uniform(0.05, 1.5), self._core_again)

    def _power(self) -> None:
        self.platter.crash()
        # The core survives a second damage only if it had time to replace the first damaged snapshot. The design covers
        # no more.
        healed = bool(self.snapshots) and self.snapshots[-1].taken_at > self.rotted_at
        files = [str(snapshot_path(DIRECTORY, row.id)) for row in self.snapshots]
        if healed and self.rng.random() < (0.9 if self.rotting else 0.2) and self.platter.rot(files):
            self.rotted_at = self.loop.clock.wall()
            self.counts["snapshots damaged"] += 1
        self.counts["power failures"] += 1

    def _core_again(self) -> None:
        if self.core_process is not None and not self.core_process.alive:
            self.start_core()
            if self.stormy and self.rng.random() < 0.15:  # the same fault may kill the core repeatedly
                self.core_process.countdown = self.rng.randrange(20, 400)

    def start_island(self, name: str) -> None:
        """Starts a new process of a learner. Does nothing after the end, when a timer of the storm may still call."""
        if self.over:
            return
        current = self.islands.get(name)
        if current is not None and current.process.alive:
            current.due_again = current.leaving
            return
        life = self.lives[name]
        self.lives[name] += 1
        seed = self.rng.getrandbits(32)
        masters, watched = self.weights.masters(name), self.weights.watched
        lateness = self.late_rows.of(name, life)
        several = random.Random(f"{seed} several").choice((1, 1, 1, 2, 3))
        size = several if masters is Masters.NONE and (lateness is not None or not watched) else 1
        slow = self.rank_faults.slow_rank(size)
        island = Island(
            self.network, self.checks, name, life, self.addresses[name], self.pace[name], seed, masters,
            watched=watched or lateness is not None, size=size, slow=slow, data=self.data, lateness=lateness,
        )  # fmt: skip
        self.counts["islands of several ranks"] += size > 1
        self.counts["islands with a slow rank"] += slow is not None
        island.process.on_death.append(lambda: self._island_died(island))
        self.islands[name] = island

    def _harm_comes(self, lie: Lie, rng: random.Random) -> None:
        """Starts a hostile learner as soon as the core can judge its lie."""
        if not self.stormy:
            return
        if self.core is None or not may_come(lie, self.core, self.names):
            self.loop.after(0.1, self._harm_comes, lie, rng)
            return
        self.counts[f"hostile learners: {lie.name.lower()}"] += 1
        self.checks.note(f"a hostile learner starts: {lie}")
        addresses, pace = rng.choice(list(self.addresses.values())), rng.uniform(0.06, 0.2)
        island = Hostile(lie, self.network, self.checks, addresses, pace, rng.getrandbits(32))
        island.process.on_death.append(lambda: self._hang_up(island.process))
        self.hostile, self._hostile_since = island, self.loop.now

    def _harm_stays_if_judged(self, core: Core) -> None:
        """Ends a hostile learner that the core cannot judge, because a restore removed the norms."""
        if self.hostile is not None and self.hostile.lie is Lie.FLOOD and not is_usual_known(core):
            self.hostile.process.kill()

    def leave(self, island: Island, *, drains: bool = False) -> None:
        """Makes a learner leave.

        An early liar leaves with the last honest learner, because alone it would be its own measure.
        """
        island.leaving = True
        drains = drains or (island.lateness is not None and island.lateness.drains)
        island.process.start(island.leave(drains=drains))
        all_leave = all(each.leaving or not each.process.alive for each in self.islands.values())
        if self.hostile is not None and self.hostile.lie is Lie.EARLY and all_leave:
            self.hostile.process.kill()

    def _caller_comes(self, harm: Harm) -> None:
        self.counts[f"hostile callers: {harm.name.lower()}"] += 1
        self.checks.note(f"a hostile process starts: {harm}")
        self.caller = caller = Caller(harm, self, self._later)
        caller.process.on_death.append(lambda: self._hang_up(caller.process))

    def _island_died(self, island: Island) -> None:
        self.checks.note(f"{island.process.name} dies")
        self.counts["islands that died between their ranks' uploads"] += self.rank_faults.between_uploads(island)
        self._hang_up(island.process)
        if island.due_again:  # its Leave took longer than its planned absence
            self.counts["started as soon as they had left"] += 1
            self.loop.after(0.0, self.start_island, island.name)

    def _hang_up(self, caller: Process) -> None:
        for call in [call for call in self.network.calls if call.learner is caller]:
            call.cut(self.rng.uniform(0.0, 4.0))
        self.network.partitioned.pop(caller, None)

    def _addresses(self, rng: random.Random) -> tuple[str, ...]:
        """Returns the addresses that a learner tries in turn: fronts, and sometimes the core itself."""
        if not self.fronts:
            return (CORE,)
        fronts = rng.sample(self.fronts, len(self.fronts))
        return (*fronts, CORE) if rng.random() < 0.2 else tuple(fronts)

    def start_front(self, name: str) -> None:
        """Starts a new process of a front."""
        if name in self.gateways and self.gateways[name].process.alive:
            return
        life = self.lives[name]
        self.lives[name] += 1
        gateway = Gateway(self.network, name, life, self.gates)
        gateway.process.on_death.append(lambda: self._front_died(gateway))
        self.gateways[name] = gateway

    def _front_died(self, gateway: Gateway) -> None:
        self.counts["front crashes"] += 1
        self.checks.note(f"{gateway.process.name} dies")
        self.network.died(gateway.name)
        self._hang_up(gateway.process)
        self.loop.after(self.gates.uniform(0.05, 1.5), self.start_front, gateway.name)


def checksums_of(shard: Shard) -> dict[int, tuple[int, int, int]]:
    """Returns the checksums of each fragment's durable state."""
    return {index: fragment.state.checksums() for index, fragment in shard.fragments.items()}
