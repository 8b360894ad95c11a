"""PURE: the states of an upload, and the one table of its transitions.

    growing --> whole --> durable
       |          |
       +----------+-----> dropped

- growing: frames arrive, over any number of streams. It may be dropped at any moment; nothing was acknowledged.
- whole: all frames are here, and later frames do not change it. It is judged and made durable, even if its learner is
  fenced off meanwhile, or its streams are cut.
- durable: its row is committed and its learner may have the receipt. From here on it is a contribution.
- dropped: its space is returned and its file deleted. Its streams get the reason: a receipt if the refusal is in the
  ledger, else an error.

After a failed fsync or commit an upload stays whole: what the disk holds is not known, and the process ends.
"""

from __future__ import annotations

from enum import Enum


class UploadState(Enum):
    """The state of one upload, see the module."""

    GROWING = "growing"
    WHOLE = "whole"
    DURABLE = "durable"
    DROPPED = "dropped"


class UploadEvent(Enum):
    """An event of an upload; the value completes a sentence for people."""

    ALL_FRAMES = "all its frames came, as declared"
    BAD_VALUES = "values came that are not finite"
    GIVEN_UP = "it was given up"  # for invalid frames, silence, a full disk, a newer contribution or incarnation
    KEPT = "its row was committed"
    REFUSED = "its refusal was committed"


NEXT = {
    (UploadState.GROWING, UploadEvent.ALL_FRAMES): UploadState.WHOLE,
    (UploadState.GROWING, UploadEvent.BAD_VALUES): UploadState.WHOLE,
    (UploadState.GROWING, UploadEvent.GIVEN_UP): UploadState.DROPPED,
    (UploadState.WHOLE, UploadEvent.KEPT): UploadState.DURABLE,
    (UploadState.WHOLE, UploadEvent.REFUSED): UploadState.DROPPED,
}


class TransitionError(RuntimeError):
    """The table has no such transition: a bug in Atoll."""


def after(state: UploadState, saw: UploadEvent) -> UploadState:
    """The next state. Raises TransitionError."""
    following = NEXT.get((state, saw))
    if following is None:
        raise TransitionError(f'an upload that is {state.value} has no next state after "{saw.value}"')
    return following
