"""PURE: the state of one fragment at a learner, and its changes. This module does not use torch.

Anchor A, local parameters L, pseudo-gradient D = A - L. A contribution carries q = decode(encode(D)). The quantisation
error stays in L, so there is no error buffer. An adoption of A' sets L to L':

    q was merged                  L' = L + (u + q), but L + u if the work was dropped after q was taken
    q is in flight or absent      L' = L + u             ("rebase"; "overwrite" sets D = 0)
    q was refused, work dropped   L' = A'                (D = 0: for example, the work is too stale)

Here, u is the published update that leads from A to A'. If it is unknown, for example because the learner fetched the
whole fragment, u = A' - A. Up to rounding, the sum of inner displacements is therefore the sum of own merged q, plus
A - L, plus dropped work. The owner of a frame computes the change of L, and each rank with these parameters adds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll_wire.codec.block_kernels import F32
from atoll_wire.codec.frame_codec import CodecError

from atoll.fragments import segments
from atoll.fragments.segments import Coded, Coder, FragmentShape

GIVEN_UP = (0, 0)  # tokens and steps of a contribution in flight whose work was dropped


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of the contribution in flight at the adopted version: unknown, merged, or dropped.

    q: the sent values if the contribution was merged, else None. drop: whether the outstanding work is dropped, because
    it is too stale or from another generation. restores: see Track, for the adopted anchor.
    """

    q: Coded | None = None
    drop: bool = False
    restores: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """The values that an adoption adds to the parameters. values: the result of `Coder.change`.

    since: the older anchor. q: the merged contribution's coded values, or None.
    """

    since: F32
    q: Coded | None
    values: Any


@dataclass(frozen=True, slots=True)
class Adopting:
    """Rank 0's decision that all ranks adopt a newer anchor.

    version, checksum: see PreparedAnchor. merged: whether the anchor contains the contribution in flight.
    drop, restores: see Fate.
    """

    fragment: int
    version: int
    checksum: int
    merged: bool = False
    drop: bool = False
    restores: int = 0


@dataclass(frozen=True, slots=True)
class PreparedAnchor:
    """A newer anchor, float32 (run.length,), ready to be adopted at a step boundary.

    checksum: published checksum of the whole fragment. Version and checksum identify the anchor on all ranks.
    change: computed in advance to shorten the step boundary. It is used only if its older anchor is still the adopted
    one and its q is still the merged one.
    """

    fragment: int
    version: int
    anchor: F32
    fate: Fate
    change: Change | None = None
    checksum: int = 0


class PseudoGradient:
    """A pseudo-gradient with its tokens, steps and base version.

    number: number of the contribution, which `Track.takes` counts. restores: see Track.
    The first read of `coded` encodes the values, unless `encode` did it. A worker thread reads it while the model
    trains.
    """

    def __init__(self, track: Track, values: Callable[[], Any], tokens: int, steps: int, coder: Coder) -> None:
        """values: returns the run's local values when the pseudo-gradient was taken, in the form that `coder` needs. It
        may wait for other ranks."""
        self.number = track.takes
        self.tokens = tokens
        self.steps = steps
        self.base_version = track.base_version
        self.restores = track.restores
        self._shape = track.shape
        self._coder = coder
        self._work: tuple[F32, Callable[[], Any]] | None = (track.anchor, values)
        self._coded: Coded | None = None
        self._error: CodecError | None = None

    def encode(self) -> None:
        """Encodes the values now, because they may change later. `coded` raises the error, if there is one."""
        try:
            _ = self.coded
        except CodecError as error:
            self._error, self._work = error, None

    @property
    def is_coded(self) -> bool:
        """Whether the values are encoded. Until then, they take four bytes each."""
        return self._work is None

    @property
    def coded(self) -> Coded:
        """The coded values. Raises CodecError if a value is not finite."""
        if self._work is not None:
            anchor, values = self._work
            self._coded, self._work = self._coder.code(anchor, values(), self._shape), None
        if self._error is not None:
            raise self._error
        assert self._coded is not None, "coded above"
        return self._coded


@dataclass(slots=True)
class Track:
    """The state of one fragment at the learner.

    shape: the shape of this rank's frames, in the run's codec.
    version, anchor: the last adopted version and its anchor.
    base_version: the version at which D was last empty or last merged. Other adoptions do not raise it, so they do not
    reduce the staleness.
    tokens_from, steps_from: the learner's counters at the end of its merged or dropped work. Later work is outstanding.
    flying: tokens and steps of the contribution in flight that are still outstanding. None if nothing is in flight.
    overwritten: tokens of that contribution that are no longer outstanding. If it is not merged, they are dropped.
    restores: number of restores to a checkpoint that this process had seen when the anchor arrived. The learner does
    not send work from before the latest restore.
    takes: number of pseudo-gradients taken so far, which is also the newest contribution's number. It is equal on all
    ranks.
    """

    shape: FragmentShape
    version: int
    anchor: F32
    base_version: int
    tokens_from: int = 0
    steps_from: int = 0
    flying: tuple[int, int] | None = None
    overwritten: int = 0
    restores: int = 0
    takes: int = 0

    def take(self, values: Callable[[], Any], tokens: int, steps: int, coder: Coder = segments) -> PseudoGradient:
        """Returns the current pseudo-gradient. values: see PseudoGradient. tokens, steps: the learner's counters."""
        assert self.flying is None, "at most one contribution of a fragment is in flight"
        self.flying = (tokens - self.tokens_from, steps - self.steps_from)
        self.takes += 1
        return PseudoGradient(self, values, *self.flying, coder)

    def later(self, steps: int) -> bool:
        """Returns whether the learner has work that is newer than the contribution in flight.

        steps: the learner's counter.
        """
        return self.flying is not None and self.steps_from + self.flying[1] < steps

    def refused(self) -> int:
        """Records a refusal of the contribution in flight. Its work stays outstanding, except overwritten work.

        Returns the number of overwritten tokens, which are lost.
        """
        self.flying = None
        given_up = self.overwritten
        self.overwritten = 0
        return given_up

    def change_to(self, newer: PreparedAnchor, coder: Coder = segments) -> Any:  # noqa: ANN401 - see Coder
        """Returns the values to add to the parameters in an adoption that keeps outstanding work."""
        q = newer.fate.q if self.flying != GIVEN_UP else None
        ahead = newer.change
        if ahead is not None and ahead.since is self.anchor and ahead.q is q:
            return ahead.values
        return coder.change(self.anchor, newer.anchor, None, q, self.shape)

    def adopt(self, newer: PreparedAnchor, tokens: int, steps: int, *, keep: bool) -> int:
        """Records an adoption. Returns the number of dropped tokens. tokens, steps: the learner's counters.

        keep: True if the change was added to the parameters, False if the parameters were set to the anchor.
        """
        fate = newer.fate
        assert fate.q is None or self.flying is not None, "only a contribution in flight can be merged"
        if fate.q is not None and self.flying is not None:
            self.tokens_from += self.flying[0]
            self.steps_from += self.flying[1]
            self.flying = None
            self.overwritten = 0
        abandoned = 0
        if not keep:
            given_up = self.refused() if fate.drop else 0
            abandoned = given_up + self.give_up(tokens, steps)
        if fate.q is not None or self.steps_from == steps:
            self.base_version = newer.version
        self.base_version = min(self.base_version, newer.version)  # the core may have been restored from a backup
        self.version = newer.version
        self.restores = max(self.restores, fate.restores)
        self.anchor = newer.anchor
        return abandoned

    def give_up(self, tokens: int, steps: int) -> int:
        """Drops the outstanding work. Returns its number of tokens, without those of the contribution in flight."""
        given_up = tokens - self.tokens_from
        if self.flying is not None:
            given_up -= self.flying[0]
            self.overwritten += self.flying[0]
            self.flying = GIVEN_UP
        self.tokens_from = tokens
        self.steps_from = steps
        return given_up
