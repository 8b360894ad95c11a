"""The processes of one learner: a single process, or all ranks of a torch.distributed job.

Under torchrun, every rank calls `Learner.step()`, and rank 0 connects to the core. One small all-reduce per step sums
the tokens and distributes rank 0's decision. Adoptions are broadcast, so that all ranks apply them at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from atoll.fragments.exchange import AT_ONCE

GO_ON = 0
STOP = 1
STAND = 2
RESTORE = 3
SAVE, SAVING = 1, -(1 << 20)  # votes on saving a checkpoint: asks for one, or still writes the last one


@dataclass(frozen=True, slots=True)
class Agreed:
    """The agreement of all ranks at this step.

    tokens: tokens of this step, summed over ranks. request: GO_ON, STOP, STAND (the run is paused: agree again), or
    RESTORE (reset all parameters). run_tokens: tokens that the run had trained before this step. total_tokens: tokens
    that the run will train. Both come from rank 0, so that schedules are the same on all ranks. adopt: fragments to
    adopt. save: whether all ranks save a checkpoint.
    """

    tokens: int
    request: int
    run_tokens: int
    total_tokens: int
    adopt: tuple[int, ...] = ()
    save: bool = False


class RankGroup(Protocol):
    """The ranks of one learner. is_leader: whether this rank connects to the core."""

    is_leader: bool

    def agree(
        self, tokens: int, request: int, run_tokens: int, total_tokens: int, adopt: Sequence[int], vote: int = 0
    ) -> Agreed:
        """Agrees on the next actions. Every rank calls this at every step. Other arguments than these are rank 0's.

        tokens: summed. vote: summed; the ranks save a checkpoint if the sum is positive, so not while one is SAVING.
        adopt: at most AT_ONCE fragments.
        """

    def spread(self, parameters: Sequence[torch.Tensor]) -> None:
        """Sets the parameters of every rank to rank 0's values."""

    def leave(self) -> None:
        """Returns once every rank has called this, so that no rank ends the job while rank 0 is still sending."""


class SingleRank:
    """A learner of one process."""

    is_leader = True

    def agree(
        self, tokens: int, request: int, run_tokens: int, total_tokens: int, adopt: Sequence[int], vote: int = 0
    ) -> Agreed:
        """Returns its own arguments, because there are no other ranks."""
        return Agreed(tokens, request, run_tokens, total_tokens, tuple(adopt), vote > 0)

    def spread(self, parameters: Sequence[torch.Tensor]) -> None:
        """Does nothing: there are no other ranks."""

    def leave(self) -> None:
        """Does nothing: there are no other ranks."""


class TorchRanks:
    """All ranks of the default process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """group: for decisions in host memory, whatever backend the gradients use. `leave` destroys it."""
        self.is_leader = dist.get_rank() == 0
        self._group = group

    def agree(
        self, tokens: int, request: int, run_tokens: int, total_tokens: int, adopt: Sequence[int], vote: int = 0
    ) -> Agreed:
        """See RankGroup. Makes one all-reduce of a few numbers. Only rank 0 adds its decision."""
        message = torch.zeros(5 + AT_ONCE, dtype=torch.int64)
        message[0], message[4] = tokens, vote
        if self.is_leader:
            message[1], message[2], message[3] = request, run_tokens, total_tokens
            for place, fragment in enumerate(adopt, start=5):
                message[place] = fragment + 1
        dist.all_reduce(message, group=self._group)
        tokens, request, run_tokens, total_tokens, votes, *fragments = message.tolist()
        return Agreed(tokens, request, run_tokens, total_tokens, tuple(f - 1 for f in fragments if f), votes > 0)

    def spread(self, parameters: Sequence[torch.Tensor]) -> None:
        """See RankGroup. Broadcasts over the default group, whose backend can send tensors of these devices."""
        for parameter in parameters:
            dist.broadcast(parameter.detach(), src=0)

    def leave(self) -> None:
        """See RankGroup. Waits at a barrier, then destroys the group of `agree`."""
        dist.barrier(group=self._group)
        dist.destroy_process_group(self._group)


def rank_group() -> RankGroup:
    """Returns TorchRanks if torch.distributed runs with several processes, else SingleRank. Call it on all ranks."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TorchRanks(dist.new_group(backend="gloo"))
    return SingleRank()
