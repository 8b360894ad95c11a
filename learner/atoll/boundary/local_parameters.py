"""The local parameters of every fragment at a step boundary: takes pseudo-gradients and adopts newer anchors.

Only the training thread uses this module. The code calls torch and numpy as rarely as possible, because each call
releases the GIL. A busy thread returns the GIL only after `sys.getswitchinterval`. For float32 parameters on the host,
adopting and taking make one such call each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from atoll_wire.codec.block_kernels import F32
from atoll_wire.codec.frame_codec import CodecError

from atoll.boundary.host_memory import HostMemory
from atoll.errors import LearnerError
from atoll.fragments.adoption import Fate, PseudoGradient, Track
from atoll.fragments.exchange import PreparedAnchor
from atoll.fragments.segments import SegmentAddresses, load, store


class LocalParameters:
    """Local parameters and tracks of all fragments. The constructor writes the first anchors into the model.

    anchors: (version, float32 (fragment.length,)) per fragment. keep: an adoption keeps outstanding work (True,
    "rebase") or drops it (False, "overwrite").
    """

    def __init__(self, host_memory: HostMemory, anchors: Iterable[tuple[int, F32]], *, keep: bool) -> None:
        self._host_memory = host_memory
        self._keep = keep
        self._apart: dict[int, SegmentAddresses] = {}
        self.torn = False  # an adoption was interrupted, so model and tracks may disagree
        self.tracks: list[Track] = []
        for number, ((version, anchor), shape) in enumerate(zip(anchors, host_memory.shapes, strict=True)):
            store(anchor, host_memory.read(number), shape)
            stored = host_memory.write(number)
            self.tracks.append(Track(shape, version, anchor, anchor if stored is None else stored[1].copy(), version))

    def take(self, number: int, tokens: int, steps: int) -> PseudoGradient:
        """Takes a fragment's quantised pseudo-gradient. tokens, steps: the learner's counters.

        Raises LearnerError if the pseudo-gradient is not finite.
        """
        places = self._apart.get(number) or self._host_memory.read(number)
        try:
            return self.tracks[number].take(places, tokens, steps)
        except CodecError as error:
            # A newer anchor does not help: the next gradient, or the optimizer's state, is not finite either.
            raise LearnerError(
                f"training has diverged: {error} in fragment {number}; restart this learner, which then "
                "continues from the run's parameters, and lower its learning rate if the error recurs"
            ) from error

    def adopt(self, prepared: PreparedAnchor, tokens: int, steps: int, *, apart: bool = False) -> int:
        """Moves a fragment to a newer anchor. Returns the number of dropped tokens. tokens, steps: as in `take`.

        apart: from now on, keep this fragment in a copy and do not change the model. `take` then uses the copy.
        """
        number, track = prepared.fragment, self.tracks[prepared.fragment]
        if apart and number not in self._apart:
            shape = self._host_memory.shapes[number]
            self._apart[number] = SegmentAddresses.in_vector(load(self._host_memory.read(number), shape), shape)
        places = self._host_memory.read(number) if not apart else self._apart[number]
        given_up = track.adopt(prepared.anchor, prepared.version, prepared.fate, tokens, steps, places, keep=self._keep)
        stored = None if apart else self._host_memory.write(number)
        if stored is not None:
            track.stored(*stored)
        return given_up

    def restore(self, number: int, tokens: int, steps: int) -> int:
        """Resets a fragment to its anchor. Returns the number of dropped tokens. tokens, steps: as in `take`."""
        track, places = self.tracks[number], self._host_memory.read(number)
        given_up = track.adopt(track.anchor, track.version, Fate(), tokens, steps, places, keep=False)
        stored = self._host_memory.write(number)
        if stored is not None:
            track.stored(*stored)
        return given_up

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Context manager for all adoptions of a boundary.

        After an exception in its block, the learner cannot continue.
        """
        self.torn = True
        yield
        self.torn = False

    def forget(self) -> None:
        """Drops all references to the parameters' memory, so that it can be moved or freed."""
        self._host_memory.forget()
