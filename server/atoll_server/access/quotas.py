"""PURE: quotas on the calls to a core or a front, and the token buckets and call slots that apply these quotas.

A peer is a certificate's owner, or an address if the caller has no certificate. A server knows the peer before it reads
a message. It learns the learner's name only from the session in a call's first message.
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
    "readers",
    "reads",
    "revoked",
)  # values of the label `limit` of `atoll_limited_total`
FRONT_FACTOR = (
    16  # multiplies the quotas of a peer that may act for many learners: a front, or an address without a certificate
)
# Limits of a process on all its readers together.
Watching = Annotated[int, Field(ge=0, le=1 << 20, description="Readers that watch for new versions at the same time.")]
Reading = Annotated[int, Field(ge=0, le=1 << 20, description="Concurrent streams with which readers fetch the model.")]


class Quotas(Settings):
    """Limits for each peer or learner. A call above a limit waits, is refused, or replaces the caller's oldest call.

    A refused or replaced call ends with RESOURCE_EXHAUSTED. `atoll_limited_total` counts all such calls by limit.
    """

    panel: ClassVar[str] = "Quotas per caller"
    prefix: ClassVar[str] = "quota"

    window_bytes: int = 64 << 10  # bytes of a call that gRPC buffers before the service reads them
    first_calls: int = 12  # limit on a peer's calls whose first message is incomplete and uses memory
    first_waiting: int = 70  # limit on a peer's additional calls, which wait until their first message can be read
    first_message_s: Annotated[
        float, Field(gt=0, le=3600, description="Seconds within which a call's first message must arrive.")
    ] = 60.0  # a Join may be large
    fresh_s: float = 1.0  # seconds after which a call without a first message may be ended for a new call
    pushes: Annotated[
        int, Field(ge=1, le=4096, description="Concurrent streams per learner that send contributions.")
    ] = 80  # two for each of a learner's 32 connections, one for the offer of each of 12 uploads, and calls that end
    fetches: Annotated[
        int, Field(ge=1, le=4096, description="Concurrent streams per learner or reader that fetch parameters.")
    ] = 72
    watches: Annotated[
        int, Field(ge=1, le=4096, description="Concurrent streams per reader that watch for new versions.")
    ] = 4
    follows: int = 4
    reports: int = 4
    initialises: int = 2  # uploads of initial parameters; a newer upload ends an older one
    announcements: int = 2  # a front makes one, and a newer one ends the oldest
    probes: int = 4  # calls of `atoll doctor`
    reflections: int = 4  # calls of gRPC reflection, which is available only on loopback
    other_calls: int = 4  # concurrent calls of a peer or learner to each method that is not listed here
    frame_bytes: int = (2 << 20) + (64 << 10)  # largest message with frames that may arrive in pieces
    joining_bytes: Annotated[
        Bytes,
        Field(ge=64 << 10, le=1 << 30, description="Largest Join message. Its size grows with the number of tensors."),
    ] = 10 << 20  # a peer may send only one Join in pieces at a time
    assembling: int = 4  # messages that a learner or peer may send in pieces at the same time
    calls_per_s: Annotated[float, Field(gt=0, le=1e6, description="Calls per second per caller.")] = 300.0
    calls_burst: Annotated[float, Field(ge=1, le=1e6, description="Calls that a caller may make in a burst.")] = 600.0
    joins_per_s: Annotated[
        float, Field(gt=0, le=1e6, description="Large Joins (sent in pieces) per second per caller.")
    ] = 0.5  # the cost of a Join grows with its number of tensors
    joins_burst: Annotated[
        float, Field(ge=1, le=1e6, description="Large Joins (sent in pieces) that a caller may send in a burst.")
    ] = 6.0
    spoilt_per_s: float = 0.5  # calls per second per learner or peer that end because of a wrong checksum
    spoilt_burst: float = 5.0
    messages_per_s: Annotated[
        float,
        Field(gt=0, le=1e6, description="Messages per second that a learner may send to one method, over all streams."),
    ] = 1000.0
    messages_burst: Annotated[
        float, Field(ge=1, le=1e6, description="Messages to one method that a learner may send in a burst.")
    ] = 2000.0
    reports_per_s: Annotated[float, Field(gt=0, le=1e6, description="Reports per second per learner.")] = (
        20.0  # a learner sends four per second
    )
    reports_burst: Annotated[float, Field(ge=1, le=1e6, description="Reports that a learner may send in a burst.")] = (
        40.0
    )
    leases_per_s: float = 5.0  # requests per second per learner; each requests many data units
    leases_burst: float = 20.0
    max_wait_s: Annotated[
        float,
        Field(
            ge=0,
            le=3600,
            description="Longest wait of a call that exceeds a rate, in seconds. Calls with a longer wait are refused.",
        ),
    ] = 10.0
    stalled_s: Annotated[
        float, Field(gt=0, le=3600, description="Seconds within which a caller must read each piece of a reply.")
    ] = 120.0  # the slowest allowed reader receives about 18 kbit/s

    def streams(self, method: str) -> int:
        """Returns the limit on a learner's or peer's open calls to `method` and the methods that share its slots."""
        method = slots_of(method)
        return self._read().get(method) or self._unread().get(method, self.other_calls)

    def messages(self, method: str) -> tuple[float, float]:
        """Returns the limits on a learner's or peer's messages to a method: per second, and in a burst."""
        if method in {"Report", "Announce"}:
            return self.reports_per_s, self.reports_burst
        if method == "LeaseUnits":
            return self.leases_per_s, self.leases_burst
        return self.messages_per_s, self.messages_burst

    def _read(self) -> dict[str, int]:
        """Returns the quota on open calls to each method with a stream of requests, keyed by method."""
        return {
            "Push": self.pushes,
            "Report": self.reports,
            "Initialise": self.initialises,
            "Announce": self.announcements,
            "Probe": self.probes,
            "ServerReflectionInfo": self.reflections,
        }

    def _unread(self) -> dict[str, int]:
        return {"Fetch": self.fetches, "Follow": self.follows, "Watch": self.watches}

    def half_sent_bytes(self, message_bytes: int, methods: Collection[str]) -> int:
        """Returns an upper bound on the memory that one learner's incomplete messages use in this process, in bytes.

        methods: names of all the server's methods.
        """
        slots = set(map(slots_of, methods)) - self._read().keys()
        read, unread = self.first_calls + sum(self._read().values()), self.first_waiting + sum(map(self.streams, slots))
        buffered = (read + unread) * self.window_bytes + read * message_bytes
        return buffered + self.assembling * self.frame_bytes + self.joining_bytes


def slots_of(method: str) -> str:
    """Returns the name of the method whose slots calls to `method` use. Read uses the slots of Fetch."""
    return "Fetch" if method == "Read" else method


def or_raise(method: str) -> str:
    """Returns the end of a message about too many calls to `method`: it names the option, if the limit has one."""
    option = {"Push": "pushes", "Fetch": "fetches", "Watch": "watches"}.get(slots_of(method))
    return "" if option is None else f", or raise the server's --{Quotas.prefix}-{option}"


class RateBucket:
    """A token bucket, which limits a rate and allows bursts. Times are monotonic seconds.

    per_s: cost allowed per second. burst: cost allowed at once.
    """

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at = 0.0

    def take(self, now: float, cost: float = 1.0) -> float:
        """Takes `cost` from the bucket. Returns the time to wait, in seconds, until the rate allows this cost."""
        self._fill(now)
        self._left -= cost
        return max(0.0, -self._left / self._per_s)

    def full(self, now: float) -> bool:
        """Returns whether the bucket is full, as it was at its creation."""
        self._fill(now)
        return self._left >= self._burst

    def _fill(self, now: float) -> None:
        self._left = min(self._burst, self._left + self._per_s * max(0.0, now - self._at))
        self._at = now


T = TypeVar("T")


class NoSlotError(Exception):
    """No slot is free, and every call is too young to be ended or is already ending."""


class CallSlots(Generic[T]):
    """The slots for one peer's or learner's open calls. If no slot is free, a new call replaces the oldest call.

    A learner's old calls on dead connections therefore never block its new calls.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: OrderedDict[T, float] = OrderedDict()  # monotonic seconds when a slot was taken; oldest first
        self._ending: set[T] = set()

    def __len__(self) -> int:
        return len(self._taken)

    def enter(self, call: T, now: float, young_s: float = 0.0) -> T | None:
        """Takes a slot for a call. Returns the older call that must be ended to free this slot, or None.

        now: monotonic seconds. young_s: calls younger than this keep their slots. Raises NoSlotError.
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
        self._taken.pop(call, None)
        self._ending.discard(call)
