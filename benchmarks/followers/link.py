"""Measures what followers cost a region's link: python -m benchmarks.followers.link [--many 50] [--json PATH].

A learner trains. One front serves a single follower, and another front serves many. All followers start
before the first version and end at the same version. Their models must then have the same values.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import atoll
import torch
from atoll.demo.processes import Child, Children, children, free_port
from torch import nn

from benchmarks.conditions import conditions, write_record
from benchmarks.process_state import metrics, settled

WIDTH = 1024
VERSIONS = 20
OPTIONS = ["--fragments", "4", "--inner-steps", "8", "--compression", "always"]  # as on a WAN
KINDS = ("update", "whole", "fixed")
MAX_BYTES, MAX_MORE = 0.4, 1.05


@dataclass(frozen=True, slots=True)
class Front:
    """A front process on this machine."""

    child: Child
    address: str
    metrics_port: int


@dataclass(frozen=True, slots=True)
class Region:
    """What one front received. wan_bytes: from the core, by kind. served_bytes: to its followers."""

    followers: int
    wan_bytes: dict[str, float]
    served_bytes: float


@dataclass(frozen=True, slots=True)
class Cost:
    """The figures of two regions. versions: number of updates of each fragment, the mean over fragments."""

    parameters: int
    versions: float
    regions: list[Region]

    def per_parameter(self, region: Region) -> float:
        """Returns a region's bytes of updates per parameter and version."""
        return region.wan_bytes["update"] / self.parameters / self.versions


def model() -> nn.Module:
    """Returns a model with two million parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def cost(many: int) -> Cost:
    """Trains until every fragment has VERSIONS versions, and waits until all followers have the newest ones."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        core, address = group.start_core(Path(directory) / "run", "127.0.0.1:0", OPTIONS)
        fronts = {name: started(group, name, address) for name in ("one", "many")}
        with contextlib.ExitStack() as stack:
            trained = model()
            optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
            learner = stack.enter_context(atoll.Learner(trained, optimizer, address, "trainer"))
            near = [fronts["one"].address, *[fronts["many"].address] * many]
            models = [model() for _ in near]
            pairs = zip(models, near, strict=True)
            followers = [stack.enter_context(atoll.Follower(each, front)) for each, front in pairs]
            first = followers[0].versions
            for batch in batches(learner, WIDTH, VERSIONS):
                optimizer.zero_grad()
                (trained(batch) - batch).square().mean().backward()
                optimizer.step()
            newest = tuple(each.version for each in settled(address).fragments)
            for follower in followers:
                follower.wait(version=max(newest), timeout_s=1.0)
                while follower.versions != newest:
                    if not follower.wait(timeout_s=60.0):
                        raise SystemExit(
                            f"a follower stays at versions {follower.versions}, but the core is at {newest}"
                        )
            if not all(same(models[0], each) for each in models):
                raise SystemExit("followers of the same versions have different values")
            found = [region(1, fronts["one"]), region(many, fronts["many"])]
        for front in fronts.values():
            group.stop(front.child)
        group.stop(core)
    parameters = sum(each.numel() for each in trained.parameters())
    return Cost(parameters, sum(newest) / len(newest) - sum(first) / len(first), found)


def batches(learner: atoll.Learner, width: int, versions: int, step_s: float = 0.0) -> Iterator[torch.Tensor]:
    """Yields batches until every fragment has this many versions, and counts a step after each. Then leaves the run.

    step_s: seconds to wait after each step.
    """
    while min(learner.stats().versions) < versions:
        yield (batch := torch.randn(8, width))
        learner.step(tokens=len(batch))
        time.sleep(step_s)
    learner.close()


def started(group: Children, name: str, core: str, options: Sequence[str] = ()) -> Front:
    """Starts a front. core: the core's HOST:PORT."""
    port = free_port()
    words = ["--metrics-listen", f"127.0.0.1:{port}", *options]
    child, address = group.start_front(name, "127.0.0.1:0", core, words)
    return Front(child, address, port)


def same(one: nn.Module, other: nn.Module) -> bool:
    """Returns whether two models have the same bits."""
    return all(torch.equal(mine, its) for mine, its in zip(one.parameters(), other.parameters(), strict=True))


def region(followers: int, front: Front) -> Region:
    """Returns the payload bytes that a front received from the core, by kind, and those that it sent to followers."""
    read = metrics(front.metrics_port)
    received = {kind: read.total("atoll_front_wan_bytes_total", direction="down", kind=kind) for kind in KINDS}
    return Region(followers, received, read.total("atoll_front_reader_bytes_total"))


def main() -> None:
    """Measures, prints the figures, and exits with an error if many followers cost the link more than one does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--many", type=int, default=50)
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under = parser.parse_args(), conditions()
    found = cost(arguments.many)
    for region in found.regions:
        received = ", ".join(f"{kind} {region.wan_bytes[kind] / 1e6:.2f} MB" for kind in KINDS)
        print(
            f"{region.followers} followers: {received} over the link; {region.served_bytes / 1e6:.1f} MB served;",
            end=" ",
        )
        print(f"{found.per_parameter(region):.3f} bytes per parameter and version (limit {MAX_BYTES})")
    if arguments.json_path is not None:
        limits = {"bytes_per_parameter": MAX_BYTES, "many_vs_one": MAX_MORE}
        figures = [asdict(each) | {"bytes_per_parameter": found.per_parameter(each)} for each in found.regions]
        write_record(arguments.json_path, {"limits": limits} | asdict(found) | {"regions": figures}, under)
    one, many = found.regions
    if any(found.per_parameter(each) > MAX_BYTES for each in found.regions):
        raise SystemExit(f"an update has more than {MAX_BYTES} bytes per parameter: see the figures above")
    if sum(many.wan_bytes.values()) > MAX_MORE * sum(one.wan_bytes.values()):
        raise SystemExit(
            f"{many.followers} followers moved over {MAX_MORE} times as many bytes as one: see the figures above"
        )


if __name__ == "__main__":
    main()
