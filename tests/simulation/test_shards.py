"""Two shards of one run give the same bytes and sums as one shard, even if shards are killed.

Shards, their copies of the run, and ledgers are the product's, on simulated disks and a virtual clock. Learner,
fragment and version determine the work in a contribution. Every round waits for all learners, and no value depends on
the run's token count.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import safetensors.numpy
import structlog
from atoll_server.access.refusals import Refused
from atoll_server.checkpoints.restore import INITIAL, LEDGER, Origin, restore
from atoll_server.learners.learner_counters import IncarnationCounters
from atoll_server.ledger import database, run_ledger, shard_ledger
from atoll_server.ledger.ledger_writer import LedgerWriter
from atoll_server.ledger.lineage import Line
from atoll_server.merging import merge
from atoll_server.processes.replica import Replica
from atoll_server.quorum import Quorum
from atoll_server.rounds import syncer_events as ev
from atoll_server.rounds.round_state import Phase
from atoll_server.run.attached_shards import AttachedShards
from atoll_server.run.registrar import Registrar
from atoll_server.run.run_clock import RunClock
from atoll_server.settings import CoreSettings, Limits, RunSettings
from atoll_server.shard.intake import Intake
from atoll_server.shard.shard import Shard
from atoll_server.shard.shard_restore import restore_shard
from atoll_server.shard_context.context import ShardContext
from atoll_server.telemetry.journal import Journal
from atoll_server.telemetry.metrics import Metrics
from atoll_server.uploads.uploads import Upload
from atoll_wire import outer_pb2 as pb
from atoll_wire import shards_pb2 as sh
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import Layout, plan

from tests.simulation.database import Connection
from tests.simulation.disk import Platter, SimulatedDisk
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.seed import determinism
from tests.simulation.training import TENSORS

DIRECTORY = Path("/shard")
NAMES = ("a", "b", "c")
FRAGMENTS, VERSIONS = 4, 6
STEP_S, LOOK_S = 0.5, 0.05
REPORTED = 1000  # tokens of a reported step; enough for all declared tokens to count
Kills: TypeAlias = Mapping[int, float]  # shard -> time after which it dies, once it has pending work
RUN = RunSettings(inner_steps=8, overlap_steps=4.0, fragments=FRAGMENTS, quorum=Quorum(share=1.0))


def _initial_parameters() -> bytes:
    rng = np.random.default_rng(7)
    return safetensors.numpy.save({each.name: rng.standard_normal(each.shape).astype(np.float32) for each in TENSORS})


FIRST = _initial_parameters()


class Home:
    """One shard's process with its own disk. After a kill, it restores its state from its ledger.

    run: the process's copy of the run.
    """

    def __init__(
        self, registrar: Registrar, layout: Layout, owned: Collection[int], number: int, rng: random.Random
    ) -> None:
        self._registrar = registrar
        self._layout = layout
        self._owned = owned
        self._number = number
        self._platter = Platter(rng)
        self.run: Replica
        self.shard: Shard | None = None
        self.process = Process("shard")

    def begin(self) -> None:
        """Starts a new process on the same disk."""
        self.process = Process("shard")
        self.process.start(self._live())

    def check_tokens(self) -> None:
        """Checks that followers received the token count that each merge used."""
        assert self.shard is not None, "all shards run at the end"
        told = [each.published for each in self.shard.follower_log._kept if each.HasField("published")]
        for published in told:
            (row,) = shard_ledger.merges(self.db, 1, published.fragment, published.version - 1, published.version)
            assert row.run_tokens == published.run_tokens
        assert max(published.run_tokens for published in told) > 0

    def kill(self) -> None:
        """Kills the process, with a power failure."""
        self.shard = None
        self.process.kill()
        self._platter.crash()

    async def _live(self) -> None:
        disk: Any = SimulatedDisk(self._platter, self.process, Connection)
        for name in ("spool", "snapshots"):
            disk.make_directory(DIRECTORY / name)
        run = Replica(Limits(), self._registrar.clock, self._registrar.journal, self._number)
        first = not disk.exists(DIRECTORY / LEDGER)
        self.db = db = database.open_ledger(DIRECTORY / LEDGER, disk)
        if first:
            self._write_first(disk)
        origin = Origin(Line(), self._layout, hashlib.sha256(FIRST).hexdigest(), frozenset(self._owned))
        restored = restore(db, origin, DIRECTORY, disk, run.clock)
        settings = CoreSettings.of(
            listen=("127.0.0.1:1",), directory=DIRECTORY, snapshot_every_s=2.0, limits=Limits(norm_window=4)
        )
        writer = LedgerWriter(db, self._failed, run.clock)
        writer.start()
        run.restore({"epoch": 1} | run_ledger.get_meta(db), run_ledger.learners(db), writer)
        context = ShardContext(
            settings,
            RUN,
            1,
            self._number,
            1,
            run.registry,
            run.journal,
            writer,
            Metrics(),
            disk,
            run.clock,
            self._failed,
        )
        shard = Shard(context, restored, run.view(), damaged=False)
        restore_shard(shard, db, restored)
        run.runs(self._layout, shard)
        shard.start()
        for entry in self._registrar.registry.entries.values():
            await run.member(sh.Member(learner=entry.name, region=entry.region, incarnation=1, session=entry.session))
        self.run, self.shard = run, shard
        await run.viewed(self._registrar.view())
        while True:
            await asyncio.sleep(1.0)
            await run.save_accounts()
            if shard.snapshots.due():
                await shard.snapshots.take()

    def _write_first(self, disk: Any) -> None:
        file = disk.create(DIRECTORY / INITIAL)
        file.write(FIRST)
        file.sync()
        disk.sync_directory(DIRECTORY)

    def _failed(self, error: BaseException) -> None:
        raise AssertionError(f"the shard failed: {error!r}")


class World:
    """A registrar, its shards, and learners that answer every round of both shards."""

    def __init__(self, loop: VirtualLoop, owned: Sequence[Collection[int]]) -> None:
        attached = AttachedShards(None, len(owned))
        self._run = Registrar(Limits(), RunClock(loop.clock), Journal(), attached)
        self._layout = plan(TENSORS, FRAGMENTS)
        self._steps = 0
        for number, name in enumerate(NAMES, 1):
            self._run.registry.join(name, "here", number, 0, 0.0, b"", b"token", self._run.clock.wall(), 0.0)
        rngs = [random.Random(loop.rng.random()) for _ in owned]
        made = enumerate(zip(owned, rngs, strict=True))
        self.homes = [Home(self._run, self._layout, each, number, rng) for number, (each, rng) in made]

    async def train(self, kills: Kills) -> None:
        """Runs until every fragment is at its last version."""
        deadline, loop = 600.0, asyncio.get_running_loop()
        killing = [asyncio.create_task(self._kill(self.homes[number], at)) for number, at in kills.items()]
        for home in self.homes:
            home.begin()
        answering = asyncio.create_task(self._answer())
        while self.versions() != dict.fromkeys(range(FRAGMENTS), VERSIONS):
            assert loop.time() < deadline, f"stuck at {self.versions()}"
            await asyncio.sleep(STEP_S)
            await self._report()
        answering.cancel()
        for home in self.homes:
            home.check_tokens()
        assert all(task.done() for task in killing), "training ended before a kill"

    async def _kill(self, home: Home, at: float) -> None:
        await asyncio.sleep(at)
        while home.shard is None or not 0 < home.shard.pending() < len(NAMES):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.001)
        home.kill()
        await asyncio.sleep(1.0)
        home.begin()

    def versions(self) -> dict[int, int]:
        """Returns the versions of all fragments with a running shard."""
        shards = [home.shard for home in self.homes if home.shard is not None]
        return {index: version for shard in shards for index, version in shard.versions().items()}

    def counted(self) -> dict[str, Any]:
        """Returns each learner's merged, sent and acknowledged work, from which goodput and bills follow."""
        counted = {}
        for name in NAMES:
            sums = [home.run.registry.entries[name].account.at(number) for number, home in enumerate(self.homes)]
            counted[name] = (
                sum(each.merged_token_parameters for each in sums), sum(each.bytes_up for each in sums),
                sum(each.parameters_up for each in sums), pytest.approx(sum(each.accepted_tokens for each in sums)),
            )  # fmt: skip
        return counted

    async def _report(self) -> None:
        """Reports a step of all learners at once, so that the next round waits for all."""
        self._steps += 1
        running = [(home.run, home.shard) for home in self.homes if home.shard is not None]
        for run in (self._run, *(run for run, _ in running)):
            for name in NAMES:
                spent = IncarnationCounters(
                    steps=self._steps, tokens=self._steps * REPORTED, stepping_s=self._steps * STEP_S
                )
                run.registry.heard(run.registry.entries[name], run.clock.wall(), spent)
        view = self._run.view()
        for run, shard in running:
            await run.viewed(view)
            for name in NAMES:
                shard.dispatch(ev.Reported(name, self._steps, False))
                for known in (run, self._run):
                    known.registry.entries[name].account.step_time_s = shard.syncer.liveness[name].step_time_s

    async def _answer(self) -> None:
        while True:
            for home in self.homes:
                if home.shard is None:
                    continue
                for index, fragment in home.shard.fragments.items():
                    if fragment.rounds.phase is Phase.OPEN and fragment.version < VERSIONS:
                        for name in NAMES:
                            home.process.start(self._push(home.shard, name, index, fragment.version))
            await asyncio.sleep(LOOK_S)

    async def _push(self, shard: Shard, name: str, fragment: int, version: int) -> None:
        spans = self._layout.fragments[fragment].frames
        rng = np.random.default_rng([NAMES.index(name), fragment, version])
        vector = (rng.standard_normal(self._layout.fragments[fragment].length) * 0.01).astype(np.float32)
        payloads = [frame_codec.encode_frame(vector, span, Codec.INT4) for span in spans]
        table = [(len(payload), crc32c(payload)) for payload in payloads]
        header = pb.PushHeader(
            session=pb.Session(learner=name, incarnation=1), fragment=fragment, seq=version + 1,
            cycle=shard.fragments[fragment].rounds.cycle, base_version=version, tokens=16, steps=2,
            codec=pb.CODEC_INT4, frames=len(payloads), size_bytes=sum(map(len, payloads)),
            digest=frame_codec.frames_digest(table),
        )  # fmt: skip
        intake, now = Intake(shard), asyncio.get_running_loop().time()
        try:
            answer = intake.offer(header, now)
            if isinstance(answer, Upload):
                frames = [pb.Frame(index=n, crc32c=table[n][1], payload=payload) for n, payload in enumerate(payloads)]
                await intake.take(answer, frames, now)
                await intake.receipt(answer)
        except Refused:
            return  # the next poll offers it again, while its round is open


def trained(owned: Sequence[Collection[int]], kills: Kills) -> tuple[dict[int, tuple[bytes, ...]], dict[str, Any]]:
    """Trains each fragment for VERSIONS merges.

    Returns (theta, theta_pub, momentum) as bytes by fragment, and the counts.
    """
    merge.warm_up()
    loop = VirtualLoop(random.Random(repr((owned, kills))))
    with determinism(loop), ExitStack() as stack:
        stack.callback(structlog.configure, **structlog.get_config())
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        asyncio.set_event_loop(loop)
        world = World(loop, owned)
        try:
            loop.run_until_complete(world.train(kills))
            return dict(_bytes(home.shard for home in world.homes)), world.counted()
        finally:
            for home in world.homes:
                home.process.kill()
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            for home in world.homes:
                for end in home._platter.at_end:
                    end()
            loop.close()
            asyncio.set_event_loop(None)


def _bytes(shards: Iterable[Shard | None]) -> Iterable[tuple[int, tuple[bytes, ...]]]:
    for shard in shards:
        assert shard is not None, "all shards run at the end"
        for index, fragment in shard.fragments.items():
            state = fragment.state
            yield index, (state.theta.tobytes(), state.theta_pub.tobytes(), state.momentum.tobytes())


ONE, TWO = [range(FRAGMENTS)], [[0, 2], [1, 3]]


KILLED = [(ONE, {0: 9.0}), (TWO, {}), (TWO, {1: 5.0}), (TWO, {1: 9.3}), (TWO, {1: 14.7}), (TWO, {0: 9.3, 1: 9.3})]


@pytest.mark.parametrize(("owned", "kills"), KILLED)
def test_shards_with_kills_end_with_the_state_of_one_shard_without_kills(owned, kills):
    assert trained(owned, kills) == trained(ONE, {})
