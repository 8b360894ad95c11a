"""Measures the paper's twenty-fold speed-up. Needs root.

python -m benchmarks.narrow_links [--json PATH] [--plot PATH] [--gbit 2 5]

Four regions have one learner each; the core is at home. The claim assumes 12B parameters, steps of 3 s, and links of
R Gbit/s and 40 ms each way. Here, a step of n parameters takes `--step-s`. Links have R x (n / 12e9) x (3 s / step),
and delays are scaled like steps. Model, batches, step length and links are the same for DistributedDataParallel on gloo
and for Atoll with the settings of `atoll plan`. DistributedDataParallel uses its best bucket size and hook at each
rate. Below 20 Gbit/s, it uses the best ones at 20 Gbit/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import grpc
import torch
from atoll.demo.processes import ATOLL, Child, children
from atoll.reference import data
from atoll.reference.model import SIZES, build
from atoll.reference.train import loss_of_file, validation_loss
from atoll_forecast.planning.job import Job, Region
from atoll_forecast.planning.planner import plan
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc

from benchmarks.conditions import conditions, write_record
from benchmarks.links.sites import Sites, sites
from benchmarks.narrow_links.pace import PAPER_STEP_S, SEED, SIZE, tokens_of_step

NAMES = ("eu", "us", "ap", "sa")
DELAY_MS = 40.0  # one way, with steps of 3 s
PAPER_PARAMETERS = 12e9
PORT, MEET = 7070, 29_500
OPTIONS = [(hook, bucket) for hook in ("bf16", "fp16", "none") for bucket in (0.25, 1.0, 25.0)]
TRIED, LEFT_OUT = 6, 1  # number of steps to try each option; number of first steps that do not count
QUICK_GBIT = 20.0  # options are tried at this rate, or at the measured rate if that is higher
STALL_S = 600.0  # if no learner takes a step for this long, the run is stuck
EXPORT_S = 5.0  # time between two exports


@dataclass(frozen=True, slots=True)
class Run:
    """One method at one rate. utilisation: share of the time in steps. up_bits_s, down_bits_s: over the busiest link.

    gbit: the rate of the claim. mbit: the scaled rate. predicted: by `atoll plan`, only for Atoll. loss_at: (seconds
    since the first step, validation loss).
    """

    method: str
    gbit: float
    mbit: float
    steps: int
    step_s: float
    tokens_s: float
    utilisation: float
    up_bits_s: float
    down_bits_s: float
    options: str
    predicted: dict[str, float]
    loss_at: list[tuple[float, float]]


def link_mbit(gbit: float, parameters: int, step_s: float) -> float:
    """Returns the scaled link rate in Mbit/s.

    It gives as many bits per parameter per step as 12B parameters have at `gbit` with steps of 3 s.
    """
    return gbit * 1e3 * parameters / PAPER_PARAMETERS * PAPER_STEP_S / step_s


def delay_ms(step_s: float) -> float:
    """Returns the scaled one-way delay in ms: the same share of a step as in the claim."""
    return DELAY_MS * step_s / PAPER_STEP_S


def data_parallel(gbit: float, mbit: float, step_s: float, steps: int, hook: str, bucket: float, save: bool) -> Run:
    """Trains for `steps` steps with DistributedDataParallel. save: whether to evaluate the resulting model."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        path = Path(directory)
        with sites(group, path, NAMES, mbit, delay_ms(step_s)) as place:
            ranks = []
            for number, (name, namespace) in enumerate(place.names.items()):
                words = [
                    *("env", f"GLOO_SOCKET_IFNAME={place.device(number)}"),
                    *(sys.executable, "-m", "benchmarks.narrow_links.ddp_rank"),
                    *("--number", str(number), "--ranks", str(len(NAMES)), "--steps", str(steps)),
                    *("--step-s", str(step_s), "--hook", hook, "--bucket-mb", str(bucket)),
                    *("--meet", f"{place.address(0)}:{MEET}", "--record", str(path / f"{name}.steps")),
                ]
                more = ["--save", str(path / "model")] if save and not number else []
                ranks.append(group.start(name, place.inside(namespace, [*words, *more])))
            rates = _watched(place, path, ranks, steps)
            times = [_steps(path / f"{name}.steps") for name in NAMES]
        loss_at = [(_seconds(times), _loss_of_state(path / "model"))] if save else []
    return _run("data-parallel", gbit, mbit, step_s, times, rates, f"{hook}, buckets of {bucket:g} MB", {}, loss_at)


def atoll(gbit: float, mbit: float, step_s: float, steps: int, parameters: int, exports: bool) -> Run:
    """Trains each learner for `steps` steps with Atoll.

    exports: whether to evaluate the published model every EXPORT_S seconds.
    """
    regions = tuple(Region(name, 1, mbit * 1e6, 2 * delay_ms(step_s) / 1e3) for name in NAMES)
    planned = plan(Job(parameters, step_s, regions))
    predicted = {
        "inner_steps": planned.settings.inner_steps,
        "overlap_steps": planned.settings.overlap_steps,
        "utilisation": planned.atoll.utilisation,
        "up_bits_s": planned.carried[0].up_bits_s,
        "down_bits_s": planned.carried[0].down_bits_s,
    }
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        path = Path(directory)
        with sites(group, path, NAMES, mbit, delay_ms(step_s)) as place:
            operator = f"unix:{path}/core"
            settings = planned.settings
            core_command = [
                *(*ATOLL, "core", "--listen", f"0.0.0.0:{PORT}", "--listen", operator, "--dir", str(path / "run")),
                *("--inner-steps", str(settings.inner_steps), "--overlap", f"{settings.overlap_steps:g}"),
                "--insecure-plaintext",
            ]
            core = group.start("core", place.inside(place.home, core_command), piped=True)
            group.serving(core)
            learners = []
            for number, (name, namespace) in enumerate(place.names.items()):
                words = [
                    *(sys.executable, "-m", "benchmarks.narrow_links.learner", "--number", str(number)),
                    *("--steps", str(steps), "--step-s", str(step_s)),
                    *("--server", f"{place.home_address(number)}:{PORT}", "--record", str(path / f"{name}.steps")),
                ]
                learners.append(group.start(name, place.inside(namespace, words)))
            export = _Exports(operator, path) if exports else None
            rates = _watched(place, path, learners, steps, export)
            times = [_steps(path / f"{name}.steps") for name in NAMES]
        first = min(rank[0][0] for rank in times)
        found = export.found if export is not None else []
        loss_at = [(at - first, loss_of_file(file, SIZE, None)) for at, file in found]
    return _run("Atoll", gbit, mbit, step_s, times, rates, "", predicted, loss_at)


def _run(
    method: str,
    gbit: float,
    mbit: float,
    step_s: float,
    times: list[list[tuple[float, float]]],
    rates: list[tuple[float, float]],
    options: str,
    predicted: dict[str, float],
    loss_at: list[tuple[float, float]],
) -> Run:
    counted = [rank[LEFT_OUT:] for rank in times]
    seconds = [rank[-1][1] - rank[0][0] for rank in counted]
    steps = min(map(len, counted))
    median = statistics.median(end - begin for rank in counted for begin, end in rank)
    return Run(
        method,
        gbit,
        mbit,
        len(times[0]),
        median,
        sum(len(rank) * tokens_of_step() / s for rank, s in zip(counted, seconds, strict=True)),
        steps * step_s / max(seconds),
        max(up for up, _ in rates),
        max(down for _, down in rates),
        options,
        predicted,
        loss_at,
    )


def _seconds(times: list[list[tuple[float, float]]]) -> float:
    """Returns the seconds from the beginning of the first step to the end of the last one."""
    return max(rank[-1][1] for rank in times) - min(rank[0][0] for rank in times)


def _steps(record: Path) -> list[tuple[float, float]]:
    return [(begin, end) for _, begin, end, _ in map(json.loads, record.read_text().splitlines())]


def _watched(
    place: Sites, path: Path, ranks: Sequence[Child], steps: int, export: _Exports | None = None
) -> list[tuple[float, float]]:
    """Waits until all processes have ended.

    Returns (up, down) bits per second for each site's link, while all processes train.
    """
    records = [path / f"{name}.steps" for name in NAMES]
    newest, moved_at = 0, time.monotonic()
    seen: list[tuple[float, list[tuple[int, int]]]] = []
    while any(child.process.poll() is None for child in ranks):
        _look(ranks)
        done = [record.read_text().count("\n") if record.exists() else 0 for record in records]
        if sum(done) > newest:
            newest, moved_at = sum(done), time.monotonic()
        if time.monotonic() - moved_at > STALL_S:
            raise SystemExit(f"no learner took a step in {STALL_S:.0f} s (steps so far: {done}): {ranks[0].tail()}")
        if (not seen and min(done) > LEFT_OUT) or (len(seen) == 1 and max(done) >= steps):
            both = [json.loads(counts.read_text()) for counts in place.counts.values()]
            seen.append((time.monotonic(), [(up, down) for down, up in both]))  # the first end belongs to home
        if export is not None and len(seen) == 1:
            export.look()
        time.sleep(0.1)
    _look(ranks)
    (began, first), (ended, last) = seen
    seconds = ended - began
    return [(8 * (up - u) / seconds, 8 * (down - d) / seconds) for (up, down), (u, d) in zip(last, first, strict=True)]


class _Exports:
    """Exports the published model every EXPORT_S seconds. found: (monotonic seconds, file)."""

    def __init__(self, operator: str, path: Path) -> None:
        self._operator = operator
        self._path = path
        self.found: list[tuple[float, Path]] = []

    def look(self) -> None:
        """Exports the model if the last export is EXPORT_S seconds old."""
        if self.found and time.monotonic() - self.found[-1][0] < EXPORT_S:
            return
        file = self._path / f"{len(self.found)}.safetensors"
        with grpc.insecure_channel(self._operator) as channel:
            stub = rpc.OperatorStub(channel)
            file.write_bytes(b"".join(r.chunk for r in stub.ExportCheckpoint(pb.ExportCheckpointRequest())))
        self.found.append((time.monotonic(), file))


def _loss_of_state(file: Path) -> float:
    model = build(SIZE, SEED)
    model.load_state_dict(torch.load(file, weights_only=True))
    return validation_loss(model, data.load(None, SIZES[SIZE].context))


def _look(ranks: Sequence[Child]) -> None:
    for child in ranks:
        if child.process.poll() not in {None, 0}:
            raise SystemExit(f"{child.name} ended: {child.tail()}")


def _trials(gbit: float, mbit: float, step_s: float) -> list[Run]:
    """Tries every hook with every bucket size on this link, for TRIED steps each."""
    found = []
    for hook, bucket in OPTIONS:
        found.append(data_parallel(gbit, mbit, step_s, TRIED, hook, bucket, save=False))
        print(f"  {hook}, {bucket:g} MB: {found[-1].step_s:.2f} s per step", flush=True)
    return found


def main() -> None:
    """Measures, prints, and writes the results after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=float, nargs="+", default=[2.0, 5.0, 20.0, 50.0, 125.0])
    parser.add_argument("--step-s", type=float, default=0.25)
    parser.add_argument("--steps", type=int, default=30, help="number of DistributedDataParallel's steps at each rate")
    parser.add_argument(
        "--minutes",
        type=float,
        default=20.0,
        help="minutes for which DistributedDataParallel trains at the first rate, to measure its loss",
    )
    parser.add_argument("--atoll-steps", type=int, default=480)
    parser.add_argument("--alone", type=float, nargs="*", default=[], help="rates in Gbit/s at which only Atoll trains")
    parser.add_argument("--json", type=Path, dest="json_path", required=True)
    parser.add_argument("--plot", type=Path)
    options, under = parser.parse_args(), conditions()
    if options.plot is not None:
        from benchmarks.narrow_links import plots  # noqa: PLC0415 - --help needs no matplotlib; import errors show before an hour of work
    parameters = sum(p.numel() for p in build(SIZE, SEED).parameters())
    runs, trials = list[Run](), list[Run]()

    def keep(run: Run) -> None:
        runs.append(run)
        print(
            f"{run.method}, {run.gbit:g} Gbit/s ({run.mbit:.2f} Mbit/s here): {run.tokens_s:.0f} tokens/s, "
            f"utilisation {run.utilisation:.3f}, {run.up_bits_s / 1e6:.2f} Mbit/s up, {run.down_bits_s / 1e6:.2f} "
            f"down {run.options}",
            flush=True,
        )
        made = {"runs": [asdict(each) for each in runs], "trials": [asdict(each) for each in trials]}
        write_record(options.json_path, made, under)

    @cache
    def best(gbit: float) -> tuple[str, float]:
        found = _trials(gbit, link_mbit(gbit, parameters, options.step_s), options.step_s)
        trials.extend(found)
        return min(zip(OPTIONS, found, strict=True), key=lambda each: each[1].step_s)[0]

    for gbit in options.alone:
        mbit = link_mbit(gbit, parameters, options.step_s)
        keep(atoll(gbit, mbit, options.step_s, options.atoll_steps, parameters, exports=False))
    for number, gbit in enumerate(options.gbit):
        mbit = link_mbit(gbit, parameters, options.step_s)
        keep(atoll(gbit, mbit, options.step_s, options.atoll_steps, parameters, exports=not number))
        hook, bucket = best(max(gbit, QUICK_GBIT))
        steps = options.steps
        if not number:
            tried = data_parallel(gbit, mbit, options.step_s, TRIED, hook, bucket, save=False).step_s
            steps = max(steps, round(60 * options.minutes / tried))
        keep(data_parallel(gbit, mbit, options.step_s, steps, hook, bucket, save=not number))
    if options.plot is not None:
        plots.curve([asdict(each) for each in runs], options.plot)


if __name__ == "__main__":
    main()
