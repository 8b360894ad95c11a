"""The retry loop of uploads and fetches: waits for a session, tries, and backs off after consecutive failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import grpc.aio
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import LinkLost
from atoll_wire.errors import ExitStatus

from atoll.errors import LearnerError
from atoll.transfers.call_errors import Remedy, backoff_s, detail, remedy


class Shard(Protocol):
    """The part of a shard that this module uses."""

    @property
    def connected(self) -> asyncio.Event:
        """Set while calls to the shard may begin."""

    @property
    def session(self) -> pb.Session:
        """The current session. A new session is a new object."""


class Track(Protocol):
    """The part of a fragment that this module uses."""

    @property
    def shard(self) -> Shard:
        """The fragment's current shard."""


class Party(Protocol):
    """The part of a learner or follower that this module uses."""

    @property
    def leaving(self) -> bool:
        """Whether all connections are being closed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt. session: the session when it began. before: number of consecutive failures before it."""

    error: grpc.aio.AioRpcError
    remedy: Remedy
    session: pb.Session
    before: int


async def retry(
    party: Party,
    track: Track,
    wanted: Callable[[], bool],
    once: Callable[[], Awaitable[bool]],
    failed: Callable[[Failure], bool],
    rng: random.Random,
    came: Callable[[], int] = lambda: 0,
) -> None:
    """Makes attempts until one succeeds, `wanted` returns False, or the caller leaves.

    party: the caller. track: the fragment's track. Each attempt begins once the fragment's shard is connected.
    once: makes one attempt and returns whether it succeeded. It may raise AioRpcError and LinkLost.
    After LinkLost, the next attempt waits only for a session over another link.
    failed: called after an AioRpcError; returns whether it applied the remedy. If so, the next attempt does not wait.
    came: returns the number of bytes received so far. A failure after progress counts as the first failure.
    Raises LearnerError if a status from a core or front means that a retry cannot help.
    """
    failures = 0
    while wanted() and not party.leaving:
        shard = track.shard
        await shard.connected.wait()
        if track.shard is not shard:
            continue  # the fragment moved to another shard
        if not wanted():  # for example, a restore of the run made this work obsolete
            return
        session, before, acted = shard.session, came(), False
        try:
            if await once():
                return
        except LinkLost:
            acted = True
        except grpc.aio.AioRpcError as error:
            failures = 0 if came() > before else failures
            failure = Failure(error, remedy(error), session, failures)
            acted = failed(failure)
            if failure.remedy is Remedy.STOP and wanted():
                raise LearnerError(detail(error), ExitStatus.REFUSED) from error
        if not acted:
            await asyncio.sleep(backoff_s(failures, rng))
        failures += 1
