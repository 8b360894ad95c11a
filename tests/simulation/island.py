"""A learner's process in the simulation: the real agent, and a training loop of a few additions.

The step boundary does what `atoll.Learner.step` does, on vectors instead of a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
from atoll.adoption import Track
from atoll.handover import Handover, Taken
from atoll.joining import FirstModel, Identity
from atoll.places import Coded, Places, Shape
from atoll.presence import Presence
from atoll.stats import Counters
from atoll_wire import codec
from atoll_wire import outer_pb2 as pb
from atoll_wire.access import Access
from atoll_wire.codec import Codec
from atoll_wire.layout import Layout, MergeKind, TensorSpec

from tests.simulation.books import Violation
from tests.simulation.checks import Checks
from tests.simulation.loop import Process
from tests.simulation.network import Network, SimulatedLink

TENSORS = (
    TensorSpec("embedding", (24, 16), "float32", MergeKind.AVERAGE),
    TensorSpec("first", (20, 16), "float32", MergeKind.DIRECTION),
    TensorSpec("second", (16, 30), "float32", MergeKind.DIRECTION),
    TensorSpec("third", (33,), "float32", MergeKind.DIRECTION),
    TensorSpec("fourth", (10, 50), "float32", MergeKind.DIRECTION),
)
STRIDE = 0.01  # of an inner step
BATCH = 8  # tokens of an inner step


class Island:
    """One process under a name. error: why its agent gave up, if it did."""

    def __init__(
        self, network: Network, checks: Checks, name: str, life: int, addresses: Sequence[str], step_s: float, seed: int
    ) -> None:
        self.process = Process(f"{name}#{life}")
        self.name, self._network, self._checks, self._step_s = name, network, checks, step_s
        self._addresses = addresses
        self._random = np.random.default_rng(seed)
        self._handover, self.counters = Handover(), Counters()
        self.tracks: list[Track] = []
        self._local: list[np.ndarray] = []
        self._moved: list[np.ndarray] = []  # of each fragment, float64: what training added
        self._told: list[np.ndarray] = []  # ... what was merged of it, and given up
        self.layout: Layout | None = None
        self.presence: Presence | None = None
        self.error: Exception | None = None
        self.stride = STRIDE
        self.training, self.leaving, self.paused_until = True, False, 0.0
        self.due_again = False  # somebody wants to start it again, and waits for its end
        self.process.start(self._live(), name=self.process.name)

    async def _live(self) -> None:
        ready: asyncio.Future[Layout] = asyncio.get_running_loop().create_future()
        presence = Presence(
            Identity(self.name, "somewhere", self._addresses, 1e9), FirstModel(TENSORS, b"frozen", self._save),
            self._handover, self.counters, ready.set_result, self._stop, self._dial,
        )  # fmt: skip
        self.presence = presence
        agent = asyncio.create_task(presence.live())
        agent.add_done_callback(self._ended)
        self.layout, self._codec = await ready, Codec(presence.standing.settings.codec)
        self._handover.clear()
        for line in presence.standing.lines:
            shape = Shape.of(self.layout.fragments[line.fragment], self._codec)
            self.tracks.append(Track(shape, line.version, line.anchor, line.anchor, line.version))
            self._local.append(line.anchor.copy())
            self._moved.append(np.zeros(len(line.anchor)))
            self._told.append(np.zeros(len(line.anchor)))
            self._checks.adopted(self, line.fragment, line.version, line.anchor)
        while True:
            await asyncio.sleep(self._step_s * self._random.uniform(0.8, 1.2) if self.training else 0.5)
            self._step()

    def _dial(self, address: str, _: Access) -> SimulatedLink:
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
        counters.paused = asyncio.get_running_loop().time() < self.paused_until or bool(self._handover.paused)
        if self.training and not counters.paused:
            changes = self._random.standard_normal(sum(map(len, self._local)), np.float32) * np.float32(self.stride)
            at = 0
            for local, moved in zip(self._local, self._moved, strict=True):
                change = changes[at : at + len(local)]
                np.add(local, change, out=local)
                np.subtract(moved, change, out=moved)
                at += len(local)
            counters.steps += 1
            counters.tokens += BATCH
            counters.stepping_s += self._step_s
            counters.step_time_s = self._step_s
            assert self.presence is not None, "it trains"
            self._checks.trained[self.name, self.presence.standing.session.incarnation] = counters.tokens
        if self._handover.paused or not self._handover.something:
            return
        todo = self._handover.next()
        while todo.released:
            self.tracks[todo.released.popleft()].refused()
        while todo.prepared:
            newer = todo.prepared.popleft()
            track, fate = self.tracks[newer.fragment], newer.fate
            if fate.drop:  # whatever was not merged is given up
                self._told[newer.fragment] += track.origin - self._local[newer.fragment]
            elif fate.q is not None:
                self._told[newer.fragment] += self._values(newer.fragment, fate.q)
            places = Places.in_vector(self._local[newer.fragment], track.shape)
            track.adopt(newer.anchor, newer.version, fate, counters.tokens, counters.steps, places, keep=True)
            self._handover.adopted.append(pb.Adopted(fragment=newer.fragment, version=newer.version))
            self._checks.adopted(self, newer.fragment, newer.version, newer.anchor)
        while todo.due:
            one = todo.due.popleft()
            self._answer(one.fragment, one.cycle)

    def _values(self, number: int, coded: Coded) -> np.ndarray:
        assert self.layout is not None, "it trains"
        fragment, out = self.layout.fragments[number], np.zeros(len(self._local[number]), np.float32)
        for span, content in zip(fragment.frames, coded.contents, strict=True):
            codec.content_add(content, span, self._codec, np.ones(len(span.segments), np.float32), out)
        return out

    def _answer(self, fragment: int, cycle: int) -> None:
        track = self.tracks[fragment]
        if track.flying is not None or track.steps_from == self.counters.steps:
            reason = "in flight" if track.flying is not None else "nothing was trained"
            self._handover.declined.append(pb.Declined(fragment=fragment, cycle=cycle, reason=reason))
            return
        places = Places.in_vector(self._local[fragment], track.shape)
        outstanding = track.take(places, self.counters.tokens, self.counters.steps)
        assert self.presence is not None, "a round comes through it"
        self._handover.submitted(taken := Taken(fragment, cycle, outstanding))
        self.presence.submit(taken)

    async def leave(self) -> None:
        """Says good-bye, and ends."""
        self.leaving = True
        if self.presence is not None:
            await self.presence.say_goodbye()
        self.process.kill()

    def check_conservation(self) -> None:
        """What training moved = what was merged or given up of it + what is outstanding."""
        for fragment, track in enumerate(self.tracks):
            left = self._moved[fragment] - self._told[fragment] - (track.anchor - self._local[fragment])
            if np.abs(left).max() > 1e-3:
                raise Violation(1, f"{self.process.name} lost or doubled work of fragment {fragment}")

    def idle(self) -> bool:
        """Nothing is on its way, as far as it knows."""
        return self.presence is not None and all(line.flight is None for line in self.presence.standing.lines)
