"""Decides whether a link is faster than the compressor.

The rate and the round trip of the link are the kernel's: Linux measures them for each TCP connection. Times that this
process measures itself would say little, because on a fast link they consist of waits for a CPU.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import NamedTuple, TypeVar

from atoll_wire.process.clock import Clock

SAVED = 75e6  # bytes/s that zstd saves of int4 codes on busy CPUs, until it was measured
NEWEST = 0.25  # weight of the newest measurement
LOOK_S = 2.0  # seconds for which measurements are used, unless reading them takes so long that
LOOKING = 0.01  # this share of the time would be exceeded
# Linux's struct tcp_info: tcpi_last_ack_recv (milliseconds), tcpi_min_rtt (microseconds), tcpi_delivery_rate (bytes/s).
# The kernel's mean round trip would not do: it includes delayed acknowledgements, up to 40 ms on loopback.
TCP_INFO = struct.Struct("<56xI88xI8xQ")
NO_ROUND_TRIP = (0, 0xFFFFFFFF)  # values of tcpi_min_rtt before the first measurement
ACTIVE_S = 10.0  # the round trip of a connection counts if it received an acknowledgement within this many seconds


Content = TypeVar("Content", bound=Sized)


class Measured(NamedTuple):
    """The kernel's measurements of a link. rate: bytes/s; 0 if unknown. round_trip_s: seconds; None if unknown."""

    rate: float = 0.0
    round_trip_s: float | None = None


class LinkSpeed:
    """The rates of one link and of the compressor.

    port: the TCP port of the other side, or None for other sockets. Links to the same port of several hosts share their
    measurements: the highest rate and the shortest round trip.
    """

    def __init__(self, port: int | None, clock: Clock, measure: Callable[[int], Measured] | None = None) -> None:
        """measure: returns the measurements of the connections to a port (default: the kernel's)."""
        self._port = port
        self._clock = clock
        self._measure = measure or measured
        self._saved_per_s = SAVED
        self._newest = Measured()
        self._look_again_at = -math.inf  # monotonic seconds

    def compressed(self, contents: Sequence[Content], compress: Callable[[Content], bytes]) -> list[bytes]:
        """Returns the compressed contents of frames, and measures the compressor. Sizes are in bytes."""
        began = self._clock.monotonic()
        payloads = [compress(content) for content in contents]
        took_s = self._clock.monotonic() - began
        if took_s > 0.0:
            saved = sum(map(len, contents)) - sum(map(len, payloads))
            self._saved_per_s += NEWEST * (max(0, saved) / took_s - self._saved_per_s)
        return payloads

    @property
    def exceeds_compressor(self) -> bool:
        """Whether the link carries more bytes per second than the compressor saves."""
        return self._look().rate > self._saved_per_s

    @property
    def round_trip_s(self) -> float | None:
        """The round trip of the TCP connections in seconds, which may end at a proxy. None if it is unknown."""
        return self._look().round_trip_s

    def _look(self) -> Measured:
        now = self._clock.monotonic()
        if self._port is not None and now > self._look_again_at:
            self._newest = self._measure(self._port)
            ended = self._clock.monotonic()
            self._look_again_at = ended + max(LOOK_S, (ended - now) / LOOKING)
        return self._newest


def port_of(address: str) -> int | None:
    """Returns the port of HOST:PORT, or None for another kind of address."""
    port = address.rpartition(":")[2]
    return int(port) if port.isdigit() and not address.startswith("unix:") else None


def measured(port: int) -> Measured:
    """Returns the highest rate and the shortest round trip of this process's TCP connections to a port.

    Both are unknown if there are none, and on other systems than Linux.

    Example: `measured(7070).rate > 75e6`
    """
    found = list[Measured]()
    with contextlib.suppress(FileNotFoundError):  # not on Linux
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # not a connection to this port, or closed in the meantime
                if (told := _measured(descriptor, port)) is not None:
                    found.append(told)
    round_trips = (each.round_trip_s for each in found if each.round_trip_s is not None)
    return Measured(max((each.rate for each in found), default=0.0), min(round_trips, default=None))


def _measured(descriptor: Path, port: int) -> Measured | None:
    """Returns the kernel's newest measurements of a TCP connection to a port, or None for another descriptor.

    Raises OSError for other sockets.
    """
    if not str(descriptor.readlink()).startswith("socket:"):
        return None
    copy = os.dup(int(descriptor.name))  # closing a copy closes no connection
    with socket.socket(fileno=copy) as connection:
        if connection.family not in {socket.AF_INET, socket.AF_INET6} or connection.getpeername()[1] != port:
            return None
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
    if len(told) < TCP_INFO.size:
        return None  # Linux before 4.9
    heard_ms, round_trip_us, rate = TCP_INFO.unpack(told)
    known = round_trip_us not in NO_ROUND_TRIP and heard_ms < 1e3 * ACTIVE_S
    return Measured(float(rate), round_trip_us / 1e6 if known else None)
