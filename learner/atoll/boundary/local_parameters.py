"""Takes pseudo-gradients from a rank's local parameters, and adopts newer anchors.

Only the training thread uses this module. To take a pseudo-gradient, it copies this rank's parameters and sends them to
the owners of the frames. A worker thread encodes the pseudo-gradient later. To adopt an anchor, the owners send changes
to the ranks that hold the parameters, and these ranks add the changes. A learner of one process sends nothing, because
it holds all parameters and owns all frames.

The code calls torch and numpy as rarely as possible, because each call releases the GIL. A busy thread returns the GIL
only after `sys.getswitchinterval`. If the parameters are float32 and on the host, `take` and `adopt` release the GIL
once each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from atoll_wire.codec import buffers
from atoll_wire.codec.block_kernels import F32
from atoll_wire.layout.frame_spans import Codec
from torch import nn

from atoll.boundary.host_memory import HostMemory
from atoll.fragments import segments
from atoll.fragments.adoption import Fate, PreparedAnchor, PseudoGradient, Track
from atoll.fragments.segments import I64, FragmentShape
from atoll.ranks.division import Division, Moves
from atoll.ranks.rank_group import ALONE, Exchanged, RankGroup


class LocalParameters:
    """The local parameters and tracks of all fragments. The constructor writes the first anchors into the model.

    values: trainable parameters in the order of the layout's tensors. divisions: this rank's division of each fragment.
    anchors: the first anchor of each fragment, with the values of the frames that this rank owns.
    keep: an adoption keeps outstanding work (True, "rebase") or drops it (False, "overwrite").
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
    ) -> None:
        self._memory = HostMemory(values, [division.pieces for division in divisions])
        self._ranks = ranks
        self._keep = keep
        self._routes = [_Routes.of(division) for division in divisions]
        self._apart: dict[int, F32] = {}  # by fragment: values after the adoptions of `adopt_apart`
        self._begun: dict[int, _Begun] = {}  # adoptions whose values have not arrived yet
        self.torn = False  # an exception interrupted an adoption, so model and tracks may disagree
        self.tracks: list[Track] = []
        for number, (first, division) in enumerate(zip(anchors, divisions, strict=True)):
            shape, restores = FragmentShape.of(division.run, codec), first.fate.restores
            self.tracks.append(Track(shape, first.version, first.anchor, first.version, restores=restores))
            self._write(number, self._spread(number, first.anchor)(), add=False)

    def take(self, number: int, tokens: int, steps: int) -> PseudoGradient:
        """Takes a fragment's pseudo-gradient. tokens, steps: the learner's counters."""
        apart = self._apart.get(number)
        return self.tracks[number].take(self._values(number) if apart is None else lambda: apart, tokens, steps)

    def begin(self, newer: PreparedAnchor) -> None:
        """Begins an adoption. Idempotent. Until `finish`, `take` uses the older anchor."""
        newer = self._own(newer)
        number, keep = newer.fragment, self._keep and not newer.fate.drop
        if number not in self._begun:
            values = self.tracks[number].change_to(newer) if keep else newer.anchor
            self._begun[number] = _Begun(newer, keep, self._spread(number, values))

    def _own(self, newer: PreparedAnchor) -> PreparedAnchor:
        """Returns the anchor, with this rank's adopted values if only other ranks have fetched this version again."""
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
        self._write(number, begun.arriving(), add=begun.keep)
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
            self._apart[number] = self._values(number)()
        change = self.tracks[number].change_to(newer) if keep else None
        # A new array, because a pseudo-gradient may still use the old one.
        self._apart[number] = newer.anchor if change is None else self._apart[number] + change
        return self.tracks[number].adopt(newer, tokens, steps, keep=keep)

    def restore(self, number: int, tokens: int, steps: int) -> int:
        """Resets a fragment to its anchor. Returns the number of dropped tokens. tokens, steps: as in `take`."""
        track = self.tracks[number]
        self._begun.pop(number, None)  # a signal handler interrupted this adoption, which begins again later
        self._write(number, self._spread(number, track.anchor)(), add=False)
        return track.adopt(PreparedAnchor(number, track.version, track.anchor, Fate()), tokens, steps, keep=False)

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Context manager for all adoptions of a boundary. If its block raises, the learner cannot continue."""
        self.torn = True
        yield
        self.torn = False

    def forget(self) -> None:
        """Drops all references to the parameters' memory, so that it can be moved or freed."""
        self._memory.forget()

    def _values(self, number: int) -> Callable[[], F32]:
        """Begins to collect the values of the run that this rank owns. Returns a function that waits for them."""
        routes = self._routes[number]
        given = buffers.empty(routes.division.given.size)
        segments.gather(routes.given.starts(self._memory.read(number)), routes.given.rows, given)
        received = self._ranks.exchange(given, routes.division.given.counts, routes.division.owned.counts)
        return lambda: _placed(received(), routes.division.owned, self.tracks[number].shape.length)

    def _write(self, number: int, values: F32, *, add: bool) -> None:
        """Adds values to this rank's parameters, or overwrites the parameters. values: in the order of `held`."""
        held = self._routes[number].held
        (segments.add if add else segments.store)(values, held.starts(self._memory.read(number)), held.rows)
        self._memory.write(number)

    def _spread(self, number: int, values: F32) -> Exchanged:
        """Begins to send values of the run that this rank owns to the ranks that hold them as parameters.

        Returns a function that waits for the values of the parameters that this rank holds.
        """
        division = self._routes[number].division
        given = _collected(values, division.spread)
        return self._ranks.exchange(given, division.spread.counts, division.held.counts)


@dataclass(frozen=True, slots=True)
class _Begun:
    """An adoption that has begun. keep: add values to the parameters (True), or overwrite them (False)."""

    newer: PreparedAnchor
    keep: bool
    arriving: Exchanged


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs of a local vector in a message buffer.

    pieces: piece of each run. offsets: bytes from the start of the piece. rows: position in the buffer, and length.
    """

    pieces: I64
    offsets: I64
    rows: I64

    @classmethod
    def of(cls, division: Division, moves: Moves) -> _Runs:
        first = np.array([piece.offset for piece in division.pieces], np.int64)
        pieces = np.searchsorted(first, moves.places, side="right") - 1
        offsets = 4 * (moves.places - first[pieces])
        return cls(pieces, offsets, np.stack([moves.starts, moves.lengths], axis=1))

    def starts(self, addresses: I64) -> I64:
        """Returns the address of each run. addresses: address of each piece."""
        return addresses[self.pieces] + self.offsets


@dataclass(frozen=True, slots=True)
class _Routes:
    """A division, with the arguments of the kernels that copy its values."""

    division: Division
    given: _Runs
    held: _Runs

    @classmethod
    def of(cls, division: Division) -> _Routes:
        return cls(division, _Runs.of(division, division.given), _Runs.of(division, division.held))


def _collected(vector: F32, moves: Moves) -> F32:
    """Returns a message buffer with the moved values of a vector, or the vector itself if the buffer would be
    identical."""
    if moves.is_all_of(len(vector)):
        return vector
    out = buffers.empty(moves.size)
    segments.gather(vector.ctypes.data + 4 * moves.places, np.stack([moves.starts, moves.lengths], axis=1), out)
    return out


def _placed(buffer: F32, moves: Moves, length: int) -> F32:
    """Returns a vector with the values of a message buffer: the inverse of `_collected`."""
    if moves.is_all_of(length):
        return buffer
    out = buffers.empty(length)
    segments.store(buffer, out.ctypes.data + 4 * moves.places, np.stack([moves.starts, moves.lengths], axis=1))
    return out
