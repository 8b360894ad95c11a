"""Measures uploads over an emulated wide-area link vs. raw TCP over the same link.

python -m benchmarks.links.wan [--json PATH]

200 Mbit/s, 40 ms each way, 0.05 % loss. Needs root, and uses its own network namespaces. A learner joins, warms up, and
runs one sync over the fast link, through the emulator and over one connection. This shows the rate that the CPUs allow.
All further syncs use the slow link. A rate counts each payload byte once, from the sync's beginning to the last
acknowledgement. Merges wait until then. The first sync over the slow link does not count, because the learner does not
know the link yet. The same is measured for four learners that share the link behind one front.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.demo.processes import ATOLL, Child, Children, children

from benchmarks.conditions import conditions, write_record
from benchmarks.data_plane.sync import FRAGMENTS, OPTIONS, wait

MBIT = 200.0
CONTROLS, LEARNERS = ("cubic", "bbr"), (1, 4)
DELAY_MS = 40.0
LOSS = 0.0005
QUICK = 2  # syncs over the fast link
SYNCS = 9  # number of the last sync, from 0
COUNTED = SYNCS - QUICK  # last syncs, from the second over the slow link on
IP = shutil.which("ip") or "ip"
HOME, FAR = "10.77.0.1", "10.77.0.2"
RAW_S, RAW_CONNECTIONS = 6.0, {"bbr": (1, 8, 32), "cubic": (1, 8, 32)}
BURSTS, BURST_CONNECTIONS, CHUNK_BYTES = 5, 32, 1 << 18
PAUSE_S = 2.0  # about as long as the downloads of a sync, during which the connections for uploads are idle
RAW = """
import socket, sys, threading, time
address, congestion, count, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
server = socket.create_server((address, 0), backlog=64)
print(server.getsockname()[1], flush=True)
total, lock = [0], threading.Lock()
def take(peer):
    while data := peer.recv(1 << 18):
        with lock: total[0] += len(data)
for _ in range(count): threading.Thread(target=take, args=(server.accept()[0],), daemon=True).start()
time.sleep(seconds); begun = total[0]; time.sleep(seconds); print(total[0] - begun, flush=True)
"""
SENDER = """
import socket, sys, threading
address, port, congestion, count = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
def send():
    with socket.socket() as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode()); peer.connect((address, port))
        while True: peer.sendall(bytes(1 << 16))
for _ in range(count): threading.Thread(target=send).start()
"""
BURST_TAKER = """
import socket, sys, threading
address, count, size, bursts = sys.argv[1], *map(int, sys.argv[2:5])
server = socket.create_server((address, 0), backlog=64)
print(server.getsockname()[1], flush=True)
peers, lock, done, left = [server.accept()[0] for _ in range(count)], threading.Lock(), threading.Semaphore(0), [size]
def take(peer):
    while data := peer.recv(1 << 18):
        with lock:
            left[0] -= len(data)
            if not left[0]: left[0] = size; done.release()
for peer in peers: threading.Thread(target=take, args=(peer,), daemon=True).start()
for _ in range(bursts): done.acquire(); peers[0].sendall(b"x")
"""
BURST_SENDER = """
import socket, sys, threading, time
address, port, congestion, count, size, bursts, chunk, pause = sys.argv[1:]
def connect():
    peer = socket.socket(); peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    peer.connect((address, int(port))); return peer
peers, lock = [connect() for _ in range(int(count))], threading.Lock()
for _ in range(int(bursts)):
    time.sleep(float(pause)); left, began = [int(size)], time.monotonic()
    def send(peer):
        while True:
            with lock: some = min(left[0], int(chunk)); left[0] -= some
            if not some: return
            peer.sendall(bytes(some))
    for peer in peers: threading.Thread(target=send, args=(peer,)).start()
    peers[0].recv(1); print(time.monotonic() - began, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Rates:
    """Mbit/s of payload. quick: rate over the link without its limits. uploads: one rate per measured sync.

    learners: number of learners. Several learners are behind one front.
    bursts: rates of plain TCP over BURST_CONNECTIONS connections for the bytes of one sync, after the same pause.
    raw: rate of plain TCP without a pause, by number of connections.
    """

    congestion: str
    learners: int
    quick: float
    uploads: list[float]
    bursts: list[float]
    raw: dict[int, float]

    def median(self) -> float:
        """Returns the median rate of the uploads."""
        return statistics.median(self.uploads)

    def share(self) -> float:
        """Returns the median rate of the uploads as a share of that of plain TCP after the same pause."""
        return self.median() / statistics.median(self.bursts)

    def line(self) -> str:
        """Returns the rates as one line of text."""
        raw = ", ".join(f"{count}: {rate:.0f}" for count, rate in self.raw.items())
        return (
            f"{self.congestion}, {self.learners} learners: uploads {self.median():.0f} Mbit/s of {MBIT:.0f}; "
            f"{self.quick:.0f} over a fast link; {statistics.median(self.bursts):.0f} over {BURST_CONNECTIONS} raw "
            f"connections; without pauses: {raw}"
        )


def measure(congestion: str, learners: int = 1) -> Rates:
    """Measures with the same congestion control on both sides. congestion: bbr or cubic."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group, _link(group) as (inside, link):
        with _allowed(congestion):
            for side in (0, 1):
                inside(side, ["sysctl", "-qw", f"net.ipv4.tcp_congestion_control={congestion}"])
        rates, size_bytes = _uploads(group, Path(directory), inside, link, learners)
        bursts = _bursts(inside, congestion, size_bytes)
        raw = {count: _raw(inside, congestion, count) for count in RAW_CONNECTIONS[congestion]}
    return Rates(congestion, learners, rates[QUICK - 1], rates[-COUNTED:], bursts, raw)


@contextlib.contextmanager
def _allowed(congestion: str) -> Iterator[None]:
    """Context manager that allows a congestion control on the machine.

    Namespaces may choose only from the allowed ones.
    """
    place = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    before = place.read_text()
    place.write_text(f"{before.strip()} {congestion}")
    try:
        yield
    finally:
        place.write_text(before)


class Inside:
    """Runs commands in one of the two namespaces. side: 0 for home, 1 for the far side."""

    def __init__(self, namespaces: tuple[str, str]) -> None:
        self.namespaces = namespaces

    def command(self, side: int, words: list[str]) -> list[str]:
        """Returns a command line that runs `words` on a side."""
        return [IP, "netns", "exec", self.namespaces[side], *words]

    def __call__(self, side: int, words: list[str]) -> None:
        """Runs a command on a side, and waits for it."""
        subprocess.run(self.command(side, words), check=True)


@contextlib.contextmanager
def _link(group: Children) -> Iterator[tuple[Inside, Child]]:
    """Context manager for two namespaces and the link between them, which is fast until SIGUSR1."""
    names = f"atoll-home-{os.getpid()}", f"atoll-far-{os.getpid()}"
    up, inside = Path(f"/run/netns/{names[0]}.wan0.up"), Inside(names)
    try:
        for name in names:
            subprocess.run([IP, "netns", "add", name], check=True)
        options = ["--mbit", f"{MBIT}", "--delay-ms", f"{DELAY_MS}", "--loss", f"{LOSS}", "--quick"]
        link = group.start("link", [sys.executable, "-m", "benchmarks.links.emulator", *names, *options])
        wait([link], [up])
        for side, address in enumerate((HOME, FAR)):
            inside(side, [IP, "addr", "add", f"{address}/30", "dev", "wan0"])
            inside(side, [IP, "link", "set", "wan0", "up"])
            inside(side, [IP, "link", "set", "lo", "up"])
        yield inside, link
    finally:
        group.end()  # processes keep their namespace alive
        up.unlink(missing_ok=True)
        for name in names:
            subprocess.run([IP, "netns", "delete", name], check=False)


def _uploads(group: Children, place: Path, inside: Inside, link: Child, learners: int) -> tuple[list[float], int]:
    """Returns the rate of each sync in Mbit/s, and the payload bytes of the last sync."""
    core_command = [
        sys.executable,
        "-m",
        "benchmarks.data_plane.sync_core",
        str(place),
        "core",
        "--dir",
        str(place / "run"),
    ]
    listen = ["--listen", f"{HOME}:0", "--insecure-plaintext", *OPTIONS, "--fragments", str(FRAGMENTS)]
    core = group.start("core", inside.command(0, [*core_command, *listen]), piped=True)
    address = group.serving(core)
    fronts = []
    if learners > 1:
        words = [*ATOLL, "front", "--listen", "127.0.0.1:0", "--core", address, "--insecure-plaintext"]
        fronts.append(group.start("front", inside.command(1, words), piped=True))
        address = group.serving(fronts[0])
    learner = [sys.executable, "-m", "benchmarks.data_plane.sync_learner"]
    islands = [
        group.start(f"learner {n}", inside.command(1, [*learner, str(n), address, "124m", str(SYNCS), str(place)]))
        for n in range(learners)
    ]
    rates = []
    for number in range(SYNCS + 1):
        wait(islands, [place / f"{n}.ready.{number}" for n in range(learners)])
        if number == QUICK:
            link.process.send_signal(signal.SIGUSR1)
        (place / "hold").touch()
        began = time.monotonic()
        (place / f"go.{number}").touch()
        wait(islands, [place / f"{n}.uploaded.{number}" for n in range(learners)])
        (place / "hold").unlink()
        wait(islands, [place / f"{n}.{number}" for n in range(learners)])
        told = [json.loads((place / f"{n}.{number}").read_text()) for n in range(learners)]
        size_bytes = int(sum(each["payload_bytes"] for each in told))
        rates.append(size_bytes * 8 / 1e6 / (max(each["uploaded"] for each in told) - began))
    (place / "leave").touch()
    for island in islands:
        island.process.wait(60.0)
    for child in (*fronts, core):
        group.stop(child)
    return rates, size_bytes


def _bursts(inside: Inside, congestion: str, size_bytes: int) -> list[float]:
    """Sends the bytes of a sync several times over idle connections, which share them. Returns the rates in Mbit/s.

    The time ends when the sender has the receiver's answer, as in an upload.
    """
    count, bursts = str(BURST_CONNECTIONS), str(BURSTS)
    taking = inside.command(0, [sys.executable, "-c", BURST_TAKER, HOME, count, str(size_bytes), bursts])
    with subprocess.Popen(taking, stdout=subprocess.PIPE, text=True) as taker:
        assert taker.stdout is not None, "its output is read"
        port = taker.stdout.readline().strip()
        words = [HOME, port, congestion, count, str(size_bytes), bursts, str(CHUNK_BYTES), str(PAUSE_S)]
        sending = inside.command(1, [sys.executable, "-c", BURST_SENDER, *words])
        done = subprocess.run(sending, stdout=subprocess.PIPE, text=True, check=True)
    return [size_bytes * 8 / 1e6 / float(line) for line in done.stdout.split()]


def _raw(inside: Inside, congestion: str, count: int) -> float:
    arguments = [HOME, congestion, str(count), str(RAW_S)]
    taking = inside.command(0, [sys.executable, "-c", RAW, *arguments])
    with subprocess.Popen(taking, stdout=subprocess.PIPE, text=True) as taker:
        assert taker.stdout is not None, "its output is read"
        port = taker.stdout.readline().strip()
        sending = inside.command(1, [sys.executable, "-c", SENDER, HOME, port, congestion, str(count)])
        with subprocess.Popen(sending, stderr=subprocess.DEVNULL) as sender:
            carried = int(taker.stdout.readline())
            sender.kill()
    return carried * 8 / 1e6 / RAW_S


def main() -> None:
    """Measures both congestion controls and prints the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, dest="json_path")
    parser.add_argument("--only", choices=CONTROLS)
    parser.add_argument("--learners", type=int, choices=LEARNERS)
    arguments, under = parser.parse_args(), conditions()
    controls = [arguments.only] if arguments.only else CONTROLS
    counts = [arguments.learners] if arguments.learners else LEARNERS
    found = list[Rates]()
    for learners, each in itertools.product(counts, controls):
        found.append(measure(each, learners))
        print(found[-1].line(), flush=True)
        if arguments.json_path is not None:
            write_record(arguments.json_path, {"rates": list(map(asdict, found))}, under)


if __name__ == "__main__":
    main()
