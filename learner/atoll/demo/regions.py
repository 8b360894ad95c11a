"""Regions of the demo. Each has a front behind a relay that limits the rate, adds delay, and can be cut."""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from atoll.demo.processes import Child, Children, free_port

MBIT, DELAY_MS = 100.0, 40.0  # in each direction
COUNTER = "atoll_front_wan_bytes_total"
KINDS = {
    "update_bytes": ("down", "update"),
    "contribution_bytes": ("up", "contribution"),
    "whole_bytes": ("down", "whole"),
}


@dataclass(slots=True)
class Region:
    """One region.

    relay, link: the process that emulates the link to the core, and that process's address. counts: file with the
    relay's byte counts. front, address: the region's front and its address. before: payload bytes counted by killed
    fronts.
    """

    name: str
    relay: Child
    link: str
    counts: Path
    metrics_port: int
    front: Child
    address: str
    before: Counter[str] = field(default_factory=Counter)


class Regions:
    """All regions of one core. core: the core's address."""

    def __init__(self, group: Children, directory: Path, core: str, names: list[str]) -> None:
        self._group = group
        self.all = [self._start(directory, core, name) for name in names]

    def _start(self, directory: Path, core: str, name: str) -> Region:
        counts, port = directory / f"{name}.link.json", free_port()
        command = [sys.executable, "-m", "atoll.demo.relay", "--to", core, "--counts", str(counts)]
        slow = ["--mbit", f"{MBIT}", "--delay-ms", f"{DELAY_MS}"]
        relay = self._group.start(f"link {name}", [*command, *slow], piped=True)
        link = self._group.serving(relay)
        front, address = self._group.start_front(f"front {name}", "127.0.0.1:0", link, _options(name, port))
        return Region(name, relay, link, counts, port, front, address)

    def kill_front(self, region: Region) -> None:
        """Kills a region's front and starts another front at the same address."""
        region.before.update(_counted(region))
        region.front.kill()
        options = _options(region.name, region.metrics_port)
        region.front, _ = self._group.start_front(f"front {region.name}", region.address, region.link, options)

    def cut(self, region: Region) -> None:
        """Cuts a region's link: nothing arrives until `restore`."""
        region.relay.process.send_signal(signal.SIGUSR1)

    def restore(self, region: Region) -> None:
        """Restores a region's link. Delayed data then arrives."""
        region.relay.process.send_signal(signal.SIGUSR2)

    def figures(self) -> dict[str, dict[str, Any]]:
        """Returns, by region, the payload bytes between its front and the core, and all bytes over its link."""
        found = {}
        for region in self.all:
            link = json.loads(region.counts.read_text())
            counted = _counted(region)
            found[region.name] = {name: region.before[name] + counted[name] for name in KINDS} | {
                "link_up_bytes": link["up"],
                "link_down_bytes": link["down"],
            }
        return found


def _options(name: str, metrics_port: int) -> list[str]:
    return ["--region", name, "--metrics-listen", f"127.0.0.1:{metrics_port}"]


def _counted(region: Region) -> Counter[str]:
    """Returns the payload bytes that the running front has counted, by the names in KINDS."""
    with urllib.request.urlopen(f"http://127.0.0.1:{region.metrics_port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    sums = Counter[tuple[str, str]]()
    for sample in (sample for family in families for sample in family.samples if sample.name == COUNTER):
        sums[sample.labels["direction"], sample.labels["kind"]] += int(sample.value)
    return Counter({name: sums[kind] for name, kind in KINDS.items()})
