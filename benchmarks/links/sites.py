"""Network namespaces for a home and for sites, each behind its own link. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from atoll.demo.processes import Child, Children

from benchmarks.data_plane.loopback import Loopback
from benchmarks.data_plane.sync import wait
from benchmarks.links.emulator import BUFFER_S
from benchmarks.links.wan import IP

TC = shutil.which("tc") or "tc"
JUMBO = 9000  # bytes; with packets of this size, the emulator carries several times as much per CPU second
BURST = "256kb"  # a token bucket's size: 0.2 ms at 10 Gbit/s


class Sites:
    """The namespaces of home and of each site. Sites reach each other through home.

    Each link has a rate in both directions (mbit) and a delay each way (delay_ms). Without a delay, the kernel shapes
    the link, which needs less CPU time than the emulator. mtu: largest packet in bytes. names, links, counts: each
    site's namespace, link emulator, and file of byte counts.
    """

    def __init__(
        self, group: Children, directory: Path, names: Sequence[str], mbit: float, delay_ms: float, mtu: int = 1500
    ) -> None:
        self._group = group
        self._mbit = mbit
        self._delay_ms = delay_ms
        self._mtu = mtu
        mark = f"atoll-{os.getpid()}"
        self.home = f"{mark}-home"
        self.names = {name: f"{mark}-{name}" for name in names}
        self.links: dict[str, Child] = {}
        self.counts = {name: directory / f"{name}.link" for name in names}

    def make(self) -> None:
        """Makes namespaces, links, addresses and routes."""
        for name in (self.home, *self.names.values()):
            subprocess.run([IP, "netns", "add", name], check=True)
            subprocess.run([IP, "-n", name, "link", "set", "lo", "up"], check=True)
        forward = ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]
        subprocess.run(self.inside(self.home, forward), check=True)
        for number, (site, name) in enumerate(self.names.items()):
            device = self.device(number)
            if self._delay_ms:
                self._emulate(site, number)
            else:
                self._shape(name, device)
            for side, end in ((self.home, 1), (name, 2)):
                subprocess.run([IP, "-n", side, "addr", "add", f"10.78.{number}.{end}/30", "dev", device], check=True)
                subprocess.run([IP, "-n", side, "link", "set", device, "mtu", str(self._mtu), "up"], check=True)
            subprocess.run([IP, "-n", name, "route", "add", "default", "via", self.home_address(number)], check=True)

    def _emulate(self, site: str, number: int) -> None:
        device = self.device(number)
        options = ["--mbit", f"{self._mbit}", "--delay-ms", f"{self._delay_ms}", "--seed", str(number)]
        ends = [self.home, self.names[site], "--device", device, "--counts", str(self.counts[site])]
        link = self._group.start(f"link {site}", [sys.executable, "-m", "benchmarks.links.emulator", *ends, *options])
        self.links[site] = link
        wait([link], [Path(f"/run/netns/{self.home}.{device}.up")])

    def _shape(self, name: str, device: str) -> None:
        """Makes a pair of devices whose rate the kernel limits in both directions."""
        ends = [device, "netns", self.home, "type", "veth", "peer", "name", device, "netns", name]
        subprocess.run([IP, "link", "add", *ends], check=True)
        limit = ["tbf", "rate", f"{self._mbit}mbit", "burst", BURST, "latency", f"{1000 * BUFFER_S:.0f}ms"]
        for side in (self.home, name):
            subprocess.run([TC, "-n", side, "qdisc", "add", "dev", device, "root", *limit], check=True)

    @staticmethod
    def device(number: int) -> str:
        """Returns the name of a site's link device, which is the same at both ends."""
        return f"wan{number}"

    @staticmethod
    def home_address(number: int) -> str:
        """Returns home's address, as seen from a site."""
        return f"10.78.{number}.1"

    @staticmethod
    def address(number: int) -> str:
        """Returns a site's address, as seen from home and from other sites."""
        return f"10.78.{number}.2"

    @staticmethod
    def inside(namespace: str, words: Sequence[str]) -> list[str]:
        """Returns a command line that runs `words` in a namespace."""
        return [IP, "netns", "exec", namespace, *words]

    def remove(self) -> None:
        """Removes all namespaces and links, even if `make` failed halfway."""
        for number in range(len(self.names)):
            Path(f"/run/netns/{self.home}.{self.device(number)}.up").unlink(missing_ok=True)
        for name in (self.home, *self.names.values()):
            subprocess.run([IP, "netns", "delete", name], check=False, capture_output=True)


@contextlib.contextmanager
def sites(
    group: Children, directory: Path, names: Sequence[str], mbit: float, delay_ms: float, mtu: int = 1500
) -> Iterator[Sites]:
    """Context manager that makes sites. The arguments are those of `Sites`.

    At the end, it kills all children, because a process keeps its namespace alive.
    """
    made = Sites(group, directory, names, mbit, delay_ms, mtu)
    try:
        made.make()
        yield made
    finally:
        group.end()
        made.remove()


class BehindLinks(Loopback):
    """Places the cores at home, and each worker at its own site. place: the sites."""

    listen = "0.0.0.0:0"
    core_options = ("--insecure-plaintext",)

    def __init__(self, place: Sites) -> None:
        self._place = place
        self._names = list(place.names.values())

    def at_core(self, words: Sequence[str]) -> list[str]:
        return self._place.inside(self._place.home, words)

    def at_worker(self, number: int, words: Sequence[str]) -> list[str]:
        return self._place.inside(self._names[number], words)

    def reached(self, number: int, address: str) -> str:
        return f"{self._place.home_address(number)}:{address.rpartition(':')[2]}"

    def worker_host(self, number: int) -> str:
        return self._place.address(number)

    def worker_device(self, number: int) -> str:
        return self._place.device(number)
