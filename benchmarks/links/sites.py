"""Network namespaces for a home and for sites, each behind its own link. Needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from atoll.demo.processes import Child, Children

from benchmarks.data_plane.sync import wait
from benchmarks.links.wan import IP


class Sites:
    """The namespaces of home and of each site. Sites reach each other through home.

    names, links, counts: each site's namespace, link emulator, and file of byte counts.
    """

    def __init__(self, group: Children, directory: Path, names: Sequence[str], mbit: float, delay_ms: float) -> None:
        self._group = group
        self._mbit = mbit
        self._delay_ms = delay_ms
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
            options = ["--mbit", f"{self._mbit}", "--delay-ms", f"{self._delay_ms}", "--seed", str(number)]
            command = [sys.executable, "-m", "benchmarks.links.emulator", self.home, name, *options, "--device", device]
            link = self._group.start(f"link {site}", [*command, "--counts", str(self.counts[site])])
            self.links[site] = link
            wait([link], [Path(f"/run/netns/{self.home}.{device}.up")])
            for side, end in ((self.home, 1), (name, 2)):
                subprocess.run([IP, "-n", side, "addr", "add", f"10.78.{number}.{end}/30", "dev", device], check=True)
                subprocess.run([IP, "-n", side, "link", "set", device, "up"], check=True)
            subprocess.run([IP, "-n", name, "route", "add", "default", "via", self.home_address(number)], check=True)

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
def sites(group: Children, directory: Path, names: Sequence[str], mbit: float, delay_ms: float) -> Iterator[Sites]:
    """Context manager that makes sites.

    At the end, it kills all children, because a process keeps its namespace alive.
    """
    made = Sites(group, directory, names, mbit, delay_ms)
    try:
        made.make()
        yield made
    finally:
        group.end()
        made.remove()
