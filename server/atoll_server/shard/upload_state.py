"""PURE: the states of an upload, and the one table of its transitions.

    growing --> whole --> durable
       |          |
       +----------+-----> dropped

- growing: frames arrive over any number of streams. Nothing is acknowledged, so the upload may be dropped at any time.
- whole: all frames are here, and later frames change nothing. The upload is judged and made durable, even if its
  learner is fenced meanwhile or its streams break.
- durable: its row is committed, and its learner may have the receipt. The upload is now a contribution.
- dropped: its space is returned and its file is deleted. Its streams get the reason, as a receipt if the refusal is in
  the ledger, otherwise as an error.

After a failed fsync or commit, an upload stays whole. The state of the disk is then unknown, and the process ends.
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
    """An event of an upload. The value is text for messages."""

    ALL_FRAMES = "all its frames arrived, as declared"
    BAD_VALUES = "values arrived that are not finite"
    GIVEN_UP = "it was given up"  # invalid or missing frames, a full disk, or a newer contribution or incarnation
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
    """The table lacks this transition, which is a bug in Atoll."""


def after(state: UploadState, saw: UploadEvent) -> UploadState:
    """The next state. Raises TransitionError."""
    following = NEXT.get((state, saw))
    if following is None:
        raise TransitionError(f'an upload that is {state.value} has no next state after "{saw.value}"')
    return following
