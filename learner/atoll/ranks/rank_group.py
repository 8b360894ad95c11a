"""The collective calls with which a learner's ranks agree on the next actions and exchange values.

Every rank calls `Learner.step()`, but only rank 0 joins the run and makes decisions. A small all-reduce sums the ranks'
tokens and distributes rank 0's decision. It runs while the model trains: it begins at one step boundary and ends at a
later one, where all ranks carry out the decision. A single-process learner makes no collective calls.

Agreements use a gloo group. Values are exchanged over gloo in host memory, or over another group on their device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from atoll_wire.codec import buffers
from atoll_wire.codec.block_kernels import F32

from atoll.errors import LearnerError
from atoll.fragments.adoption import Adopting
from atoll.fragments.exchange import PER_BOUNDARY

Vector = TypeVar("Vector", F32, torch.Tensor)  # float32 values in host memory, or on the device of `connect`

GO_ON = 0
STAND = 1
RESTORE = 2
STOP = 3
END = 4

FAILED, SAVE, SAVING = 1, 2, 4  # flags of a rank: see RankGroup.step
FLAG_BITS = 3

AGREED_S = 0.01  # seconds between agreements, because each agreement takes the training thread about 0.1 ms
MOST_STEPS = 64  # limit on the steps between two agreements
WAIT = timedelta(hours=12)  # long, because another rank's step may be slow; torchrun ends the job if a rank dies


@dataclass(frozen=True, slots=True)
class Decision:
    """Rank 0's decision, which all ranks carry out. Each tuple has at most PER_BOUNDARY items.

    request: GO_ON, STAND (the run is paused, so agree again), RESTORE (reset all parameters to their anchors), STOP
    (rank 0 failed), or END (all ranks leave).
    run_tokens: the run's training tokens before this agreement. total_tokens: the run's target of training tokens.
    All ranks use rank 0's values of both, so that their schedules are the same.
    released: fragments whose contribution was refused. adopted: anchors to adopt.
    due: fragment and cycle of each round to answer. step_s: rank 0's step time in seconds.
    judged: number of the newest step boundary whose contributions may be sent, see `RoundAnswers`.
    """

    request: int = GO_ON
    run_tokens: int = 0
    total_tokens: int = 0
    released: tuple[int, ...] = ()
    adopted: tuple[Adopting, ...] = ()
    due: tuple[tuple[int, int], ...] = ()
    step_s: float = 0.0
    judged: int = 0


@dataclass(frozen=True, slots=True)
class Agreed:
    """The result of an agreement, which is the same on all ranks.

    tokens: the tokens of all ranks since the last agreement. steps: rank 0's inner steps since the last agreement.
    decision: rank 0's decision. failed: ranks that cannot continue. save: whether all ranks save a checkpoint.
    replicas: each rank's report about its replicas, see `replicas`.
    """

    tokens: int
    steps: int
    decision: Decision
    failed: tuple[int, ...] = ()
    save: bool = False
    replicas: tuple[int, ...] = ()


Decide: TypeAlias = Callable[[], Decision]
CarryOut: TypeAlias = Callable[[Agreed], None]
Flags: TypeAlias = Callable[[], int]


class RankGroup(Protocol):
    """The ranks of one learner. is_leader: whether this is rank 0. rank: number of this rank. size: number of ranks."""

    is_leader: bool
    rank: int
    size: int

    def step(self, tokens: int, steps: int, decide: Decide, carry_out: CarryOut, flags: Flags) -> None:
        """Counts an inner step, and begins and ends agreements. All ranks call this once per step.

        tokens: tokens that this rank trained on in the step. steps: 1, or 0 if the optimizer's step was skipped.
        decide: called on rank 0 when an agreement begins; returns the decision.
        carry_out: called with the result when an agreement has ended, at the same step on all ranks.
        flags: returns this rank's flags: FAILED if it cannot continue, SAVE if it requests a checkpoint, and SAVING
            while it writes one. The ranks save a checkpoint if any rank requests one and no rank is writing one.
            The bits above FLAG_BITS are the rank's report about its replicas.
        """

    def finish(self, carry_out: CarryOut) -> None:
        """Waits for the current agreement, if any, and carries it out. All ranks call this together."""

    def agree(self, decide: Decide, flags: Flags) -> Agreed:
        """Begins an agreement and waits for its result. All ranks call this together.

        No other agreement may be running.
        """

    def connect(self, device: torch.device | None) -> bool:
        """Prepares exchanges of values on a device. All ranks call this together.

        device: the device of this rank's values, or None if they are not on one device.
        Returns whether the ranks can exchange such values. Otherwise, they exchange values in host memory.
        """

    def exchange(self, given: Vector, sent: Sequence[int], received: Sequence[int]) -> Callable[[], Vector]:
        """Begins to exchange values with every rank. All ranks call this together.

        given: float32 (sum(sent),), in order of receivers. The caller must not change or free `given` until the
            exchange ends. On a device, the exchange begins after the work that is queued on the current stream.
        sent, received: number of values to and from each rank.
        Returns a function that waits for the received values and returns them in order of senders. On a device, only
        the stream that is current when the function is called waits for them.
        """

    def gathered(self, mine: bytes) -> list[bytes]:
        """Returns the bytes that each rank passed, in order of ranks. All ranks call this together."""

    def leave(self) -> None:
        """Waits until every rank has called this, so that no rank ends the job while rank 0 is still sending."""


class SingleRank:
    """The only rank of a single-process learner."""

    is_leader = True
    rank = 0
    size = 1

    def step(self, tokens: int, steps: int, decide: Decide, carry_out: CarryOut, flags: Flags) -> None:
        """Carries out the decision at this step."""
        carry_out(_agreed(tokens, steps, decide(), [flags()]))

    def finish(self, carry_out: CarryOut) -> None:
        """Does nothing, because every agreement is already complete."""

    def agree(self, decide: Decide, flags: Flags) -> Agreed:
        return _agreed(0, 0, decide(), [flags()])

    def connect(self, device: torch.device | None) -> bool:
        """Returns whether a device is given."""
        return device is not None

    def exchange(self, given: Vector, sent: Sequence[int], received: Sequence[int]) -> Callable[[], Vector]:
        """Returns a function that returns the given values, because there are no other ranks."""
        assert [*sent] == [*received] == [len(given)], "a single rank sends all values to itself"
        return lambda: given

    def gathered(self, mine: bytes) -> list[bytes]:
        return [mine]

    def leave(self) -> None:
        """Does nothing, because there are no other ranks."""


ALONE = SingleRank()


class TorchRanks:
    """All ranks of torch.distributed's default process group.

    counts: whether to count this rank's tokens. If several ranks train on the same batch, as with tensor parallelism,
    only one of them counts its tokens.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, *, counts: bool = True) -> None:
        """group: a separate gloo group for agreements and for values in host memory.

        `leave` destroys this group and the group that `connect` creates.
        """
        self._group = group
        self._of_device: dist.ProcessGroup | None = None  # for values on the device of `connect`
        self.rank = rank
        self.size = size
        self.is_leader = self.rank == 0
        self._counts = counts
        self._tokens = 0  # this rank's tokens since the last agreement began
        self._steps = 0
        self._calls = 0
        self._interval = 1  # calls of `step` from the start of one agreement to the start of the next
        self._running: tuple[torch.Tensor, Any] | None = None  # message, all-reduce

    def step(self, tokens: int, steps: int, decide: Decide, carry_out: CarryOut, flags: Flags) -> None:
        """Ends the current agreement and begins the next, once per `_interval` calls."""
        self._tokens += tokens if self._counts else 0
        self._steps += steps
        self._calls += 1
        if self._calls >= self._interval:
            self.finish(carry_out)
            self._begin(decide, flags())

    def finish(self, carry_out: CarryOut) -> None:
        if self._running is not None:
            carry_out(self._end())

    def agree(self, decide: Decide, flags: Flags) -> Agreed:
        assert self._running is None, "an agreement is running: call finish first"
        self._begin(decide, flags())
        return self._end()

    def _begin(self, decide: Decide, flags: int) -> None:
        message = torch.zeros(_LENGTH + self.size, dtype=torch.int64)
        message[0] = self._tokens
        if self.is_leader:
            message[1] = self._steps  # all ranks use rank 0's number, so that they answer rounds alike
            message[2:_LENGTH] = torch.tensor(_encoded(decide()), dtype=torch.int64)
        message[_LENGTH + self.rank] = flags
        work = dist.all_reduce(message, group=self._group, async_op=True)
        self._running = message, work
        self._tokens = self._steps = self._calls = 0

    def _end(self) -> Agreed:
        assert self._running is not None, "no agreement is running"
        message, work = self._running
        work.wait()
        self._running = None
        tokens, steps, *numbers = message.tolist()
        decision = _decoded(numbers[: _LENGTH - 2])
        if decision.step_s:
            self._interval = min(MOST_STEPS, math.ceil(AGREED_S / decision.step_s))
        return _agreed(tokens, steps, decision, numbers[_LENGTH - 2 :])

    def connect(self, device: torch.device | None) -> bool:
        """Creates a process group with the default group's backend for this kind of device.

        Training uses this backend too, so it works with the ranks' devices. The group is separate, so that training's
        collective calls do not wait for exchanges.
        """
        backend = _backend_for(device)
        mine = f"{device.type} {backend}".encode() if device is not None and backend else b"none"
        if {*self.gathered(mine)} != {mine} or mine == b"none":
            return False
        self._of_device = dist.new_group(backend=backend, timeout=WAIT)
        return True

    def exchange(self, given: Vector, sent: Sequence[int], received: Sequence[int]) -> Callable[[], Vector]:
        """Transfers the values on threads of gloo, or on a stream of NCCL."""
        out: Any  # as `given`
        if isinstance(given, torch.Tensor):
            out = torch.empty(sum(received), dtype=torch.float32, device=given.device)
            tensors, group = (out, given), self._of_device
        else:
            out = buffers.empty(sum(received))
            tensors, group = (torch.from_numpy(out), torch.from_numpy(given)), self._group
        assert group is not None, "call connect first"
        work: Any = dist.all_to_all_single(*tensors, list(received), list(sent), group=group, async_op=True)

        def wait() -> Any:  # noqa: ANN401 - as `given`
            work.wait()
            assert len(given) == sum(sent), "the backend reads `given` until the exchange ends"
            return out

        return wait

    def gathered(self, mine: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(mine)]), group=self._group)
        longest = max(int(length) for length in lengths)
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(found, torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8), group=self._group)
        return [bytes(each[: int(length)].numpy()) for each, length in zip(found, lengths, strict=True)]

    def leave(self) -> None:
        """Waits for all ranks at a barrier, then destroys the groups."""
        dist.barrier(group=self._group)
        for group in (self._of_device, self._group):
            if group is not None:
                dist.destroy_process_group(group)


def rank_group(*, counts: bool = True) -> RankGroup:
    """Returns TorchRanks if torch.distributed runs with several processes, else SingleRank.

    counts: see TorchRanks. All ranks call this together.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        # Agreements and values in host memory need gloo. The default group may have only another backend.
        group = dist.new_group(backend="gloo", timeout=WAIT)
        return TorchRanks(group, dist.get_rank(), dist.get_world_size(), counts=counts)
    return SingleRank()


def _backend_for(device: torch.device | None) -> str:
    """Returns the default group's backend for a kind of device, or "" if it has none. All ranks get the same result."""
    configured = (each.split(":") for each in dist.get_backend_config().split(","))
    return "" if device is None else dict(configured).get(device.type, "")


def _agreed(tokens: int, steps: int, decision: Decision, flags: Sequence[int]) -> Agreed:
    """Returns an agreement's result. flags: the flags of each rank."""
    if not any(flags):
        return Agreed(tokens, steps, decision, replicas=(0,) * len(flags))
    failed = tuple(rank for rank, mine in enumerate(flags) if mine & FAILED)
    save = any(mine & SAVE for mine in flags) and not any(mine & SAVING for mine in flags)
    return Agreed(tokens, steps, decision, failed, save, tuple(mine >> FLAG_BITS for mine in flags))


_LENGTH = 7 + PER_BOUNDARY * (1 + 6 + 2)  # numbers in a message before the flags: tokens, steps, decision


def _encoded(decision: Decision) -> list[int]:
    """Returns a decision as integers. 0 marks an unused place, so encoded fragment numbers start at 1."""

    def filled(rows: Sequence[Sequence[int]], width: int) -> list[int]:
        assert len(rows) <= PER_BOUNDARY, "a boundary has at most PER_BOUNDARY items of each kind"
        flat = [number for row in rows for number in row]
        return flat + [0] * (PER_BOUNDARY * width - len(flat))

    return [
        decision.request,
        decision.run_tokens,
        decision.total_tokens,
        round(decision.step_s * 1e9),
        decision.judged,
        *filled([(fragment + 1,) for fragment in decision.released], 1),
        *filled([(a.fragment + 1, a.version, a.checksum, a.merged, a.drop, a.restores) for a in decision.adopted], 6),
        *filled([(fragment + 1, cycle) for fragment, cycle in decision.due], 2),
    ]


def _decoded(numbers: Sequence[int]) -> Decision:
    """Returns the decision that `_encoded` encoded."""
    request, run_tokens, total_tokens, step_ns, judged, *rest = numbers

    def rows(width: int) -> list[list[int]]:
        nonlocal rest
        mine, rest = rest[: PER_BOUNDARY * width], rest[PER_BOUNDARY * width :]
        return [mine[at : at + width] for at in range(0, len(mine), width) if mine[at]]

    released = tuple(fragment - 1 for (fragment,) in rows(1))
    adopted = tuple(
        Adopting(fragment - 1, version, checksum, bool(merged), bool(drop), restores)
        for fragment, version, checksum, merged, drop, restores in rows(6)
    )
    due = tuple((fragment - 1, cycle) for fragment, cycle in rows(2))
    return Decision(request, run_tokens, total_tokens, released, adopted, due, step_ns * 1e-9, judged)


def stopped_by(failed: Sequence[int]) -> LearnerError:
    """Returns the error that stops this rank because other ranks failed. failed: numbers of these ranks."""
    ranks = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
    return LearnerError(f"{ranks} stopped: fix the error that was logged there, then restart all ranks of this learner")
