"""PURE: the state of one fragment at a learner, and how it changes. No IO, no threads, no torch.

Anchor A, local parameters L, outstanding work D = A - L. A contribution carries q = decode(encode(D)). The quantisation
error stays in L, so there is no error buffer. Adopting A' after D was taken:

    q was merged                  L' = A' - (D - q), but A' - D if the work was given up after q was taken
    q in flight, refused, or none L' = A' - D            ("rebase"; "overwrite" sets D = 0)
    q too stale                   L' = A'                (D = 0: the work is given up)

Therefore, up to rounding: sum of inner displacements = sum of own merged q + (A - L) + given-up work. For parameters
that are not float32, D is measured from the stored value. The origin o = stored(L') + (A' - L') replaces A. Otherwise
the rounding of A' would be sent as work.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll_wire.codec.block_kernels import F32

from atoll.fragments.segments import Coded, FragmentShape, SegmentAddresses, rebase, store, take

GIVEN_UP = (0, 0)  # tokens and steps of a contribution in flight after its work was given up


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of the contribution in flight at the adopted version: unknown, merged, or given up.

    q: the values that were sent, if the contribution was merged. drop: the outstanding work is given up, because it is
    too stale or of another generation. restores: of the adopted anchor (see Track).
    """

    q: Coded | None = None
    drop: bool = False
    restores: int = 0


@dataclass(frozen=True, slots=True)
class PseudoGradient:
    """A coded pseudo-gradient, with its tokens, steps and base version. restores: see Track."""

    coded: Coded
    tokens: int
    steps: int
    base_version: int
    restores: int = 0


@dataclass(slots=True)
class Track:
    """The state of one fragment at the learner.

    shape: the fragment's shape in the run's codec.
    version, anchor: the last adopted version and its anchor.
    origin: the vector that D is measured from. For float32 parameters, it is the anchor.
    base_version: the version at which D was last empty or last merged, so that an adoption does not reduce staleness.
    tokens_from, steps_from: the learner's counters at that moment. Later tokens and steps are outstanding.
    flying: tokens and steps of the contribution in flight that are still outstanding. None if nothing is in flight.
    overwritten: tokens of that contribution that are no longer outstanding. They are given up unless it is merged.
    restores: how many restores to a checkpoint this process had seen when the anchor arrived. Work from before the
    latest restore is not sent.
    """

    shape: FragmentShape
    version: int
    anchor: F32
    origin: F32
    base_version: int
    tokens_from: int = 0
    steps_from: int = 0
    flying: tuple[int, int] | None = None
    overwritten: int = 0
    restores: int = 0

    def take(self, places: SegmentAddresses, tokens: int, steps: int) -> PseudoGradient:
        """Takes and codes the current pseudo-gradient. tokens, steps: the learner's counters.

        places: addresses of the stored parameters as float32. Raises CodecError if the pseudo-gradient is not finite.
        """
        assert self.flying is None, "at most one contribution of a fragment is in flight"
        coded = take(self.origin, places, self.shape)
        self.flying = (tokens - self.tokens_from, steps - self.steps_from)
        return PseudoGradient(coded, *self.flying, self.base_version, self.restores)

    def later(self, steps: int) -> bool:
        """Returns whether the learner has work that is newer than the contribution in flight.

        steps: the learner's counter.
        """
        return self.flying is not None and self.steps_from + self.flying[1] < steps

    def refused(self) -> int:
        """Ends the flight of a refused contribution. Its work stays outstanding. Returns the number of lost tokens."""
        self.flying = None
        given_up = self.overwritten
        self.overwritten = 0
        return given_up

    def adopt(
        self, anchor: F32, version: int, fate: Fate, tokens: int, steps: int, places: SegmentAddresses, *, keep: bool
    ) -> int:
        """Moves to a newer anchor, and changes the parameters at `places`. Returns the number of given-up tokens.

        places: addresses of the stored parameters as float32, changed in place. keep: "rebase" (True) or "overwrite"
        (False). If the parameters are stored in a narrower type, call `stored` afterwards.
        """
        assert fate.q is None or self.flying is not None, "only a contribution in flight can be merged"
        q = fate.q if self.flying != GIVEN_UP else None
        if fate.q is not None and self.flying is not None:
            self.tokens_from += self.flying[0]
            self.steps_from += self.flying[1]
            self.flying = None
            self.overwritten = 0
        abandoned = 0
        if fate.drop or not keep:
            given_up = self.refused() if fate.drop else 0
            abandoned = given_up + self.give_up(tokens, steps)
            store(anchor, places, self.shape)
        else:
            rebase(self.origin, anchor, q, places, self.shape)
        if fate.q is not None or self.steps_from == steps:
            self.base_version = version
        self.base_version = min(self.base_version, version)  # the core may have been restored from a backup
        self.version = version
        self.restores = max(self.restores, fate.restores)
        self.anchor = anchor
        self.origin = anchor
        return abandoned

    def give_up(self, tokens: int, steps: int) -> int:
        """Drops the outstanding work. Returns its tokens, without those of the contribution in flight."""
        given_up = tokens - self.tokens_from
        if self.flying is not None:
            given_up -= self.flying[0]
            self.overwritten += self.flying[0]
            self.flying = GIVEN_UP
        self.tokens_from = tokens
        self.steps_from = steps
        return given_up

    def stored(self, wanted: F32, stored: F32) -> None:
        """Records that parameters were rounded to a narrower type. wanted, stored: before and after, as float32."""
        self.origin = stored + (self.anchor - wanted)
