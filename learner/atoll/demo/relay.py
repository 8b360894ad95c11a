"""Emulates a slow link on one machine without root: a TCP relay that limits the rate, adds delay, and can be cut.

python -m atoll.demo.relay --listen 127.0.0.1:0 --to HOST:PORT --mbit 100 --delay-ms 40 [--counts PATH]

SIGUSR1 cuts the link and SIGUSR2 restores it. While the link is cut, no data arrives and no connection ends. The relay
is not a network emulator: it loses no packets, and each side's TCP connection sees only the local round trip.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 16
QUEUED_S = 0.1  # received data waits up to this long, as in a router; beyond that, the relay stops reading
COUNT_S = 0.5  # seconds between writes of the counts to their file
QUEUED = 256  # chunks in flight: 16 MiB, more than 100 Mbit/s carries in a second


@dataclass(slots=True)
class Counts:
    """Bytes in each direction, without TCP headers."""

    up: int = 0
    down: int = 0


class Way:
    """One direction of the link. All connections share it. open_: an event that is cleared while the link is cut."""

    def __init__(self, bytes_per_s: float, delay_s: float, open_: asyncio.Event) -> None:
        self._bytes_per_s = bytes_per_s
        self._delay_s = delay_s
        self._open = open_
        self._free_at = 0.0

    async def carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, carried: Callable[[int], None]
    ) -> None:
        """Carries data until one side ends. carried: called with the size of each chunk in bytes."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED)
        leaving = asyncio.create_task(self._deliver(queue, writer))
        try:
            while not leaving.done():
                await self._open.wait()
                if not (data := await reader.read(CHUNK_BYTES)):
                    break
                now = time.monotonic()
                self._free_at = max(self._free_at, now) + len(data) / self._bytes_per_s
                await queue.put((self._free_at + self._delay_s, data))
                carried(len(data))
                await asyncio.sleep(max(0.0, self._free_at - now - QUEUED_S))
            await queue.put((time.monotonic() + self._delay_s, b""))
            await leaving
        finally:
            leaving.cancel()

    async def _deliver(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            at, data = await queue.get()
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            await self._open.wait()
            if not data:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()


class Relay:
    """Relays connections to one target. target: HOST:PORT. bytes_per_s, delay_s: the rate limit and the delay in each
    direction."""

    def __init__(self, target: str, bytes_per_s: float, delay_s: float) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.counts = Counts()
        self._open = asyncio.Event()
        self._open.set()
        self._up, self._down = (Way(bytes_per_s, delay_s, self._open) for _ in range(2))

    def cut(self) -> None:
        """Cuts the link: no data arrives until `restore`."""
        self._open.clear()

    def restore(self) -> None:
        """Restores the link. Delayed data then arrives."""
        self._open.set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relays one accepted connection until it ends."""
        await self._open.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        for each in (writer, far_writer):
            each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = (
            self._up.carry(reader, far_writer, lambda size: self._count("up", size)),
            self._down.carry(far_reader, writer, lambda size: self._count("down", size)),
        )
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.gather(*tasks)
        except OSError:
            pass  # one side was reset: the block below closes the other
        finally:
            for task in tasks:
                task.cancel()
            writer.close()
            far_writer.close()

    def _count(self, which: str, size: int) -> None:
        setattr(self.counts, which, getattr(self.counts, which) + size)


async def serve(listen: str, relay: Relay, counts: Path | None) -> None:
    """Serves until the process ends. counts: JSON file for the byte counts, or None."""
    host, _, port = listen.rpartition(":")
    server = await asyncio.start_server(relay.connected, host, int(port))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, relay.cut)
    loop.add_signal_handler(signal.SIGUSR2, relay.restore)
    host, port = server.sockets[0].getsockname()[:2]
    print(f"atoll relay listens on {host}:{port}", flush=True)
    while True:
        await asyncio.sleep(COUNT_S)
        if counts is not None:
            part = counts.with_name(counts.name + ".part")
            part.write_text(json.dumps(asdict(relay.counts)))
            part.rename(counts)


def main() -> None:
    """Runs a relay with the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--to", required=True)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--delay-ms", type=float, default=40.0)
    parser.add_argument("--counts", type=Path)
    options = parser.parse_args()

    async def run() -> None:
        relay = Relay(options.to, options.mbit * 125_000, options.delay_ms / 1e3)
        await serve(options.listen, relay, options.counts)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    main()
