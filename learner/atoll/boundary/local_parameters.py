"""Takes pseudo-gradients from a rank's local parameters and adopts newer anchors.

Only the training thread uses this module. To take a pseudo-gradient, it copies this rank's parameters and sends them to
the owners of the frames. A worker thread encodes the pseudo-gradient later. To adopt an anchor, the owners send changes
to the ranks that hold the parameters, and these ranks add the changes. A single-process learner sends nothing, because
it holds all parameters and owns all frames. In host memory, it also copies nothing: it encodes at
the step boundary, which takes longer than a copy but saves the copy's memory.

The values are in host memory, or on the device of the parameters if a coder for that device is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from atoll_wire.codec.block_kernels import F32
from atoll_wire.layout.frame_spans import Codec
from torch import nn

from atoll.boundary.device_values import DeviceValues
from atoll.boundary.host_values import HostValues
from atoll.device.device_coder import DeviceCoder
from atoll.fragments.adoption import Fate, PreparedAnchor, PseudoGradient, Track
from atoll.fragments.in_place import Located
from atoll.fragments.segments import Coder, FragmentShape
from atoll.ranks.division import Division
from atoll.ranks.rank_group import ALONE, RankGroup


class Values(Protocol):
    """A rank's values, in host memory or on a device."""

    @property
    def coder(self) -> Coder:
        """Encodes the values and computes changes for `write`."""

    def read(self, number: int) -> Callable[[], Any]:
        """Begins to collect the values of a run that this rank owns. Returns a function that waits for the result."""

    def located(self, number: int, shape: FragmentShape) -> Located | None:
        """Returns where the values are, if the coder can encode them there, and otherwise None."""

    def whole(self, number: int, anchor: F32) -> Any:  # noqa: ANN401 - see Coder
        """Returns an anchor, float32 (run.length,), in the same form as the result of `read`."""

    def spread(self, number: int, values: Any) -> Callable[[], Any]:  # noqa: ANN401
        """Begins to send a run's values from this rank, which owns the run, to the ranks that hold them as parameters.

        Returns a function that waits for, and returns, the values of the parameters that this rank holds.
        """

    def write(self, number: int, values: Any, *, add: bool) -> None:  # noqa: ANN401
        """Adds the values from `spread` to this rank's parameters, or overwrites the parameters with them. values: the
        result of `spread`."""

    def sum(self, one: Any, other: Any) -> Any:  # noqa: ANN401
        """Returns the sum of two vectors of a run's values, in new memory."""

    def forget(self) -> None:
        """Drops all references to the parameters' memory, so that it can be moved or freed."""


class LocalParameters:
    """The local parameters and tracks of all fragments. The constructor writes the first anchors into the model.

    values: trainable parameters in the order of the layout's tensors. divisions: this rank's division of each fragment.
    anchors: the first anchor of each fragment, with the values of the frames that this rank owns.
    keep: whether an adoption keeps outstanding work ("rebase") or drops it ("overwrite").
    coder: the coder for the parameters' device, or None to use host memory. Either all ranks have a coder or none has.
    """

    def __init__(
        self,
        values: Sequence[nn.Parameter],
        divisions: Sequence[Division],
        codec: Codec,
        anchors: Iterable[PreparedAnchor],
        *,
        keep: bool,
        ranks: RankGroup = ALONE,
        coder: DeviceCoder | None = None,
    ) -> None:
        shapes = [FragmentShape.of(division.run, codec) for division in divisions]
        self._values: Values = (
            HostValues(values, divisions, ranks) if coder is None else DeviceValues(values, divisions, coder, ranks)
        )
        self._keep = keep
        self._apart: dict[int, Any] = {}  # values after the adoptions of `adopt_apart`, by fragment
        self._begun: dict[int, _Begun] = {}  # adoptions whose values have not arrived yet
        self.torn = False  # an exception interrupted an adoption, so the model and the tracks may disagree
        self.tracks: list[Track] = []
        for number, (first, shape) in enumerate(zip(anchors, shapes, strict=True)):
            restores = first.fate.restores
            self.tracks.append(Track(shape, first.version, first.anchor, first.version, restores=restores))
            self._overwrite(number)

    def take(self, number: int, tokens: int, steps: int) -> PseudoGradient:
        """Takes a fragment's pseudo-gradient. tokens, steps: the learner's counters."""
        track, apart, coder = self.tracks[number], self._apart.get(number), self._values.coder
        if apart is not None:
            return track.take(lambda: apart, tokens, steps, coder)
        if (located := self._values.located(number, track.shape)) is None:
            return track.take(self._values.read(number), tokens, steps, coder)
        taken = track.take(lambda: located, tokens, steps, coder)
        taken.encode()
        return taken

    def begin(self, newer: PreparedAnchor) -> None:
        """Begins an adoption. Idempotent. Until `finish`, `take` uses the older anchor."""
        newer = self._own(newer)
        number, keep = newer.fragment, self._keep and not newer.fate.drop
        if number not in self._begun:
            self._begun[number] = _Begun(newer, keep, self._values.spread(number, self._change(newer, keep=keep)))

    def _own(self, newer: PreparedAnchor) -> PreparedAnchor:
        """Returns the anchor. If only other ranks have fetched this version again, it has this rank's values."""
        track = self.tracks[newer.fragment]
        if len(newer.anchor) == track.shape.length:
            return newer
        assert newer.version == track.version, "every owner has prepared an adopted version"
        return replace(newer, anchor=track.anchor)

    @property
    def begun(self) -> list[int]:
        """The fragments whose adoptions have begun but are not finished, in order."""
        return list(self._begun)

    def finish(self, number: int, tokens: int, steps: int) -> int:
        """Finishes an adoption. Returns the number of dropped tokens. tokens, steps: as in `take`."""
        begun = self._begun[number]
        self._values.write(number, begun.arriving(), add=begun.keep)
        del self._begun[number]
        return self.tracks[number].adopt(begun.newer, tokens, steps, keep=begun.keep)

    def adopt(self, newer: PreparedAnchor, tokens: int, steps: int) -> int:
        """Begins and finishes an adoption."""
        self.begin(newer)
        return self.finish(newer.fragment, tokens, steps)

    def adopt_apart(self, newer: PreparedAnchor, tokens: int, steps: int) -> int:
        """Adopts an anchor in a copy of the fragment's values. The model stays unchanged, and `take` uses the copy."""
        newer = self._own(newer)
        number, keep = newer.fragment, self._keep and not newer.fate.drop
        if number not in self._apart:
            self._apart[number] = self._values.read(number)()
        values = self._change(newer, keep=keep)
        # New memory, because a pseudo-gradient may still use the old values.
        self._apart[number] = self._values.sum(self._apart[number], values) if keep else values
        return self.tracks[number].adopt(newer, tokens, steps, keep=keep)

    def restore(self, number: int, tokens: int, steps: int) -> int:
        """Resets a fragment to its anchor. Returns the number of dropped tokens. tokens, steps: as in `take`."""
        track = self.tracks[number]
        self._begun.pop(number, None)  # a signal handler interrupted this adoption, which begins again later
        self._overwrite(number)
        return track.adopt(PreparedAnchor(number, track.version, track.anchor, Fate()), tokens, steps, keep=False)

    def equalize(self, number: int) -> None:
        """Gives all replicas of each value in a fragment the value that pseudo-gradients are computed from."""
        self._values.write(number, self._values.spread(number, self._values.read(number)())(), add=False)

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Context manager for all adoptions of a boundary. If its block raises, the learner cannot continue."""
        self.torn = True
        yield
        self.torn = False

    def forget(self) -> None:
        """Drops all references to the parameters' memory, so that it can be moved or freed."""
        self._values.forget()

    def _change(self, newer: PreparedAnchor, *, keep: bool) -> Any:  # noqa: ANN401 - see Coder
        """Returns what an adoption adds to the parameters (keep=True) or writes to them (keep=False)."""
        if keep:
            return self.tracks[newer.fragment].change_to(newer, self._values.coder)
        return self._values.whole(newer.fragment, newer.anchor)

    def _overwrite(self, number: int) -> None:
        """Sets a fragment's parameters to its anchor."""
        anchor = self._values.whole(number, self.tracks[number].anchor)
        self._values.write(number, self._values.spread(number, anchor)(), add=False)


@dataclass(frozen=True, slots=True)
class _Begun:
    """An adoption that has begun. keep: whether to add values to the parameters or overwrite the parameters with
    them."""

    newer: PreparedAnchor
    keep: bool
    arriving: Callable[[], Any]
