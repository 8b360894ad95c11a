"""The processes of one learner: a single one, or all ranks of a torch.distributed job that move as one.

Under torchrun every rank calls `Learner.step()`; rank 0 talks to the core. One small all-reduce a step adds up the
tokens and spreads rank 0's decision, and an adoption is broadcast, so that all ranks apply it at the same step.
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


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know at this step.

    tokens: of this step, all ranks together. wish: GO_ON, STOP, STAND (the run is paused: all ask again),
    or RESTORE (all parameters).
    run_tokens, total_tokens: rank 0's, so that schedules and loops that follow them are the same everywhere: trained
    before this step by everybody, and to be trained. adopt: fragments.
    """

    tokens: int
    wish: int
    run_tokens: int
    total_tokens: int
    adopt: tuple[int, ...] = ()


class Island(Protocol):
    """How the ranks agree."""

    talks: bool

    def agree(self, tokens: int, wish: int, run_tokens: int, total_tokens: int, adopt: Sequence[int]) -> Agreed:
        """Called by every rank at every step; all but `tokens` count on the rank that talks. adopt: AT_ONCE at most."""

    def spread(self, parameters: Sequence[torch.Tensor]) -> None:
        """Gives every rank the talking rank's values."""

    def leave(self) -> None:
        """Returns when every rank has come to its end: nobody tears the job down while rank 0 still sends."""


class Alone:
    """One process."""

    talks = True

    def agree(self, tokens: int, wish: int, run_tokens: int, total_tokens: int, adopt: Sequence[int]) -> Agreed:
        """What it knows itself."""
        return Agreed(tokens, wish, run_tokens, total_tokens, tuple(adopt))

    def spread(self, parameters: Sequence[torch.Tensor]) -> None:
        """There is nobody else."""

    def leave(self) -> None:
        """There is nobody to wait for."""


class Ranks:
    """All ranks of the default process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """group: of the host, where decisions travel, whatever backend the gradients use. `leave` ends it."""
        self.talks = dist.get_rank() == 0
        self._group = group

    def agree(self, tokens: int, wish: int, run_tokens: int, total_tokens: int, adopt: Sequence[int]) -> Agreed:
        """One all-reduce of a few numbers: only rank 0 adds what it decided and knows to the sums."""
        message = torch.zeros(4 + AT_ONCE, dtype=torch.int64)
        message[0] = tokens
        if self.talks:
            message[1], message[2], message[3] = wish, run_tokens, total_tokens
            for place, fragment in enumerate(adopt, start=4):
                message[place] = fragment + 1
        dist.all_reduce(message, group=self._group)
        tokens, wish, run_tokens, total_tokens, *fragments = message.tolist()
        return Agreed(tokens, wish, run_tokens, total_tokens, tuple(f - 1 for f in fragments if f))

    def spread(self, parameters: Sequence[torch.Tensor]) -> None:
        """A broadcast over the default group: the one that moves these devices' tensors."""
        for parameter in parameters:
            dist.broadcast(parameter.detach(), src=0)

    def leave(self) -> None:
        """A barrier, then the end of the group that decisions travelled on."""
        dist.barrier(group=self._group)
        dist.destroy_process_group(self._group)


def island() -> Island:
    """Ranks when torch.distributed runs with more than one, else Alone. All ranks call it together."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Ranks(dist.new_group(backend="gloo"))
    return Alone()
