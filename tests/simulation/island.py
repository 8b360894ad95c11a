"""A learner's process in the simulation: the real agent, and a training loop that only adds numbers.

The step boundary uses the same parts as `atoll.Learner.step`, but never waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from atoll.agent.join_request import Identity, ModelDescription
from atoll.agent.run_session import RunSession
from atoll.boundary.host_memory import HostMemory
from atoll.boundary.local_parameters import LocalParameters
from atoll.boundary.movement import Movement
from atoll.boundary.movement_watch import FOUND, MovementWatch
from atoll.boundary.round_answers import RoundAnswers
from atoll.boundary.samples import ParameterSamples
from atoll.errors import LearnerError
from atoll.fragments.adoption import Track
from atoll.fragments.exchange import DueRound, PreparedAnchor, Submission, ThreadExchange
from atoll.fragments.segments import Coded
from atoll.stats import Counters
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import Layout

from tests.simulation.bookkeeping import Violation
from tests.simulation.checks import Checks
from tests.simulation.loop import Process
from tests.simulation.network import Network, SimulatedLink
from tests.simulation.training import BATCH, SMALL_STRIDE, STRIDE, TENSORS, Account, Masters, Model

DRAIN_S, DRAIN_LOOKS = 3.0, 60
MAX_UNDONE = 8  # number of adoptions after which an undoing optimizer must be detected


class Island:
    """One process with a name.

    error: why it ended, if it failed. watched: whether it uses the product's `MovementWatch`.
    """

    def __init__(
        self, network: Network, checks: Checks, name: str, life: int, addresses: Sequence[str], step_s: float,
        seed: int, masters: Masters = Masters.NONE, *, watched: bool = False,
    ) -> None:  # fmt: skip
        self.process = Process(f"{name}#{life}")
        self.name, self._network, self._checks, self._step_s = name, network, checks, step_s
        self._addresses = addresses
        self._random = np.random.default_rng(seed)
        self._exchange, self.counters = ThreadExchange(network.loop.clock), Counters()
        self.model, self._watched = Model(masters), watched
        self._watch: MovementWatch | None = None
        self.tracks: list[Track] = []
        self._accounts: list[Account] = []
        self.layout: Layout | None = None
        self.session: RunSession | None = None
        self.error: Exception | None = None
        self.stride = SMALL_STRIDE if masters is Masters.UNKNOWN else STRIDE
        self.training, self.leaving, self.paused_until = True, False, 0.0
        self.overwrites: np.random.Generator | None = None  # draws weights that are loaded at the next step
        self.late = False  # ... after the optimizer's part of the step
        self.strayed = False  # whether its steps were much larger for a while
        self._widest = self.stride  # of its strides so far: an undone adoption is not found next to such large steps
        self._undone = 0  # adoptions that the next step undid, and that are large enough to be detected
        self.due_again = False  # another start of it waits for its end
        self.process.start(self._live(), name=self.process.name)

    async def _live(self) -> None:
        ready: asyncio.Future[Layout] = asyncio.get_running_loop().create_future()
        session = RunSession(
            Identity(self.name, "somewhere", self._addresses, 1e9), ModelDescription(TENSORS, b"frozen", self._save),
            self._exchange, self.counters, ready.set_result, self._stop, self._network.loop.clock, self._dial,
        )  # fmt: skip
        self.session = session
        agent = asyncio.create_task(session.live())
        agent.add_done_callback(self._ended)
        self.layout, self._codec = await ready, Codec(session.core.settings.codec)
        self._exchange.clear()
        try:
            self._begin(self.layout, [(track.version, track.anchor) for track in session.core.tracks.values()])
            while True:
                await asyncio.sleep(self._step_s * self._random.uniform(0.8, 1.2) if self.training else 0.5)
                self._step()
        finally:
            if self._watch is not None:
                self._watch.end()  # it watches the optimizers of all processes

    def _begin(self, layout: Layout, anchors: list[tuple[int, np.ndarray]]) -> None:
        """Does the same as `Learner._take_over`."""
        if self._watched:
            self._watch = MovementWatch(ParameterSamples(self.model.parameters, layout.fragments))
        self._local = LocalParameters(HostMemory(self.model.parameters, layout.runs, self._codec), anchors, keep=True)
        self._rounds = RoundAnswers(self._local, self._exchange, self.counters, self._submit)
        self.tracks = self._local.tracks
        self.model.begin(layout)
        self._seen(tuple(range(len(anchors))))
        for fragment, (version, anchor) in enumerate(anchors):
            self._accounts.append(Account(len(anchor)))
            self._checks.adopted(self, fragment, version, anchor)

    def _dial(self, address: str, *_: Any) -> SimulatedLink:
        return SimulatedLink(self._network, self.process, address)

    def _save(self, path: Path) -> None:
        tensors = {t.name: self._random.standard_normal(t.shape).astype(np.float32) for t in TENSORS}
        safetensors.numpy.save_file(tensors, path)

    def _stop(self, error: Exception) -> None:
        self.error = error
        self.process.kill()

    def _ended(self, agent: asyncio.Task[None]) -> None:
        if not agent.cancelled() and isinstance(agent.exception(), Exception):
            self._stop(agent.exception())

    # ------------------------------------------------------------------------------ as Learner.step

    def _step(self) -> None:
        counters = self.counters
        counters.paused = asyncio.get_running_loop().time() < self.paused_until or bool(self._exchange.paused)
        if self.training and not counters.paused:
            self._train()
            if self._watch is not None:
                self._watch.step()
        if self._exchange.paused or not self._goes_on() or not self._exchange.something:
            return
        todo = self._exchange.next()
        while todo.released:
            self._accounts[todo.released[0]].ended(None)
            self.tracks[todo.released.popleft()].refused()
        if todo.prepared:
            self._adopt([newer.fragment for newer in todo.prepared])
        self._answer()

    def _train(self) -> None:
        counters, layout = self.counters, self.layout
        assert layout is not None, "it trains"
        if self.overwrites is not None and not self.late:
            self._load()
        self._widest = max(self._widest, self.stride)
        drawn = self._random.standard_normal(layout.parameters, np.float32) * np.float32(self.stride)
        at = 0
        for account in self._accounts:
            account.trained(drawn[at : (at := at + len(account.moved))])
        self.model.step(drawn, watched=self._watch is not None)
        if self.overwrites is not None:
            self._load()
        counters.steps += 1
        counters.tokens += BATCH
        counters.stepping_s += self._step_s
        counters.step_time_s = self._step_s
        assert self.session is not None, "it trains"
        self._checks.trained[self.name, self.session.core.session.incarnation] = counters.tokens

    def _load(self) -> None:
        assert self.overwrites is not None, "asked to"
        self.model.load(self.overwrites)
        self.overwrites = None

    def _goes_on(self) -> bool:
        """Does the same as `Learner._judge`, with its consequences. Returns False if this process ends."""
        if self._watch is None:
            return True
        verdict = self._watch.judge() if self._exchange.something else self._watch.glance()
        if verdict is Movement.COPIES:
            self._stop(LearnerError(FOUND[verdict]))
            return False
        if verdict is not Movement.FINE:
            self._checks.note(f"{self.process.name} has its parameters restored: {verdict.name}")
            self._restore()
        return True

    def _restore(self) -> None:
        everything, counters = range(len(self.tracks)), self.counters
        before = self._before(everything)
        with self.model.following(everything, restart=True):
            for fragment in everything:
                self._accounts[fragment].all_given_up(flying=self.tracks[fragment].flying is not None)
                self._local.restore(fragment, counters.tokens, counters.steps)
        self._moved(everything, before)

    def _adopt(self, fragments: list[int]) -> None:
        prepared, counters = self._exchange.todo.prepared, self.counters
        before = self._before(fragments)
        with self.model.following(fragments):
            while prepared:
                newer = prepared[0]
                self._settle(self._accounts[newer.fragment], newer)
                self._local.adopt(newer, counters.tokens, counters.steps)
                self._exchange.adopted.append(pb.Adopted(fragment=newer.fragment, version=newer.version))
                self._checks.adopted(self, newer.fragment, newer.version, newer.anchor)
                prepared.popleft()
        self._moved(fragments, before)

    def _settle(self, account: Account, newer: PreparedAnchor) -> None:
        fate, track = newer.fate, self.tracks[newer.fragment]
        if fate.drop:  # unmerged work is given up
            account.told += track.origin - self.model.values(newer.fragment)
            account.ended(None)
        elif fate.q is not None:
            account.ended(self._values(newer.fragment, fate.q))

    def _before(self, fragments: Sequence[int]) -> list[np.ndarray]:
        """Returns the values with which `_moved` compares, if they are needed."""
        return [self.model.values(n) for n in fragments] if self.model.masters is Masters.UNKNOWN else []

    def _moved(self, fragments: Sequence[int], before: list[np.ndarray]) -> None:
        """Records that the boundary changed these fragments."""
        self._seen(tuple(fragments))
        if self.model.masters is not Masters.UNKNOWN:
            return
        sizes = [np.linalg.norm(self.model.values(n) - old) for n, old in zip(fragments, before, strict=True)]
        large = [self._accounts[n].taken_back(size, self._widest) for n, size in zip(fragments, sizes, strict=True)]
        self._undone += any(large)
        if self._undone > MAX_UNDONE:
            raise Violation(12, f"{self.process.name} undid {self._undone} adoptions, and goes on")

    def _seen(self, fragments: tuple[int, ...]) -> None:
        if self._watch is not None:
            self._watch.adopted(fragments)

    def _values(self, number: int, coded: Coded) -> np.ndarray:
        assert self.layout is not None, "it trains"
        fragment = self.layout.fragments[number]
        out = np.zeros(fragment.length, np.float32)
        for span, content in zip(fragment.frames, coded.contents, strict=True):
            frame_codec.content_add(content, span, self._codec, np.ones(len(span.segments), np.float32), out)
        return out

    def _answer(self) -> None:
        self._rounds.answer()

    def _submit(self, taken: Submission) -> None:
        assert self.session is not None, "a round comes through it"
        self._check(taken)
        self._exchange.submitted(taken)
        self.session.submit(taken)
        core = self.session.core
        in_flight = core.tracks[taken.fragment].in_flight
        if in_flight is not None and in_flight.taken is taken:
            name = (self.name, core.session.incarnation, taken.fragment, in_flight.seq)
            self._checks.taken(self, name)

    def _check(self, taken: Submission) -> None:
        values = self._values(taken.fragment, taken.outstanding.coded)
        if strange := self._accounts[taken.fragment].strange(values):
            raise Violation(12, f"{self.process.name} sends what it did not train of {taken.fragment}: {strange}")

    async def leave(self, *, drains: bool = False) -> None:
        """Leaves, and ends. drains: whether to send the remaining work first."""
        if drains and self.tracks:
            await self._drain()
        if self.session is not None:
            await self.session.say_goodbye()
        self.process.kill()

    async def _drain(self) -> None:
        """Does the same as `Learner.__exit__`, without adoptions."""
        counters, self.training = self.counters, False
        if self._watch is not None and self._watch.leave() is not Movement.FINE:
            for account, track in zip(self._accounts, self.tracks, strict=True):
                account.all_given_up(flying=track.flying is not None)
                track.give_up(counters.tokens, counters.steps)
        for fragment, track in enumerate(self.tracks):
            if track.flying is None and track.steps_from < counters.steps:
                self._rounds.take(DueRound(fragment, 0, 0.0))
        for _ in range(DRAIN_LOOKS):
            if self._exchange.unsettled:
                await asyncio.sleep(DRAIN_S / DRAIN_LOOKS)

    def check_conservation(self) -> None:
        """Checks that movement by training = merged or given-up work + outstanding work."""
        if self._watch is not None and self._watch.judge() is not Movement.FINE:
            self._restore()  # no work was due since the weights were loaded, so nothing detected them
        for fragment, (account, track) in enumerate(zip(self._accounts, self.tracks, strict=True)):
            left = account.moved - account.told - (track.anchor - self.model.values(fragment))
            if np.abs(left).max() > 1e-3:
                raise Violation(1, f"{self.process.name} lost or doubled work of fragment {fragment}")

    def follows(self, generation: int) -> bool:
        """Returns whether it joined this generation, and has no anchor of an earlier one."""
        if self.session is None or self.session.core.session.generation != generation:
            return False
        restores = [track.restores for track in self.session.core.tracks.values()]
        return [track.restores for track in self.tracks] == restores

    def check_held(self) -> None:
        """Checks that it holds no refused work back."""
        assert self.session is not None, "it trains"
        if self._exchange.something:
            return  # its next boundary releases the refused work
        lines = self.session.core.tracks
        held = [n for n, track in enumerate(self.tracks) if track.flying is not None and not lines[n].behind()]
        if held:
            raise Violation(13, f"{self.process.name} waits for ever for what becomes of its work on {held}")

    def idle(self) -> bool:
        """Returns whether it knows of no work on its way."""
        return self.session is not None and all(track.in_flight is None for track in self.session.core.tracks.values())
