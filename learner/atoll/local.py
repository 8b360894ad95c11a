"""The local parameters of every fragment at a step boundary: taken, and moved to newer anchors. The training thread's.

A step that has something due calls torch and numpy as rarely as it can: each call gives the interpreter away, and a
busy thread hands it back only after `sys.getswitchinterval`. An adoption makes three such calls, a taking two.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from atoll_wire.layout import Layout

from atoll.adoption import F32, Outstanding, Track
from atoll.handover import Prepared
from atoll.parameters import Parameters


class Local:
    """Begins at the first anchors, (version, float32 vector) of each fragment, which it writes into the model.

    keep: what an adoption does with outstanding work: "rebase" (True) or "overwrite" (False).
    """

    def __init__(
        self, parameters: Parameters, layout: Layout, anchors: Iterable[tuple[int, F32]], *, keep: bool
    ) -> None:
        self._parameters, self._fragments, self._keep = parameters, layout.fragments, keep
        self._scratch = np.empty((2, max(fragment.length for fragment in layout.fragments)), np.float32)
        self._apart: dict[int, F32] = {}
        self.torn = False  # an adoption was interrupted: model and tracks do not agree any more
        self.tracks: list[Track] = []
        for fragment, (version, anchor) in zip(layout.fragments, anchors, strict=True):
            parameters.write(fragment, anchor)
            narrow = parameters.narrow(fragment)
            origin = parameters.read(fragment, np.empty_like(anchor)) if narrow else anchor
            self.tracks.append(Track(version, anchor, origin, version))

    def take(self, fragment: int, tokens: int, steps: int) -> Outstanding:
        """The pseudo-gradient now, in memory of its own. tokens, steps: the learner's counters."""
        track = self.tracks[fragment]
        return track.take(self._read(fragment, np.empty_like(track.anchor)), tokens, steps)

    def adopt(self, prepared: Prepared, tokens: int, steps: int, *, apart: bool = False) -> int:
        """Moves a fragment to a newer anchor; returns the tokens that are given up. tokens, steps: as above.

        apart: the model stays as it is, from now on in this fragment; what is taken counts from the new parameters.
        """
        number, fragment = prepared.fragment, self._fragments[prepared.fragment]
        track, (work, local) = self.tracks[number], self._scratch[:, : fragment.length]
        self.torn = True
        self._read(number, work)
        given_up = track.adopt(
            prepared.anchor, prepared.version, prepared.fate, tokens, steps, work, local, keep=self._keep
        )
        stored = None
        if apart:
            self._apart[number] = local.copy()
        else:
            self._parameters.write(fragment, local)
            if self._parameters.narrow(fragment):
                stored = self._parameters.read(fragment, local)
        track.settle(stored, work)
        self.torn = False
        return given_up

    def _read(self, fragment: int, out: F32) -> F32:
        apart = self._apart.get(fragment)
        if apart is None:
            return self._parameters.read(self._fragments[fragment], out)
        out[:] = apart
        return out
