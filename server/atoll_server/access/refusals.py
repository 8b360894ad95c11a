"""PURE: refusals of calls. A refusal consists of a gRPC status, and a text with the reason and the fix."""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """The gRPC statuses that learners handle. The table at the head of outer.proto lists how learners react to each."""

    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"
    FAILED_PRECONDITION = "failed_precondition"
    ALREADY_EXISTS = "already_exists"
    OUT_OF_RANGE = "out_of_range"
    INVALID_ARGUMENT = "invalid_argument"
    DATA_LOSS = "data_loss"
    NOT_FOUND = "not_found"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    UNAVAILABLE = "unavailable"


LONGEST = 1000  # limit on the length of `detail`, in characters


class Refused(Exception):  # noqa: N818 - a reply, not a fault of this program
    """A call was refused and changed nothing. detail: the text that the caller receives, as one line."""

    def __init__(self, status: Status, detail: str) -> None:
        line = " ".join(detail.split())  # a name from a caller may be long and have line breaks
        self.status = status
        self.detail = line if len(line) <= LONGEST else line[: LONGEST - 4] + " ..."
        super().__init__(self.detail)
