"""Decides whether a link is faster than the compressor.

The rate of the link is the kernel's: Linux measures at which rate each TCP connection delivers bytes. Times that this
process measures itself would say little, because on a fast link they consist of waits for a CPU.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import TypeVar

from atoll_wire.process.clock import Clock

SAVED = 75e6  # bytes/s that zstd saves of int4 codes on busy CPUs, until it was measured
NEWEST = 0.25  # weight of the newest measurement
LOOK_S = 2.0  # seconds for which a rate of the link is used
DELIVERY_RATE = struct.Struct("<160xQ")  # tcpi_delivery_rate in Linux's struct tcp_info, bytes/s


Content = TypeVar("Content", bound=Sized)


class LinkSpeed:
    """The rates of one link and of the compressor. port: the TCP port of the other side, or None for other sockets."""

    def __init__(self, port: int | None, clock: Clock, measure: Callable[[int], float] | None = None) -> None:
        """measure: returns the rate of the connections to a port in bytes/s, 0 if unknown (default: the kernel's)."""
        self._port = port
        self._clock = clock
        self._measure = measure or delivery_rate
        self._saved_per_s = SAVED
        self._rate = 0.0
        self._looked_at: float | None = None

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
        now = self._clock.monotonic()
        if self._port is not None and (self._looked_at is None or now - self._looked_at > LOOK_S):
            self._looked_at, self._rate = now, self._measure(self._port)
        return self._rate > self._saved_per_s


def port_of(address: str) -> int | None:
    """Returns the port of HOST:PORT, or None for another kind of address."""
    port = address.rpartition(":")[2]
    return int(port) if port.isdigit() and not address.startswith("unix:") else None


def delivery_rate(port: int) -> float:
    """Returns the highest rate at which this process's TCP connections to a port delivered bytes, in bytes/s.

    Returns 0 if there are none, and on other systems than Linux.

    Example: `delivery_rate(7070) > 75e6`
    """
    rates = [0]
    with contextlib.suppress(FileNotFoundError):  # not on Linux
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # not a connection to this port, or closed in the meantime
                rates.append(_rate_of(descriptor, port))
    return float(max(rates))


def _rate_of(descriptor: Path, port: int) -> int:
    """Returns the kernel's newest measurement for a TCP connection to a port. Raises OSError for anything else."""
    if not str(descriptor.readlink()).startswith("socket:"):
        return 0
    copy = os.dup(int(descriptor.name))  # closing a copy closes no connection
    with socket.socket(fileno=copy) as connection:
        if connection.family not in {socket.AF_INET, socket.AF_INET6} or connection.getpeername()[1] != port:
            return 0
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, DELIVERY_RATE.size)
    [rate] = DELIVERY_RATE.unpack(told)
    return int(rate)
