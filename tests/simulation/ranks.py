"""The ranks of a simulated learner: their collective calls, their messages, and their parts of the model.

All ranks run in one thread, rank 0 first. A collective call that waits would never return. A call therefore leaves its
values at the hub, and the product waits for them at a later step. Only at the start, and to reset the parameters, does
the product wait immediately, so ranks are then threads that take turns (`Hub.together`).
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

START_S = 30.0  # limit on the wait of a rank for its turn, in real time
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
        self._turn = threading.Condition()
        self._needs: dict[int, Callable[[], bool]] = {}  # of the ranks that wait for their turn, by rank
        self._acting = False  # whether a rank has its turn

    def agreed_on_work(self) -> bool:
        """Returns whether the next boundary releases or adopts something."""
        return self.running is not None and bool(self.running.decision.released or self.running.decision.adopted)

    def agreed_to_restore(self) -> bool:
        """Returns whether the next boundary resets the parameters, for which ranks wait for each other."""
        return self.running is not None and self.running.decision.request == RESTORE

    def end_turn(self) -> None:
        """Records that all ranks have taken a step."""
        self.running = self.next

    def together(self, calls: Sequence[Callable[[], object]]) -> None:
        """Makes each rank's call in a thread of its own. Raises the first rank's exception, if any.

        Threads take turns, so that a seed gives the same run each time: a turn ends when its rank has to wait, and the
        next one is that of the lowest rank that need not wait.
        """
        self._needs = dict.fromkeys(range(len(calls)), lambda: True)
        with ThreadPoolExecutor(len(calls)) as pool:
            for result in [pool.submit(self._take_turns, rank, call) for rank, call in enumerate(calls)]:
                result.result()

    def _take_turns(self, rank: int, call: Callable[[], object]) -> None:
        self._wait_for_turn(rank)
        try:
            call()
        finally:
            self._end_turn()

    def _wait_for_turn(self, rank: int) -> None:
        with self._turn:
            assert self._turn.wait_for(lambda: not self._acting and self._first() == rank, START_S), "no rank can go on"
            self._acting = True
            del self._needs[rank]

    def _end_turn(self) -> None:
        with self._turn:
            self._acting = False
            self._turn.notify_all()

    def _first(self) -> int | None:
        return min((rank for rank, may in self._needs.items() if may()), default=None)

    def put(self, call: int, rank: int, given: np.ndarray, counts: Sequence[int]) -> None:
        self._sent[call][rank] = np.split(given.copy(), np.cumsum(counts)[:-1])

    def get(self, call: int, rank: int, counts: Sequence[int]) -> F32:
        sent = self._sent[call]
        if len(sent) < self.size:
            self._needs[rank] = lambda: len(sent) == self.size
            self._end_turn()
            self._wait_for_turn(rank)
        parts = [sent[sender][rank] for sender in range(self.size)]
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
