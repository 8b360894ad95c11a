"""The local parameters of every fragment at a step boundary: taken, and moved to newer anchors. The training thread's.

A step that has something due calls torch and numpy as rarely as it can: each call gives the interpreter away, and a
busy thread hands it back only after `sys.getswitchinterval`. An adoption makes three such calls, a taking two.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        self._apart: dict[int, F32] = {}
        self.torn = False  # an adoption was interrupted: model and tracks do not agree any more
        self.tracks: list[Track] = []
        parameters.stage(max(self._fragments, key=lambda fragment: fragment.length), 0)
        for fragment, (version, anchor) in zip(self._fragments, anchors, strict=True):
            parameters.stage(fragment, 0)[:] = anchor
            parameters.write(fragment, 0)
            origin = parameters.read(fragment, 0).copy() if parameters.narrow(fragment) else anchor
            self.tracks.append(Track(version, anchor, origin, version))

    def take(self, fragment: int, tokens: int, steps: int) -> Outstanding:
        """The pseudo-gradient now, in memory of its own. tokens, steps: the learner's counters."""
        return self.tracks[fragment].take(self._read(fragment), tokens, steps)

    def adopt(self, prepared: Prepared, tokens: int, steps: int, *, apart: bool = False) -> int:
        """Moves a fragment to a newer anchor; returns the tokens that are given up. tokens, steps: as above.

        apart: the model stays as it is, from now on in this fragment; what is taken counts from the new parameters.
        """
        number, fragment = prepared.fragment, self._fragments[prepared.fragment]
        track = self.tracks[number]
        self.torn = True
        work, local = self._read(number), self._parameters.stage(fragment, 1)
        given_up = track.adopt(
            prepared.anchor, prepared.version, prepared.fate, tokens, steps, work, local, keep=self._keep
        )
        stored = None
        if apart:
            self._apart[number] = local.copy()
        else:
            self._parameters.write(fragment, 1)
            if self._parameters.narrow(fragment):
                stored = self._parameters.read(fragment, 1)
        track.settle(stored, work)
        self.torn = False
        return given_up

    def _read(self, number: int) -> F32:
        """The local parameters of a fragment, staged in row 0."""
        fragment, apart = self._fragments[number], self._apart.get(number)
        if apart is None:
            return self._parameters.read(fragment, 0)
        staged = self._parameters.stage(fragment, 0)
        staged[:] = apart
        return staged
