"""PURE: the arithmetic of one fragment at a learner. No IO, no threads, no torch.

Anchor A, local parameters L, outstanding work D = A - L. A contribution carries q = decode(encode(D)); what
quantisation left out stays in L, so there is no error buffer. Adopting A' with D taken before:

    mine was merged on the way    L' = A' - (D - q)
    in flight, refused, or none   L' = A' - D            ("rebase"; "overwrite" sets D = 0)
    too stale                     L' = A'                (D = 0: the work is given up)

so that, to rounding: sum of inner displacement = sum of own merged q + (A - L) + abandoned. For parameters that are
not float32, D is measured from the value really stored: the origin o = float32(L') + D stands in for A, else the
rounding of A' itself would be sent as work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from atoll_wire.kernels import kernel
from numpy.typing import NDArray

F32 = NDArray[np.float32]

NONE = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of the contribution in flight by the version that is adopted: nothing yet, merged, or given up.

    q: its decoded values when it was merged. drop: the outstanding work is given up (too stale, another generation).
    """

    q: F32 | None = None
    drop: bool = False


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A pseudo-gradient as it was taken, with what the core must know of it."""

    vector: F32
    tokens: int
    steps: int
    base_version: int


@dataclass(slots=True)
class Track:
    """Where one fragment stands at the learner.

    version, anchor: what was last adopted. origin: D is measured from it (the anchor itself for float32).
    base_version: at which D was last empty or last merged, so that staleness cannot hide behind an adoption.
    tokens_from, steps_from: the learner's counters at that moment; what came since is outstanding.
    flying: tokens and steps of the contribution in flight, as far as they are among the outstanding ones.
    overwritten: its tokens when they are not any more: given up unless it is merged.
    """

    version: int
    anchor: F32
    origin: F32
    base_version: int
    tokens_from: int = 0
    steps_from: int = 0
    flying: tuple[int, int] | None = None
    overwritten: int = 0

    def take(self, local: F32, tokens: int, steps: int) -> Outstanding:
        """The pseudo-gradient now. tokens, steps: the learner's counters.

        local: float32 parameters as stored. The pseudo-gradient has memory of its own.
        """
        assert self.flying is None, "at most one contribution of a fragment is in flight"
        self.flying = (tokens - self.tokens_from, steps - self.steps_from)
        return Outstanding(self.origin - local, *self.flying, self.base_version)

    def later(self, steps: int) -> bool:
        """Whether there is work that came after the contribution in flight."""
        return self.flying is not None and self.steps_from + self.flying[1] < steps

    def refused(self) -> int:
        """The contribution in flight came to nothing; its work stays outstanding. Returns tokens that are given up."""
        self.flying, given_up, self.overwritten = None, self.overwritten, 0
        return given_up

    def adopt(
        self, anchor: F32, version: int, fate: Fate, tokens: int, steps: int, work: F32, local: F32, *, keep: bool
    ) -> int:
        """Moves to a newer anchor; returns the tokens that are given up. Takes no memory of its own.

        work: the parameters as stored; becomes the work that is kept. local: becomes the new parameters.
        keep: "rebase" (True) or "overwrite" (False). `settle` must follow with what was stored.
        """
        assert fate.q is None or self.flying is not None, "only what is in flight can be merged"
        if fate.q is not None and self.flying is not None:
            self.tokens_from += self.flying[0]
            self.steps_from += self.flying[1]
            self.flying, self.overwritten = None, 0
        abandoned = 0
        if fate.drop or not keep:
            abandoned = tokens - self.tokens_from
            if fate.drop:
                abandoned += self.refused()
            elif self.flying is not None:
                abandoned -= self.flying[0]
                self.overwritten += self.flying[0]
                self.flying = (0, 0)
            self.tokens_from, self.steps_from = tokens, steps
            work.fill(0.0)
            local[:] = anchor
        else:
            _rebase(self.origin, NONE if fate.q is None else fate.q, anchor, work, local)
        if fate.q is not None or self.steps_from == steps:
            self.base_version = version
        self.base_version = min(self.base_version, version)  # the core may have come back from a backup
        self.version, self.anchor = version, anchor
        return abandoned

    def settle(self, stored: F32 | None, work: F32) -> None:
        """Notes the origin. stored: the parameters as float32 after they were written in a narrower type, else None."""
        self.origin = self.anchor if stored is None else stored + work


@kernel
def _rebase(origin: F32, q: F32, anchor: F32, work: F32, local: F32) -> None:
    """work: from the parameters as stored to origin - work - q; local = anchor - work. All as long, q may be empty."""
    if len(q) == 0:
        for i in range(len(anchor)):
            work[i] = origin[i] - work[i]
            local[i] = anchor[i] - work[i]
    else:
        for i in range(len(anchor)):
            work[i] = origin[i] - work[i] - q[i]
            local[i] = anchor[i] - work[i]


def warm_up() -> None:
    """Compiles the kernel, or loads it from disk, so that nothing compiles while a model trains."""
    _rebase(*np.ones((5, 1), np.float32))
