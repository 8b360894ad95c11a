"""The ranks of a simulated learner: their collective calls, their messages, and their parts of the model.

All ranks run in one thread, rank 0 first. A collective call that waits would never return. A call therefore leaves its
values at the hub, and the product waits for them at a later step. Only at the start, and to reset the parameters, does
the product wait immediately, so ranks are then threads (`together`).
"""

from __future__ import annotations

import contextvars
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from atoll.ranks.division import Division, divide
from atoll.ranks.rank_group import RESTORE, Agreed, CarryOut, Decide, Vector
from atoll.ranks.tensor_part import TensorPart, chunk
from atoll_wire.codec.block_kernels import F32
from atoll_wire.layout.layout import Layout, TensorSpec

from tests.simulation.loop import Process, VirtualLoop

START_S = 10.0  # limit on the wait of a starting rank, in real time
MEAN_S = 0.003  # mean delay of a message between ranks
LATE_S = (0.2, 1.0)  # bounds on the delay of a few messages, and of all messages of a slow rank


class Hub:
    """What one learner's ranks have sent each other. running: the agreement of the last step."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.steps = 1  # inner steps between two boundaries; 0 while the island does not train
        self.running: Agreed | None = None
        self.next: Agreed | None = None
        self._sent: defaultdict[int, dict[int, list[np.ndarray]]] = defaultdict(dict)
        self._came = threading.Condition()

    def agreed_on_work(self) -> bool:
        """Returns whether the next boundary releases or adopts something."""
        return self.running is not None and bool(self.running.decision.released or self.running.decision.adopted)

    def agreed_to_restore(self) -> bool:
        """Returns whether the next boundary resets the parameters, for which ranks wait for each other."""
        return self.running is not None and self.running.decision.request == RESTORE

    def end_turn(self) -> None:
        """Records that all ranks have taken a step."""
        self.running = self.next

    def put(self, call: int, rank: int, given: np.ndarray, counts: Sequence[int]) -> None:
        with self._came:
            self._sent[call][rank] = np.split(given.copy(), np.cumsum(counts)[:-1])
            self._came.notify_all()

    def get(self, call: int, rank: int, counts: Sequence[int]) -> F32:
        with self._came:
            assert self._came.wait_for(lambda: len(self._sent[call]) == self.size, START_S), "a rank did not call"
        parts = [self._sent[call][sender][rank] for sender in range(self.size)]
        assert [len(part) for part in parts] == list(counts), "the ranks disagree about an exchange"
        return np.concatenate(parts)


class SimulatedRanks:
    """The `RankGroup` of one rank. A decision takes effect at the next step."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub, self._calls = hub, 0
        self.rank, self.size, self.is_leader = rank, hub.size, rank == 0

    def step(self, tokens: int, steps: int, decide: Decide, carry_out: CarryOut, failed: Callable[[], bool]) -> None:
        """See RankGroup. tokens: of all ranks. The hub has the steps."""
        hub = self._hub
        if hub.running is not None:
            carry_out(hub.running)
        if self.is_leader:
            hub.next = Agreed(tokens, hub.steps, decide(), (0,) if failed() else ())

    def finish(self, carry_out: CarryOut) -> None:
        """See RankGroup."""
        raise AssertionError("a simulated learner with several ranks leaves without sending more")

    def agree(self, decide: Decide, failed: Callable[[], bool]) -> Agreed:
        """See RankGroup."""
        raise AssertionError("a simulated run pauses outside of steps")

    def gathered(self, mine: bytes) -> list[bytes]:
        """See RankGroup."""
        raise AssertionError("the ranks of a simulated learner know each other's parts")

    def connect(self, device: torch.device | None) -> bool:
        """See RankGroup."""
        raise AssertionError("the ranks of a simulated learner have no devices")

    def exchange(self, given: Vector, sent: Sequence[int], received: Sequence[int]) -> Callable[[], Vector]:
        """See RankGroup."""
        call, self._calls = self._calls, self._calls + 1
        self._hub.put(call, self.rank, np.asarray(given), sent)

        def wait() -> Any:
            found = self._hub.get(call, self.rank, received)
            return torch.from_numpy(found) if isinstance(given, torch.Tensor) else found

        return wait

    def leave(self) -> None:
        """See RankGroup."""


class SimulatedMessages:
    """The `RankMessages` of one rank. Messages between two ranks arrive in order, with random delays."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, processes: Sequence[Process], rank: int) -> None:
        """others: one per rank, filled in by the island."""
        self._loop, self._rng, self._processes = loop, rng, processes
        self.rank, self.size = rank, len(processes)
        self.slow = False  # whether all messages of this rank are late
        self.others: list[SimulatedMessages] = []
        self._arrived: Callable[[bytes], None] | None = None
        self._context: contextvars.Context | None = None
        self._early: list[bytes] = []
        self._last: defaultdict[int, float] = defaultdict(float)

    def send(self, to: int, message: bytes) -> None:
        """See RankMessages."""
        late = self.slow or self._rng.random() < 0.02
        delay_s = self._rng.uniform(*LATE_S) if late else self._rng.expovariate(1 / MEAN_S)
        self._last[to] = at = max(self._last[to] + 1e-6, self._loop.now + delay_s)
        self._loop.after(at - self._loop.now, self.others[to].deliver, message)

    def deliver(self, message: bytes) -> None:
        """Called when a message arrives."""
        if self._arrived is None:
            self._early.append(message)
        elif self._processes[self.rank].alive:
            assert self._context is not None, "begin() sets both"
            self._context.run(self._arrived, message)

    def begin(self, arrived: Callable[[bytes], None], failed: Callable[[Exception], None]) -> None:
        """See RankMessages."""
        self._arrived, self._context = arrived, contextvars.copy_context()
        early, self._early = self._early, []
        for message in early:
            self._loop.after(0.0, self.deliver, message)

    def end(self) -> None:
        """See RankMessages."""


def together(calls: Sequence[Callable[[], object]]) -> None:
    """Makes the calls of all ranks at the same time. Raises the first rank's exception, if any."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for result in [pool.submit(call) for call in calls]:
            result.result()


def parts_of(tensors: Sequence[TensorSpec], size: int, rng: random.Random) -> list[list[TensorPart]]:
    """Returns each rank's parts: every tensor is cut along one of its dimensions, or copied to all ranks."""
    found: list[list[TensorPart]] = [[] for _ in range(size)]
    for tensor in tensors:
        cut = rng.choice((0, 0, len(tensor.shape) - 1, None))
        for rank, parts in enumerate(found):
            ranges = [((0, length),) for length in tensor.shape]
            if cut is not None:
                ranges[cut] = chunk(ranges[cut], rank, size)
            parts.append(TensorPart(tensor.shape, tuple(ranges)))
    return found


def places_of(division: Division, parts: Sequence[TensorPart]) -> np.ndarray:
    """Returns the place in the fragment's vector of each value of a rank's local vector."""
    found = [np.empty(0, np.int64)]
    for piece in division.fragment.pieces:
        whole, _, lengths = parts[piece.tensor].runs(piece.start, piece.start + piece.length)
        runs = [np.arange(start, start + n) for start, n in zip(whole, lengths, strict=True)]
        found.append(np.concatenate([found[0], *runs]) - piece.start + piece.offset)
    return np.concatenate(found)


def divisions_of(layout: Layout, parts: Sequence[Sequence[TensorPart]]) -> list[list[Division]]:
    """Returns the divisions of all ranks, by rank and fragment."""
    return [[divide(fragment, parts, rank) for fragment in layout.fragments] for rank in range(len(parts))]
