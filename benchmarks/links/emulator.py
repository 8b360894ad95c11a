"""Emulates a wide-area link between two network namespaces in user space: rate, delay and loss, with the kernel's TCP.

python -m benchmarks.links.emulator A B --mbit 200 --delay-ms 40 --loss 0.0005 [--quick] [--device wan0]

The emulator needs root. It creates a device in each namespace, touches /run/netns/A.DEVICE.up, and carries packets
until it is stopped. --quick: no delay and no loss until SIGUSR1. SIGUSR2 cuts the link, and a second SIGUSR2 restores
it. --counts: file for the bytes each way, written five times per second. --seed and the order of packets decide which
packets are lost.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import random
import select
import signal
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
BUFFER_S = 0.1  # seconds of a router's buffer; packets that would wait longer are dropped
QUICK_BYTES_PER_S = 100e6
COUNT_S = 0.2
MAX_AT_ONCE = 64  # packets read from one end before the other end is read


@dataclass(slots=True)
class Way:
    """One direction of a link. delay_s: in addition to the transmission time. loss: probability per packet."""

    bytes_per_s: float
    delay_s: float
    loss: float
    rng: random.Random
    carried: int = 0
    cut: bool = False
    _free_at: float = 0.0
    _on_the_way: deque[tuple[float, bytes]] = field(default_factory=deque)

    def send(self, packet: bytes, now: float) -> None:
        """Queues a packet, or drops it at random, while the link is cut, or if the buffer is full."""
        begins = max(self._free_at, now)
        if self.cut or self.rng.random() < self.loss or begins - now > BUFFER_S:
            return
        self._free_at = begins + len(packet) / self.bytes_per_s
        self._on_the_way.append((self._free_at + self.delay_s, packet))

    def arrived(self, now: float) -> list[bytes]:
        """Removes and returns the packets that have arrived."""
        found = []
        while self._on_the_way and self._on_the_way[0][0] <= now:
            found.append(self._on_the_way.popleft()[1])
        self.carried += sum(map(len, found))
        return found

    def next_at(self) -> float | None:
        """Returns the arrival time of the next packet, in monotonic seconds, or None if no packet is queued."""
        return self._on_the_way[0][0] if self._on_the_way else None


def device(namespace: str, name: str) -> int:
    """Makes a TUN device in a namespace. Returns a non-blocking descriptor that reads and writes its packets."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"namespace {namespace} cannot be entered: run as root")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    finally:
        libc.setns(here, CLONE_NEWNET)
        os.close(here)
        os.close(there)
    return tun


def carry(ways: dict[int, Way], other: dict[int, int], counts: Path | None) -> None:
    """Carries packets forever.

    ways, other: the direction and the other device's descriptor, by a device's descriptor.
    """
    counted_at = 0.0
    while True:
        now = time.monotonic()
        if counts is not None and now - counted_at > COUNT_S:
            counted_at, part = now, counts.with_name(counts.name + ".part")
            part.write_text(json.dumps([way.carried for way in ways.values()]))
            part.rename(counts)
        for end, way in ways.items():
            for packet in way.arrived(now):
                try:
                    os.write(other[end], packet)
                except OSError:
                    continue  # the device is down or full, so the packet is lost
        waits = [at for way in ways.values() if (at := way.next_at()) is not None]
        ready, _, _ = select.select(list(ways), [], [], max(0.0, min(waits) - now) if waits else COUNT_S)
        for end in ready:
            for _ in range(MAX_AT_ONCE):
                try:
                    ways[end].send(os.read(end, 65_535), time.monotonic())
                except BlockingIOError:
                    break


def main() -> None:
    """Makes both devices and carries packets between them, with the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("namespaces", nargs=2)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--delay-ms", type=float, default=40.0)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="wan0")
    parser.add_argument("--counts", type=Path)
    options = parser.parse_args()
    ends = [device(namespace, options.device) for namespace in options.namespaces]
    rates = (options.mbit * 125_000, options.delay_ms / 1e3, options.loss)
    rate, delay, loss = (QUICK_BYTES_PER_S, 0.0, 0.0) if options.quick else rates
    ways = {end: Way(rate, delay, loss, random.Random(options.seed + number)) for number, end in enumerate(ends)}  # noqa: S311

    def slow(*_: object) -> None:
        for way in ways.values():
            way.bytes_per_s, way.delay_s, way.loss = rates

    def cut(*_: object) -> None:
        for way in ways.values():
            way.cut = not way.cut

    signal.signal(signal.SIGUSR1, slow)
    signal.signal(signal.SIGUSR2, cut)
    Path(f"/run/netns/{options.namespaces[0]}.{options.device}.up").touch()
    carry(ways, {ends[0]: ends[1], ends[1]: ends[0]}, options.counts)


if __name__ == "__main__":
    main()
