"""PURE: how much of a core or a front one caller may use, and how much of that is left.

A peer is a certificate, or an address if there is none: it is known before anything is read. A learner is known by its
session, once a call's first message has arrived.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Annotated, ClassVar, Generic, TypeVar

from atoll_wire.process.settings import Bytes, Settings
from pydantic import Field

LIMITS = (
    "first_message",
    "calls_per_s",
    "streams",
    "messages_per_s",
    "joins_per_s",
    "spoilt_per_s",
    "stalled",
)  # as metrics name them
FRONT_FACTOR = (
    16  # multiplies quotas of a peer that speaks for many learners: a front, or an address without a certificate
)


class Quotas(Settings):
    """Limits for each peer or learner. A call that reaches one waits, or is refused with RESOURCE_EXHAUSTED.

    `atoll_limited_total` counts both by limit.
    """

    panel: ClassVar[str] = "Quotas of one caller"
    prefix: ClassVar[str] = "quota"

    window_bytes: int = 64 << 10  # that gRPC buffers of a call before it is read
    first_calls: int = 12  # of a peer: calls whose first message is being read; incomplete messages take memory
    first_waiting: int = 80  # of a peer: calls that wait for one of these places
    first_message_s: Annotated[
        float, Field(gt=0, le=3600, description="Seconds until a call's first message is here.")
    ] = 60.0  # a Join may be large
    fresh_s: float = 1.0  # a call without a first message that is older than this makes room for a new one
    pushes: Annotated[int, Field(ge=1, le=4096, description="Streams of a learner that send contributions.")] = (
        72  # two for each of 32 connections, and control-only ones
    )
    fetches: Annotated[int, Field(ge=1, le=4096, description="Streams of a learner that fetch parameters.")] = 72
    follows: int = 4
    reports: int = 4
    initialises: int = 2  # uploads of first parameters: a newer one ends an older one
    probes: int = 4  # of `atoll doctor`
    reflections: int = 4  # on loopback only
    other_calls: int = 4  # of a peer or learner, to each other method; these calls have one message
    frame_bytes: int = (2 << 20) + (64 << 10)  # of a message with frames that is joined from pieces
    joining_bytes: Annotated[
        Bytes, Field(ge=64 << 10, le=1 << 30, description="Of a Join, which grows with the model's tensors.")
    ] = 10 << 20  # a peer may send one Join at a time in pieces
    assembling: int = 4  # messages of a learner or peer that are being joined from pieces at a time
    calls_per_s: Annotated[float, Field(gt=0, le=1e6, description="Calls per second of a peer.")] = 300.0
    calls_burst: Annotated[float, Field(ge=1, le=1e6, description="Calls of a peer that may come at once.")] = 600.0
    joins_per_s: Annotated[
        float, Field(gt=0, le=1e6, description="Joins per second of a peer that come in pieces.")
    ] = 0.5  # the cost of each grows with its number of tensors
    joins_burst: Annotated[float, Field(ge=1, le=1e6, description="Such joins of a peer that may come at once.")] = 6.0
    spoilt_per_s: float = 0.5  # of a learner or peer: calls that end because of a wrong checksum
    spoilt_burst: float = 5.0
    messages_per_s: Annotated[
        float, Field(gt=0, le=1e6, description="Messages per second of a learner, over its streams of one method.")
    ] = 1000.0
    messages_burst: Annotated[
        float, Field(ge=1, le=1e6, description="Such messages of a learner that may come at once.")
    ] = 2000.0
    reports_per_s: Annotated[float, Field(gt=0, le=1e6, description="Reports per second of a learner.")] = (
        20.0  # it sends four
    )
    reports_burst: Annotated[float, Field(ge=1, le=1e6, description="Reports of a learner that may come at once.")] = (
        40.0
    )
    max_wait_s: Annotated[
        float, Field(ge=0, le=3600, description="Seconds that a caller above a rate waits; beyond them it is refused.")
    ] = 10.0
    stalled_s: Annotated[
        float, Field(gt=0, le=3600, description="Seconds until a reader has taken a piece of an answer.")
    ] = 120.0  # 18 kbit/s

    def streams(self, method: str) -> int:
        """Open calls of one learner or peer to a method."""
        return self._read().get(method) or self._unread().get(method, self.other_calls)

    def _read(self) -> dict[str, int]:
        """Quotas of the methods that read further messages after the first one."""
        return {
            "Push": self.pushes,
            "Report": self.reports,
            "Initialise": self.initialises,
            "Probe": self.probes,
            "ServerReflectionInfo": self.reflections,
        }

    def _unread(self) -> dict[str, int]:
        return {"Fetch": self.fetches, "Follow": self.follows}

    def half_sent_bytes(self, message_bytes: int, methods: Collection[str]) -> int:
        """Upper bound in bytes on the incomplete messages that a peer that is one learner can make this process hold.

        methods: names of all methods of the server.
        """
        read = self.first_calls + sum(self._read().values())
        unread = self.first_waiting + sum(self.streams(each) for each in methods if each not in self._read())
        buffered = (read + unread) * self.window_bytes + read * message_bytes
        return buffered + self.assembling * self.frame_bytes + self.joining_bytes


class RateBucket:
    """A token bucket: a rate with bursts. Times are monotonic seconds."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at = 0.0

    def take(self, now: float, cost: float = 1.0) -> float:
        """Takes `cost` from the bucket; returns the seconds until that is within the rate."""
        self._fill(now)
        self._left -= cost
        return max(0.0, -self._left / self._per_s)

    def full(self, now: float) -> bool:
        """Whether nothing was taken lately: a new bucket would be equal."""
        self._fill(now)
        return self._left >= self._burst

    def _fill(self, now: float) -> None:
        self._left = min(self._burst, self._left + self._per_s * max(0.0, now - self._at))
        self._at = now


T = TypeVar("T")


class NoSlotError(Exception):
    """All slots are taken by calls that are too young to be ended, or that were ended and have not left yet."""


class CallSlots(Generic[T]):
    """Slots of one owner. When all are taken, a new call gets the oldest call's slot.

    So a learner whose connections died is never kept out by calls that it left behind.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: OrderedDict[T, float] = OrderedDict()  # monotonic seconds since when; oldest first
        self._ending: set[T] = set()

    def __len__(self) -> int:
        return len(self._taken)

    def enter(self, call: T, now: float, young_s: float = 0.0) -> T | None:
        """Takes a slot; returns the call that must end for it, or None. Raises NoSlotError.

        young_s: a call younger than this keeps its slot.
        """
        oldest = None
        if len(self._taken) - len(self._ending) >= self._most:
            oldest, since = next(each for each in self._taken.items() if each[0] not in self._ending)
            if now - since < young_s:
                raise NoSlotError
        if len(self._taken) >= self._most + max(1, self._most // 4):
            raise NoSlotError
        if oldest is not None:
            self._ending.add(oldest)
        self._taken[call] = now
        return oldest

    def leave(self, call: T) -> None:
        """Frees the call's slot."""
        self._taken.pop(call, None)
        self._ending.discard(call)
