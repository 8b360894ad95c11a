"""The local parameters of every fragment at a step boundary: taken, and moved to newer anchors. The training thread's.

A step that has something due calls torch and numpy as rarely as it can: each call gives the interpreter away, and a
busy thread hands it back only after `sys.getswitchinterval`. For parameters that are float32 on the host, an adoption
makes one such call, and a taking one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from atoll_wire.blocks import F32
from atoll_wire.codec import CodecError

from atoll.boundary.host_memory import Windows
from atoll.errors import LearnerError
from atoll.fragments.adoption import Fate, Outstanding, Track
from atoll.fragments.exchange import Prepared
from atoll.fragments.segments import Places, load, store


class Local:
    """Begins at the first anchors, (version, float32 vector) of each fragment, which it writes into the model.

    keep: what an adoption does with outstanding work: "rebase" (True) or "overwrite" (False).
    """

    def __init__(self, windows: Windows, anchors: Iterable[tuple[int, F32]], *, keep: bool) -> None:
        self._windows = windows
        self._keep = keep
        self._apart: dict[int, Places] = {}
        self.torn = False  # an adoption was interrupted: model and tracks may not agree any more
        self.tracks: list[Track] = []
        for number, ((version, anchor), shape) in enumerate(zip(anchors, windows.shapes, strict=True)):
            store(anchor, windows.read(number), shape)
            stored = windows.write(number)
            self.tracks.append(Track(shape, version, anchor, anchor if stored is None else stored[1].copy(), version))

    def take(self, number: int, tokens: int, steps: int) -> Outstanding:
        """The pseudo-gradient of a fragment now, coded. tokens, steps: the learner's counters.

        Raises LearnerError when it is not finite.
        """
        places = self._apart.get(number) or self._windows.read(number)
        try:
            return self.tracks[number].take(places, tokens, steps)
        except CodecError as error:
            # No anchor mends that: the next gradient, or the optimizer's own state, is not finite either.
            raise LearnerError(
                f"training has diverged: {error} in fragment {number}; nothing of it was sent. Start this learner "
                "again: it goes on from the run's parameters; lower its learning rate if that happens again"
            ) from error

    def adopt(self, prepared: Prepared, tokens: int, steps: int, *, apart: bool = False) -> int:
        """Moves a fragment to a newer anchor; returns the tokens that are given up. tokens, steps: as above.

        apart: the model stays as it is, from now on in this fragment; what is taken counts from the new parameters.
        """
        number, track = prepared.fragment, self.tracks[prepared.fragment]
        if apart and number not in self._apart:
            shape = self._windows.shapes[number]
            self._apart[number] = Places.in_vector(load(self._windows.read(number), shape), shape)
        places = self._windows.read(number) if not apart else self._apart[number]
        given_up = track.adopt(prepared.anchor, prepared.version, prepared.fate, tokens, steps, places, keep=self._keep)
        stored = None if apart else self._windows.write(number)
        if stored is not None:
            track.stored(*stored)
        return given_up

    def restore(self, number: int, tokens: int, steps: int) -> int:
        """Gives a fragment its anchor's values again; returns the tokens that are given up. tokens, steps: as above."""
        track, places = self.tracks[number], self._windows.read(number)
        given_up = track.adopt(track.anchor, track.version, Fate(), tokens, steps, places, keep=False)
        stored = self._windows.write(number)
        if stored is not None:
            track.stored(*stored)
        return given_up

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Around all adoptions of a boundary: whoever is interrupted here has lost fates, and cannot go on."""
        self.torn = True
        yield
        self.torn = False

    def forget(self) -> None:
        """Lets go of the parameters' memory: it can be moved or freed."""
        self._windows.forget()
