"""A learner's processes in the simulation: real agents, and a training loop that only adds numbers.

Each rank uses the product's `StepBoundary`, which never waits here.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.numpy
from atoll.agent.join_request import Identity, ModelDescription
from atoll.agent.member_session import MemberSession
from atoll.agent.run_session import RunSession
from atoll.boundary.host_values import HostValues, host_coder
from atoll.boundary.local_parameters import LocalParameters
from atoll.boundary.movement import Movement
from atoll.boundary.movement_watch import MovementWatch
from atoll.boundary.round_answers import RoundAnswers
from atoll.boundary.step_boundary import StepBoundary
from atoll.data.unit_log import UnitLog
from atoll.errors import LearnerError
from atoll.fragments.adoption import PreparedAnchor, Track
from atoll.fragments.exchange import DueRound, Submission, ThreadExchange
from atoll.fragments.segments import Coded
from atoll.model.parameters import Parameters
from atoll.model.samples import ParameterSamples
from atoll.ranks.division import Division
from atoll.ranks.rank_group import ALONE, RESTORE, Decision, RankGroup
from atoll.stats import Counters
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.layout.frame_spans import Codec, Compression
from atoll_wire.layout.layout import Layout

from tests.simulation.bookkeeping import Violation
from tests.simulation.checks import Checks, Name
from tests.simulation.data_units import DataTruth
from tests.simulation.late_rows import Lateness, LateWatch
from tests.simulation.loop import Process
from tests.simulation.network import Network, SimulatedLink
from tests.simulation.ranks import Hub, SimulatedMessages, SimulatedRanks, divisions_of, parts_of
from tests.simulation.training import BATCH, SMALL_STRIDE, STRIDE, TENSORS, Account, Masters, Model, Take

DRAIN_S, DRAIN_LOOKS = 3.0, 60
SLOW_CALLS_S = 0.1  # additional delay of each message between a slow rank and the core
MAX_UNDONE = 8  # number of adoptions after which an undoing optimizer must be detected


class Rank:
    """One process of a learner. boundary: None until the process has joined the run."""

    def __init__(self, island: Island, number: int, size: int, model: Model, ranks: RankGroup) -> None:
        name = f"{island.name}#{island.life}" + (f".{number}" if size > 1 else "")
        self.number, self.process, self.model, self.ranks = number, Process(name), model, ranks
        self.exchange, self.counters = ThreadExchange(island.network.loop.clock), Counters()
        self.session: RunSession | None = None
        self.boundary: Boundary | None = None
        self.submitted: list[Submission] = []  # what this boundary submitted

    @property
    def tracks(self) -> list[Track]:
        return self.boundary.local.tracks if self.boundary is not None else []


class Boundary(StepBoundary):
    """The product's boundary. Rank 0 updates the island's accounts before any rank changes its values."""

    island: Island

    def _release(self, todo: Any) -> None:
        if self._ranks.is_leader:
            for fragment in todo.released:
                self.island.accounts[fragment].ended(None)
        super()._release(todo)

    def _withdraw(self, fragment: int) -> None:
        if self._ranks.is_leader and any(kept.fragment == fragment for _, kept in self._rounds.kept_back):
            self.island.withdrawn(fragment)
        super()._withdraw(fragment)

    def _finish_adoptions(self) -> None:
        fragments = self.local.begun
        if self._ranks.is_leader:
            for fragment in fragments:
                self.island.settle(fragment)
        before = self.island.before(fragments)
        super()._finish_adoptions()
        self.island.moved(fragments, before)

    def _restore(self) -> None:
        everything = range(len(self.local.tracks))
        if self._ranks.is_leader:
            self.island.all_given_up()
        before = self.island.before(everything)
        super()._restore()
        self.island.moved(everything, before)

    def _carry_out_last(self, decision: Decision) -> None:
        if decision.request == RESTORE:
            self.island.all_given_up()
        for newer in self._exchange.todo.prepared:
            self.island.settle_apart(newer)
        super()._carry_out_last(decision)


class Answers(RoundAnswers):
    """The product's answers. Rank 0's record what was trained, at the moment when it is taken."""

    def __init__(self, island: Island, number: int, *parts: Any) -> None:
        """number: of the rank. parts: as for RoundAnswers."""
        super().__init__(*parts)
        self._island, self._is_leader = island, number == 0

    def take(self, due: DueRound, boundary: int = 0) -> None:
        """See RoundAnswers."""
        if self._is_leader:
            self._island.takes(due.fragment)
        super().take(due, boundary)


class Island:
    """One start of a learner, with one or more processes. process, counters, session, tracks: of rank 0.

    error: why it ended, if it failed. watched: whether it uses the product's `MovementWatch`. size: number of ranks.
    slow: number of the rank whose messages are all late, if any. lateness: of its rows, None if they arrive at once.
    """

    answers: type[Answers] = Answers  # how its ranks answer rounds

    def __init__(
        self, network: Network, checks: Checks, name: str, life: int, addresses: Sequence[str], step_s: float,
        seed: int, masters: Masters = Masters.NONE, *, watched: bool = False, size: int = 1,
        slow: int | None = None, data: DataTruth | None = None, lateness: Lateness | None = None,
    ) -> None:  # fmt: skip
        self.name, self.life, self.network, self._checks, self._step_s = name, life, network, checks, step_s
        self._addresses = addresses
        self._random = np.random.default_rng(seed)
        dice = random.Random(f"{seed} ranks")
        self._parts, self._hub = parts_of(TENSORS, size, dice), Hub(size)
        self.ranks = [
            Rank(self, number, size, Model(masters, parts), SimulatedRanks(self._hub, number) if size > 1 else ALONE)
            for number, parts in enumerate(self._parts)
        ]
        first = self.ranks[0]
        self.feed = data.feed(self) if data is not None else None
        self.process, self.counters, self.model, self._exchange = (
            first.process, first.counters, first.model, first.exchange
        )  # fmt: skip
        self._watched, self.lateness = watched, lateness
        self._watch: MovementWatch | None = None
        self.accounts: list[Account] = []
        self._takes: dict[tuple[int, int], Take] = {}  # what it has not sent yet, by fragment and number
        self._new: list[tuple[int, int]] = []  # those that it took at this boundary
        self.layout: Layout | None = None
        self.error: Exception | None = None
        self.stride = SMALL_STRIDE if masters is Masters.UNKNOWN else STRIDE
        self.training, self.leaving, self.paused_until = True, False, 0.0
        self._restored_at = 0  # number of the boundary that last reset the parameters
        self._drained = False  # whether it has taken its last step boundary
        self.overwrites: np.random.Generator | None = None  # draws the weights that the next step loads
        self.late = False  # whether the load comes after the optimizer's part of the step
        self.strayed = False  # whether its steps were much larger for a while
        self._widest = self.stride  # largest stride so far, which may hide an undone adoption
        # Boundaries with adoptions that the next step undid, and that are large enough to be detected.
        self._undone: list[int] = []
        self._adopted: list[list[np.ndarray]] = []  # anchors that the checks know, by fragment and rank
        self._tokens = 0  # trained so far; with several ranks, counters lag behind
        self.due_again = False  # whether another start of this learner waits for its end
        self._ready: list[asyncio.Future[Layout]] = []
        messages = self._connected(dice)
        if slow is not None:
            messages[slow].slow, network.late_s[self.ranks[slow].process] = True, SLOW_CALLS_S
        for rank in self.ranks[1:]:
            self.process.on_death.append(rank.process.kill)
            rank.process.start(self._follow(rank, messages[rank.number]), name=rank.process.name)
        self.process.start(self._live(messages[0] if size > 1 else None), name=self.process.name)

    @property
    def session(self) -> RunSession | None:
        return self.ranks[0].session

    @property
    def tracks(self) -> list[Track]:
        return self.ranks[0].tracks

    # ------------------------------------------------------------------------------ start

    def _connected(self, dice: random.Random) -> list[SimulatedMessages]:
        processes = [rank.process for rank in self.ranks]
        found = [SimulatedMessages(self.network.loop, dice, processes, number) for number in range(len(processes))]
        for each in found:
            each.others = found
        return found

    def _described(self) -> tuple[Identity, ModelDescription]:
        return Identity(self.name, "somewhere", self._addresses, 1e9), ModelDescription(TENSORS, b"frozen", self._save)

    async def _live(self, messages: SimulatedMessages | None) -> None:
        rank, ready = self.ranks[0], asyncio.get_running_loop().create_future()
        rank.session = session = RunSession(
            *self._described(), rank.exchange, rank.counters, ready.set_result, self._stop,
            self.network.loop.clock, self._dialler(rank), messages, host_coder(rank.ranks),
        )  # fmt: skip
        agent = asyncio.create_task(session.live())
        agent.add_done_callback(self._ended)
        self.layout, self._codec = await ready, Codec(session.core.settings.codec)
        for future in self._ready:
            await future
        try:
            self._begin(self.layout)
            while True:
                await asyncio.sleep(self._step_s * self._random.uniform(0.8, 1.2) if self.training else 0.5)
                self._step()
        finally:
            if self._watch is not None:
                self._watch.end()  # the watch sees the optimizers of all processes

    async def _follow(self, rank: Rank, messages: SimulatedMessages) -> None:
        """Runs the agent of a rank other than 0. The island's loop takes its steps."""
        ready: asyncio.Future[Layout] = asyncio.get_running_loop().create_future()
        self._ready.append(ready)
        rank.session = session = MemberSession(
            *self._described(), rank.exchange, rank.counters, ready.set_result, self._stop,
            self.network.loop.clock, self._dialler(rank), messages, host_coder(rank.ranks),
        )  # fmt: skip
        try:
            await session.live()
        except Exception as error:
            self._stop(error)

    def _begin(self, layout: Layout) -> None:
        """Does on all ranks what `Learner._take_over` does on one."""
        first, divisions = self._exchange.choose_first(), divisions_of(layout, self._parts)
        if self._watched:
            samples, late = ParameterSamples(self.model.values, divisions[0]), self.lateness
            self._watch = MovementWatch(samples) if late is None else LateWatch(samples, late)
        self.accounts = [Account(fragment.length) for fragment in layout.fragments]
        anchors = [rank.exchange.take_first(first) for rank in self.ranks]
        locals_: list[LocalParameters | None] = [None] * len(self.ranks)

        def enter(rank: Rank) -> None:
            locals_[rank.number] = LocalParameters(
                rank.model.values, divisions[rank.number], self._codec, anchors[rank.number], keep=True,
                ranks=rank.ranks,
            )  # fmt: skip

        self._hub.together([partial(enter, rank) for rank in self.ranks])
        for rank, local, mine in zip(self.ranks, locals_, divisions, strict=True):
            assert local is not None, "entered"
            self._enter(rank, layout, local, mine)
        self._adopted = [[] for _ in layout.fragments]
        self._check_anchors()
        self._seen(tuple(range(len(layout.fragments))))

    def _enter(self, rank: Rank, layout: Layout, local: LocalParameters, divisions: Sequence[Division]) -> None:
        log = UnitLog() if self.feed is None else self.feed.log
        submit = partial(self._handed_over, rank)
        rounds = self.answers(self, rank.number, local, rank.exchange, rank.counters, submit, log)
        watch = self._watch if rank.number == 0 else None
        rank.boundary = Boundary(
            self.name, layout, cast("Parameters", rank.model), local, rounds, watch, rank.exchange, rank.counters,
            rank.ranks, self.network.loop.clock, lambda: None,
        )  # fmt: skip
        rank.boundary.island = self
        rank.model.begin(divisions)

    def _dialler(self, rank: Rank) -> Any:
        return lambda address, *_: SimulatedLink(self.network, rank.process, address)

    def _save(self, path: Path) -> None:
        tensors = {t.name: self._random.standard_normal(t.shape).astype(np.float32) for t in TENSORS}
        safetensors.numpy.save_file(tensors, path)

    def _stop(self, error: Exception) -> None:
        self.error = error
        self.process.kill()

    def _ended(self, agent: asyncio.Task[None]) -> None:
        if not agent.cancelled() and isinstance(agent.exception(), Exception):
            self._stop(agent.exception())

    # ------------------------------------------------------------------------------ inner steps, as in Learner.step

    def _step(self) -> None:
        counters = self.counters
        try:
            ready = self.feed is None or not self.training or self.feed.ready()
        except LearnerError as error:
            self._stop(error)
            return
        counters.paused = (
            asyncio.get_running_loop().time() < self.paused_until
            or bool(self._exchange.paused)
            or (not ready and self.feed is not None and self.feed.waits())
        )
        if counters.paused or not ready or self._exchange.paused or self._drained:
            return
        if self.training:
            self._train()
        self._hub.steps = int(self.training)
        try:
            if self.feed is not None and self.training:
                self.feed.step(counters.steps + 1)
            if self._hub.agreed_to_restore():
                self._hub.together([partial(self._pass_boundary, rank) for rank in self.ranks])
            else:
                for rank in self.ranks:
                    self._pass_boundary(rank)
            self._hub.end_turn()
        except LearnerError as error:
            self._stop(error)
            return
        self._submit_all()

    def _pass_boundary(self, rank: Rank) -> None:
        boundary = rank.boundary
        assert boundary is not None, "the learner has joined"
        rank.counters.step_time_s = self._step_s
        if self.training or len(self.ranks) > 1:
            boundary.step(BATCH if self.training else 0)
        else:
            boundary._carry_out(ALONE.agree(boundary._decide, boundary._failed))

    def _submit_all(self) -> None:
        """Passes what the ranks' boundaries handed over to the agents."""
        self._check_anchors()
        for fragment, number in self._new:
            self._checks.taken(self, self._name_of(fragment, number))
            self._count("contributions kept back", not self._takes[fragment, number].handed_over)
        before = {key for key in self._takes if key not in self._new}
        self._new.clear()
        for rank in self.ranks:
            for taken in rank.submitted:
                self._submit(rank, taken)
                late = rank.number == 0 and (taken.fragment, taken.outstanding.number) in before
                self._count("kept back, and sent", late)
        for rank in self.ranks:
            rank.submitted.clear()

    def _train(self) -> None:
        counters, layout = self.counters, self.layout
        assert layout is not None, "the learner has joined"
        if self.overwrites is not None and not self.late:
            self._load()
        self._widest = max(self._widest, self.stride)
        drawn = self._random.standard_normal(layout.parameters, np.float32) * np.float32(self.stride)
        ends = itertools.accumulate(len(account.moved) for account in self.accounts)
        changes = np.split(drawn, list(ends)[:-1])
        for account, change in zip(self.accounts, changes, strict=True):
            account.trained(change)
        for rank in self.ranks:
            rank.model.step(changes, watched=self._watch is not None)
        if self.overwrites is not None:
            self._load()
        counters.stepping_s += self._step_s
        assert self.session is not None, "the learner has joined"
        self._tokens += BATCH
        self._checks.trained[self.name, self.session.core.session.incarnation] = self._tokens

    def _load(self) -> None:
        assert self.overwrites is not None, "a load is due"
        self.load(self.overwrites)
        self.overwrites = None

    def load(self, random: np.random.Generator) -> None:
        """Loads weights that were not trained, on all ranks."""
        values = [random.standard_normal(len(account.moved), np.float32) for account in self.accounts]
        for rank in self.ranks:
            rank.model.load(values)

    def values(self, fragment: int) -> np.ndarray:
        """Returns a fragment's current values from all ranks. Copies of a value must be equal."""
        assert self.layout is not None, "the learner has joined"
        found: np.ndarray | None = None
        for rank in self.ranks:
            mine = (
                np.full(self.layout.fragments[fragment].length, np.nan, np.float32) if found is None else found.copy()
            )
            rank.model.put(fragment, mine)
            if found is not None and not np.array_equal(found[~np.isnan(found)], mine[~np.isnan(found)]):
                raise Violation(13, f"{self.process.name} has different copies of fragment {fragment}")
            found = mine
        assert found is not None, "a learner has at least one rank"
        return found

    def anchor(self, fragment: int) -> np.ndarray:
        """Returns a fragment's anchor, from all owning ranks in the order of frames."""
        runs = sorted((self._run(rank, fragment).first, rank.number) for rank in self.ranks)
        return np.concatenate([self.ranks[number].tracks[fragment].anchor for _, number in runs])

    def _run(self, rank: Rank, fragment: int) -> Any:
        assert rank.boundary is not None, "the learner has joined"
        values = rank.boundary.local._values
        assert isinstance(values, HostValues), "the simulation has no GPU"
        return values._routes[fragment].division.run

    def settle(self, fragment: int) -> None:
        """Records an adoption in the account, before the values change."""
        begun = [rank.boundary.local._begun[fragment].newer for rank in self.ranks if rank.boundary is not None]
        self._settle(fragment, begun, self.values)

    def settle_apart(self, newer: PreparedAnchor) -> None:
        """Records the adoption of a leaving learner, before the values change."""
        assert self.ranks[0].boundary is not None, "the learner has joined"
        apart = self.ranks[0].boundary.local._apart
        self._settle(newer.fragment, [newer], lambda fragment: apart.get(fragment, self.values(fragment)))

    def _settle(self, fragment: int, begun: Sequence[PreparedAnchor], values: Callable[[int], np.ndarray]) -> None:
        account, q = self.accounts[fragment], np.zeros_like(self.accounts[fragment].moved)
        if begun[0].fate.drop:  # the adoption drops unmerged work
            account.told += self.anchor(fragment) - values(fragment)
            account.ended(None)
            self._forget_takes(fragment)
        elif begun[0].fate.q is not None:
            for rank, newer in zip(self.ranks, begun, strict=True):
                run = self._run(rank, fragment)
                q[run.offset : run.offset + run.length] = self._decoded(rank, fragment, newer.fate.q)
            account.ended(q)

    def all_given_up(self) -> None:
        """Records that all outstanding work is dropped."""
        self._restored_at = self._watch.boundary if self._watch is not None else 0
        for fragment, account in enumerate(self.accounts):
            account.all_given_up(flying=self.tracks[fragment].flying is not None)
            self._forget_takes(fragment)

    def withdrawn(self, fragment: int) -> None:
        """Records that a contribution that was kept back is not sent."""
        self.accounts[fragment].ended(None)
        self._forget_takes(fragment)
        self._count("kept back, and withdrawn", 1)

    def _count(self, what: str, times: int) -> None:
        if self.lateness is not None:
            self.lateness.counts[what] += times

    def _forget_takes(self, fragment: int) -> None:
        """Forgets what was taken of a fragment, so that it is a violation to hand it over."""
        self._takes = {key: take for key, take in self._takes.items() if key[0] != fragment or take.handed_over}

    def _decoded(self, rank: Rank, fragment: int, coded: Coded | None) -> np.ndarray:
        assert coded is not None, "all ranks adopt the same version"
        run = self._run(rank, fragment)
        out = np.zeros(run.length, np.float32)
        for span, content in zip(run.frames, coded.contents, strict=True):
            frame_codec.content_add(content, span, self._codec, np.ones(len(span.segments), np.float32), out)
        return out

    def before(self, fragments: Sequence[int]) -> list[np.ndarray]:
        """Returns the values that `moved` compares with, if the learner is watched."""
        return [self.values(n) for n in fragments] if self.model.masters is Masters.UNKNOWN else []

    def moved(self, fragments: Sequence[int], before: list[np.ndarray]) -> None:
        """Records that the boundary changed these fragments."""
        if self.model.masters is not Masters.UNKNOWN:
            return
        sizes = [np.linalg.norm(self.values(n) - old) for n, old in zip(fragments, before, strict=True)]
        large = [self.accounts[n].taken_back(size, self._widest) for n, size in zip(fragments, sizes, strict=True)]
        assert self._watch is not None, "it is watched"
        if any(large):
            self._undone.append(self._watch.boundary)
        judged = sum(boundary < self._watch.judged for boundary in self._undone)
        if judged > MAX_UNDONE:
            raise Violation(12, f"{self.process.name} undid {judged} adoptions without detection")

    def _check_anchors(self) -> None:
        """Checks that all ranks have the same versions, with the published bytes."""
        for fragment, known in enumerate(self._adopted):
            versions = {rank.tracks[fragment].version for rank in self.ranks}
            if len(versions) > 1:
                raise Violation(13, f"{self.process.name} has ranks at different versions of {fragment}: {versions}")
            anchors = [rank.tracks[fragment].anchor for rank in self.ranks]
            if any(new is not old for new, old in itertools.zip_longest(anchors, known)):
                self._adopted[fragment] = anchors
                self._checks.adopted(self, fragment, versions.pop(), self.anchor(fragment))

    def _seen(self, fragments: tuple[int, ...]) -> None:
        if self._watch is not None:
            self._watch.adopted(fragments)

    def takes(self, fragment: int) -> None:
        """Records what rank 0 is about to take."""
        track = self.tracks[fragment]
        key = fragment, track.takes + 1
        self._takes[key] = self.accounts[fragment].taken(track.steps_from, self.counters.steps)
        self._new.append(key)

    def _name_of(self, fragment: int, number: int) -> Name:
        assert self.session is not None, "rounds arrive in a session"
        return self.name, self.session.core.session.incarnation, fragment, number

    def _handed_over(self, rank: Rank, taken: Submission) -> None:
        """Called when a rank's boundary submits a contribution."""
        rank.submitted.append(taken)
        take = self._takes.get((taken.fragment, taken.outstanding.number))
        if take is not None and rank.number == 0:
            take.handed_over = True

    def _submit(self, rank: Rank, taken: Submission) -> None:
        assert rank.session is not None, "rounds arrive in a session"
        take = self._takes.get((taken.fragment, taken.outstanding.number))
        if take is None:
            raise Violation(12, f"{self.process.name} sends work on {taken.fragment} that it dropped earlier")
        if rank.number == 0:
            self._check(take, taken)
        rank.exchange.submitted(taken)
        rank.session.submit(taken)
        in_flight = rank.session.core.tracks[taken.fragment].in_flight
        if rank.number == 0 and in_flight is not None and in_flight.taken is taken:
            name = self._name_of(taken.fragment, in_flight.seq)
            self._checks.sent(name, self._digest(taken.fragment))
            if self.feed is not None:
                self.feed.sent(taken, name, take.after, take.upto)
        if rank is self.ranks[-1]:
            del self._takes[taken.fragment, taken.outstanding.number]

    def _digest(self, fragment: int) -> bytes:
        """Returns the digest of the payloads that all ranks send together, in the order of their frames."""
        contents: list[tuple[int, bytes]] = []
        for rank in self.ranks:
            (mine,) = [each for each in rank.submitted if each.fragment == fragment]
            coded = zip(self._run(rank, fragment).frames, mine.outstanding.coded.contents, strict=True)
            setting = Compression.of(rank.session.core.settings.compression)
            compressed = setting.applies(fast=False)  # the simulated network is slow
            contents += [(span.index, frame_codec.pack(content, compressed=compressed)) for span, content in coded]
        return frame_codec.frames_digest([(len(payload), crc32c(payload)) for _, payload in sorted(contents)])

    def _check(self, take: Take, taken: Submission) -> None:
        """Checks that a contribution is what was trained when it was taken. All ranks have submitted their parts."""
        sent = np.zeros(len(take.work), np.float32)
        for rank in self.ranks:
            run = self._run(rank, taken.fragment)
            (mine,) = [each for each in rank.submitted if each.fragment == taken.fragment]
            sent[run.offset : run.offset + run.length] = self._decoded(rank, taken.fragment, mine.outstanding.coded)
        if strange := take.strange(sent):
            raise Violation(12, f"{self.process.name} sends what it did not train of {taken.fragment}: {strange}")

    async def leave(self, *, drains: bool = False) -> None:
        """Leaves the run and ends. drains: whether to send the remaining work first."""
        if drains and self.tracks and len(self.ranks) == 1:
            await self._drain()
        if self.session is not None:
            await self.session.say_goodbye()
        self.process.kill()

    async def _drain(self) -> None:
        """Takes and sends the last work, and waits for its acknowledgements on the virtual clock."""
        boundary = self.ranks[0].boundary
        assert boundary is not None, "the learner has joined"
        self.training = False
        self._count("kept back until the learner left", len(boundary._rounds.kept_back))
        boundary.drain(0.0)
        self._drained = True
        self._submit_all()
        for _ in range(DRAIN_LOOKS):
            if self._exchange.unsettled:
                await asyncio.sleep(DRAIN_S / DRAIN_LOOKS)

    def check_conservation(self) -> None:
        """Checks that trained movement = merged or dropped work + outstanding work."""
        if self._watch is not None and self._watch.judge() is not Movement.FINE:
            # No work was due since the weights were loaded, so that nothing has detected them.
            self._hub.together([rank.boundary._restore for rank in self.ranks if rank.boundary is not None])
        for fragment, account in enumerate(self.accounts):
            left = account.moved - account.told - (self.anchor(fragment) - self.values(fragment))
            if np.abs(left).max() > 1e-3:
                raise Violation(1, f"{self.process.name} lost or doubled work of fragment {fragment}")

    def follows(self, generation: int) -> bool:
        """Returns whether the learner joined this generation, and has no anchor of an earlier one."""
        if self.session is None or self.session.core.session.generation != generation:
            return False
        restores = [track.restores for track in self.session.core.tracks.values()]
        return [track.restores for track in self.tracks] == restores

    def check_held(self) -> None:
        """Checks that the learner holds back no refused work."""
        assert self.session is not None and self.ranks[0].boundary is not None, "the learner has joined"  # noqa: PT018
        if self._exchange.something or self._hub.agreed_on_work() or self.ranks[0].boundary.local.begun:
            return  # the next boundaries release refused work
        lines = self.session.core.tracks
        held = [n for n, track in enumerate(self.tracks) if track.flying is not None and not lines[n].behind()]
        if held:
            raise Violation(13, f"{self.process.name} waits forever for the fate of its work on fragments {held}")

    def has_work_on_its_way(self, *, kept: bool) -> bool:
        """Returns whether its next boundary answers a round. kept: whether it keeps a contribution back instead."""
        boundary = self.ranks[0].boundary
        return bool(boundary is not None and boundary._rounds.kept_back if kept else self._exchange._due)

    def just_restored(self) -> bool:
        """Returns whether no step has followed the last restore.

        The watch then takes a load of the same size for a projection back, so it is not detected.
        """
        return self._watch is not None and self._watch.boundary <= self._restored_at

    def idle(self) -> bool:
        """Returns whether it knows of no work on its way, and keeps none back."""
        boundary = self.ranks[0].boundary
        if self.session is None or (boundary is not None and boundary._rounds.kept_back):
            return False
        return all(track.in_flight is None for track in self.session.core.tracks.values())
