"""A learner's reaction to failed gRPC calls: the remedy for each status, error texts, and back-off."""

from __future__ import annotations

import random
from enum import Enum

import grpc
import grpc.aio
from atoll_wire.connections.link import is_atoll_status

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.2, 10.0
GOODBYE_S = 5.0  # timeout of the Leave call in seconds, so that a core that hangs does not block the learner


class Remedy(Enum):
    """The learner's reaction to a failed call."""

    JOIN_AGAIN = "join again"
    STOP = "stop, because a retry would fail again"
    FETCH_WHOLE = "fetch the whole fragment"
    DROP_WORK = "fetch the whole fragment and drop the outstanding work"
    GIVE_UP = "do not send this again"
    TRY_AGAIN = "try again"


CURES = {
    grpc.StatusCode.UNAUTHENTICATED: Remedy.JOIN_AGAIN,
    grpc.StatusCode.PERMISSION_DENIED: Remedy.STOP,
    grpc.StatusCode.FAILED_PRECONDITION: Remedy.STOP,
    grpc.StatusCode.NOT_FOUND: Remedy.FETCH_WHOLE,
    grpc.StatusCode.OUT_OF_RANGE: Remedy.DROP_WORK,
    grpc.StatusCode.INVALID_ARGUMENT: Remedy.GIVE_UP,
    grpc.StatusCode.ALREADY_EXISTS: Remedy.GIVE_UP,
}


def remedy(error: grpc.aio.AioRpcError) -> Remedy:
    """Returns the remedy for an error, from the table at the top of outer.proto.

    Returns TRY_AGAIN for a status from a proxy or from gRPC itself, instead of from a core or front.
    """
    return CURES.get(error.code(), Remedy.TRY_AGAIN) if is_atoll_status(error) else Remedy.TRY_AGAIN


def one_line(error: grpc.aio.AioRpcError) -> str:
    """Returns the error's status and details as one line."""
    return f"{error.code().name.lower()}: {detail(error)}"


def detail(error: grpc.aio.AioRpcError) -> str:
    """Returns the error's details as one line. The details may contain line breaks, because the sender is untrusted."""
    return " ".join((error.details() or "no details").split())


def backoff_s(attempt: int, rng: random.Random) -> float:
    """Returns the time to wait in seconds, which grows exponentially with the attempt.

    It has jitter, so that learners do not retry together. attempt: number of the attempt, from 0.
    """
    return rng.uniform(0.5, 1.0) * min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(attempt, 16))
