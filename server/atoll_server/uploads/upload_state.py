"""PURE: the states of an upload and the table of their transitions.

    growing --> whole --> durable
       |          |
       +----------+-----> dropped

- growing: frames arrive over any number of streams. The upload may be dropped, since it is not acknowledged.
- whole: all frames have arrived, or one has values that are not finite. Later frames are ignored. The upload is judged,
  then kept or refused, even if a newer process of its learner joins or its streams are interrupted.
- durable: the row is committed, and the streams get the receipt. The upload is now a contribution.
- dropped: the file is deleted, and its space in the spool is free. The streams get the reason: as a receipt if the
  refusal is in the ledger, otherwise as an error.

After a failed fsync or commit, an upload stays whole. The disk's state is then unknown, and the process ends.
"""

from __future__ import annotations

from enum import Enum


class UploadState(Enum):
    """An upload's state. The module's docstring explains each state."""

    GROWING = "growing"
    WHOLE = "whole"
    DURABLE = "durable"
    DROPPED = "dropped"


class UploadEvent(Enum):
    """An event in an upload's life. The value is text for messages."""

    ALL_FRAMES = "all its frames arrived, as declared"
    BAD_VALUES = "non-finite values arrived"
    GIVEN_UP = "it was cancelled"  # after bad or missing frames, a full disk, or a newer contribution or incarnation
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
    """The table has no transition for an event, which is a bug in Atoll."""


def after(state: UploadState, saw: UploadEvent) -> UploadState:
    """Returns the next state. Raises TransitionError if there is none."""
    following = NEXT.get((state, saw))
    if following is None:
        raise TransitionError(f'an upload that is {state.value} has no next state after "{saw.value}"')
    return following
