"""Measures a run in three regions behind long links, as a user would start it.

python -m benchmarks.links.regions [--json PATH] [--seeds 3]

Needs root, and uses its own network namespaces. The core is at home. A region has a front and two reference learners,
behind a link of 100 Mbit/s and 40 ms each way. The benchmark checks that each front fetches one copy of each published
update. It measures the links' traffic, and compares the loss with that of runs over loopback with the same seeds. A
further run measures the cost of a minute without a link for a region's learners.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
from atoll.demo.processes import ATOLL, Child, children
from atoll.reference.train import loss_of_file
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc

from benchmarks.conditions import conditions, write_record
from benchmarks.links.sites import Sites, sites
from benchmarks.process_state import Metrics, settled

REGIONS, EACH = ("eu", "us", "ap"), 2
MBIT, DELAY_MS = 100.0, 40.0
BATCH = 8
CONTEXT = 128
FRAGMENTS = 8
PORT, METRICS = 7070, 9100
CUT_AT, CUT_S = 0.3, 60.0  # share of the tokens; seconds
COUNT_AT = 0.9  # share of the tokens: all learners still train then; none fetches updates after its last step
WATCH_S = 1.0
ANSWER_S = 30.0
MAX_RUN_S = 1800.0
COPIES = (0.98, 1.02)


@dataclass(slots=True)
class Outcome:
    """The result of one run. copies: how often each front fetched the published updates. link_bytes: up and down.

    pace: inner steps of the learners that were cut off, relative to the other learners and to the time before the cut.
    It covers the time until they reported again. 1: no step was lost. merged_after: contributions of all learners since
    the link was restored.
    """

    seed: int
    loss: float
    seconds: float
    merged: int
    refused: int  # refused after they were acknowledged
    turned_away: int = 0  # refused before they were acknowledged, for example because they were too stale
    copies: dict[str, float] = field(default_factory=dict)
    update_bytes: dict[str, int] = field(default_factory=dict)
    link_bytes: dict[str, list[int]] = field(default_factory=dict)
    pace: float | None = None
    merged_after: int | None = None


def over_loopback(seed: int, steps: int) -> Outcome:
    """Runs the same learners without fronts and links."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        place, began = Path(directory), time.monotonic()
        core, address = group.start_core(place / "run", "127.0.0.1:0", _settings(steps))
        learners = [group.start(name, _learner(name, region, address, seed)) for region, name in _names()]
        status = _until(address, lambda _: all(each.process.poll() is not None for each in learners), learners)
        loss = _loss(address, place)
        group.stop(core)
    return Outcome(seed, loss, time.monotonic() - began, status.contributions.merged, status.contributions.refused)


def over_regions(seed: int, steps: int, *, cut: bool) -> Outcome:
    """Runs three regions. cut: whether to cut the last region's link for CUT_S seconds."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        path = Path(directory)
        with sites(group, path, REGIONS, MBIT, DELAY_MS) as place:
            began = time.monotonic()
            options = ["--dir", str(path / "run"), *_settings(steps), "--insecure-plaintext"]
            command = [*ATOLL, "core", "--listen", f"0.0.0.0:{PORT}", "--listen", f"unix:{path}/core", *options]
            core = group.start("core", place.inside(place.home, command), piped=True)
            group.serving(core)
            for number, (region, name) in enumerate(place.names.items()):
                upstream = f"{place.home_address(number)}:{PORT}"
                words = [*ATOLL, "front", "--listen", f"127.0.0.1:{PORT}", "--core", upstream]
                more = ["--region", region, "--metrics-listen", f"127.0.0.1:{METRICS}", "--insecure-plaintext"]
                group.serving(group.start(f"front {region}", place.inside(name, [*words, *more]), piped=True))
            learners = {}
            for region, name in _names():
                words = _learner(name, region, f"127.0.0.1:{PORT}", seed)
                learners[name] = group.start(name, place.inside(place.names[region], words))
            outcome = Outcome(seed, 0.0, 0.0, 0, 0)
            tokens = steps * BATCH * CONTEXT
            island = _Cut(place, outcome, tokens) if cut else None

            def done(status: pb.StatusReply) -> bool:
                if island is not None:
                    island.look(status)
                if not outcome.copies and status.tokens_trained >= COUNT_AT * tokens:
                    _count(place, outcome, status)
                return all(each.process.poll() is not None for each in learners.values())

            status = _until(f"unix:{path}/core", done, list(learners.values()))
            outcome.merged = status.contributions.merged
            outcome.refused = status.contributions.refused
            outcome.turned_away = status.contributions.turned_away
            outcome.loss = _loss(f"unix:{path}/core", path)
            for region in place.names:
                outcome.link_bytes[region] = json.loads(place.counts[region].read_text())[
                    ::-1
                ]  # counts begin with home's side, so they are (down, up)
            outcome.seconds = time.monotonic() - began
    return outcome


def _count(place: Sites, outcome: Outcome, status: pb.StatusReply) -> None:
    """Adds to `outcome` the share of the published updates that each front has fetched."""
    once = sum(each.version * each.parameters for each in status.fragments)
    bits = status.wire.down * 8 / max(1, status.wire.down_parameters)
    for region, name in place.names.items():
        command = place.inside(name, [sys.executable, "-c", READ])
        read = Metrics(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        took = int(read.total("atoll_front_wan_bytes_total", direction="down", kind="update"))
        outcome.update_bytes[region] = took
        outcome.copies[region] = took * 8 / bits / once


# Reads a front's metrics inside its network namespace. Imports little, because learners train meanwhile.
READ = f"""
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:{METRICS}/metrics", timeout=20).read().decode())
"""


class _Cut:
    """Cuts the last region off for a while, and measures its learners' steps."""

    def __init__(self, place: Sites, outcome: Outcome, tokens: int) -> None:
        self._link = place.links[REGIONS[-1]]
        self._region = REGIONS[-1]
        self._outcome = outcome
        self._tokens = tokens
        self._began = self._ended = 0.0
        self._first = self._cut = (0, 0)  # steps of the learners that are cut off, and of the other learners
        self._merged = 0

    def look(self, status: pb.StatusReply) -> None:
        """Reads the core's status, once per second. Steps during the cut are reported after it."""
        now, mine = time.monotonic(), [each for each in status.learners if each.region == self._region]
        all_steps, my_steps = sum(each.steps for each in status.learners), sum(each.steps for each in mine)
        steps, merged = (my_steps, all_steps - my_steps), status.contributions.merged
        if not self._began:
            if not self._first[0] and len(status.learners) == EACH * len(REGIONS) and all(each.steps for each in mine):
                self._first = steps
            if status.tokens_trained >= CUT_AT * self._tokens:
                self._link.process.send_signal(signal.SIGUSR2)
                self._began = now
                self._cut = steps
        elif not self._ended and now - self._began >= CUT_S:
            self._link.process.send_signal(signal.SIGUSR2)
            self._ended = now
            self._merged = merged
        elif self._ended and self._outcome.pace is None and self._heard(mine, my_steps, now):
            before = (self._cut[0] - self._first[0]) / (self._cut[1] - self._first[1])
            self._outcome.pace = (steps[0] - self._cut[0]) / (steps[1] - self._cut[1]) / before
        if self._ended:
            self._outcome.merged_after = merged - self._merged

    def _heard(self, mine: list[pb.LearnerStatus], steps: int, now: float) -> bool:
        """Returns whether all learners of the region have reported since the link was restored."""
        after_s = now - self._ended
        return steps > self._cut[0] and all(0 < each.last_seen_age_s < min(after_s, 1.0) for each in mine)


def _names() -> list[tuple[str, str]]:
    return [(region, f"{region}-{number + 1}") for region in REGIONS for number in range(EACH)]


def _settings(steps: int) -> list[str]:
    return ["--fragments", str(FRAGMENTS), "--total-tokens", str(steps * BATCH * CONTEXT)]


def _learner(name: str, region: str, address: str, seed: int) -> list[str]:
    return [
        *(*ATOLL, "learner", "--server", address, "--name", name, "--region", region, "--size", "tiny"),
        *("--batch", str(BATCH), "--seed", str(seed), "--device", "cpu"),
    ]


def _until(address: str, done: Callable[[pb.StatusReply], bool], learners: list[Child]) -> pb.StatusReply:
    """Requests the status once per second until `done`. Returns the last status, once nothing is pending.

    Raises SystemExit if a learner fails, or after MAX_RUN_S.
    """
    with grpc.insecure_channel(address) as channel:
        stub, deadline = rpc.OperatorStub(channel), time.monotonic() + MAX_RUN_S
        while time.monotonic() < deadline:
            status: pb.StatusReply = stub.Status(pb.StatusRequest(), timeout=ANSWER_S, wait_for_ready=True)
            for child in learners:
                if child.process.poll() not in {None, 0}:
                    raise SystemExit(f"{child.name} ended: {child.tail()}")
            if done(status):
                return settled(address)
            time.sleep(WATCH_S)
    raise SystemExit(f"the run did not end within {MAX_RUN_S:.0f} s: {learners[0].tail()}")


def _loss(address: str, place: Path) -> float:
    """Returns the validation loss of the published model."""
    path = place / "last.safetensors"
    with grpc.insecure_channel(address) as channel, path.open("wb") as file:
        for reply in rpc.OperatorStub(channel).ExportCheckpoint(pb.ExportCheckpointRequest()):
            file.write(reply.chunk)
    return loss_of_file(path, "tiny", None)


def main() -> None:
    """Measures and prints. Raises SystemExit if a front fetched more or less than one copy, or the cut did not end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of seeds; each has a run over regions and two over loopback"
    )
    parser.add_argument("--steps", type=int, default=1500, help="inner steps per run, summed over learners")
    parser.add_argument("--cut-steps", type=int, default=2000, help="inner steps of the run with a cut; 0: no such run")
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under = parser.parse_args(), conditions()
    found: dict[str, list[Outcome]] = {"regions": [], "loopback": [], "again": [], "cut": []}

    def keep(kind: str, outcome: Outcome) -> None:
        found[kind].append(outcome)
        _tell(kind, outcome)
        if arguments.json_path is not None:
            write_record(arguments.json_path, {k: list(map(asdict, v)) for k, v in found.items()}, under)

    for seed in range(arguments.seeds):
        keep("regions", over_regions(seed, arguments.steps, cut=False))
        keep("loopback", over_loopback(seed, arguments.steps))
        keep("again", over_loopback(seed, arguments.steps))
    if arguments.cut_steps:
        keep("cut", over_regions(0, arguments.cut_steps, cut=True))
        if found["cut"][0].pace is None:
            raise SystemExit("the run ended before the cut did: raise --cut-steps")
    for kind in ("regions", "again") if arguments.seeds else ():
        differences = [one.loss - other.loss for one, other in zip(found[kind], found["loopback"], strict=True)]
        print(f"loss, {kind} - loopback: {statistics.mean(differences):+.4f} {differences}")


def _tell(kind: str, one: Outcome) -> None:
    print(f"{kind}, seed {one.seed}: loss {one.loss:.4f}, {one.merged} merged, {one.seconds:.0f} s", flush=True)
    if one.copies:
        copies = ", ".join(f"{region} {share:.3f}" for region, share in one.copies.items())
        print(f"  copies by front: {copies}; link bytes, up and down: {one.link_bytes}", flush=True)
    if one.pace is not None:
        after = f"{one.merged_after} merged after the cut, {one.turned_away} turned away"
        print(f"  cut off: {one.pace:.2f} of the expected steps, {after}", flush=True)
    # The region that was cut off may fetch whole fragments in place of the updates that it missed.
    least = {region: 0.0 if one.pace is not None and region == REGIONS[-1] else COPIES[0] for region in one.copies}
    if any(not least[region] <= share <= COPIES[1] for region, share in one.copies.items()):
        raise SystemExit("a front did not fetch exactly one copy of each update: see the figures above")


if __name__ == "__main__":
    main()
