"""Trains a large model over several shards on this machine, with learners that hold one fragment at a time.

Every frame's checksum is checked on the way. After the last round, all shards are killed and started again, and each
fragment must have the same checksum as before.
python -m benchmarks.shards.large_model --parameters 1.2e9 --shards 2 --rounds 20 --json PATH
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import numpy as np
from atoll.demo.processes import Child, Children, children
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.layout.layout import MergeKind, TensorSpec
from atoll_wire.layout.tensor_header import header_bytes

from benchmarks.conditions import conditions, write_record
from benchmarks.data_plane.sync import cpu_s, peak_bytes
from benchmarks.shards.synthetic_learner import SyntheticLearner

FRAGMENTS, INNER_STEPS, COLUMNS = 24, 24, 4096
LEARNERS = ("a", "b")
CHUNK_VALUES = 1 << 22


@dataclass(frozen=True, slots=True)
class Shards:
    """The figures of a run. peak_bytes, cpu_s: by shard. sent_bytes, checked_bytes: payloads of all learners."""

    parameters: int
    shards: int
    rounds: int
    wall_s: float
    restart_s: float
    peak_bytes: list[int]
    cpu_s: list[float]
    sent_bytes: int
    checked_bytes: int
    bytes_up_a_parameter: float
    unchanged: bool


class Run:
    """A registrar with shard 0, and the other shards. They can be killed and started again."""

    def __init__(self, group: Children, place: Path, shards: int, init: Path) -> None:
        self._group = group
        self._place = place
        self._count = shards
        self._addresses = ["127.0.0.1:0"] * shards
        self.children: list[Child] = []
        options = ["--fragments", str(FRAGMENTS), "--inner-steps", str(INNER_STEPS), "--keep-snapshots", "2"]
        self._first = [*options, "--quorum", "100%", "--init", str(init)]

    def start(self) -> None:
        """Starts all shards, and waits until they serve."""
        self.children = []
        for number in range(self._count):
            options = ["--shard", f"{number}/{self._count}"]
            options += self._first if number == 0 else ["--registrar", self._addresses[0]]
            child = self._group.launch_core(
                f"shard{number}", self._place / f"shard{number}", self._addresses[number], options
            )
            self._addresses[number] = self._group.serving(child)
            self.children.append(child)

    @property
    def address(self) -> str:
        """The registrar's address."""
        return self._addresses[0]

    def kill(self) -> None:
        """Kills all shards with SIGKILL."""
        for child in self.children:
            child.kill()

    def status(self) -> pb.StatusReply:
        """Returns the run's status."""
        with grpc.insecure_channel(self.address) as channel:
            reply: pb.StatusReply = rpc.OperatorStub(channel).Status(
                pb.StatusRequest(), timeout=120.0, wait_for_ready=True
            )
            return reply

    def pause(self, reason: str) -> None:
        """Pauses the run, or resumes it if the reason is empty."""
        with grpc.insecure_channel(self.address) as channel:
            rpc.OperatorStub(channel).Pause(pb.PauseRequest(reason=reason), timeout=120.0)


def tensors_of(parameters: float) -> list[TensorSpec]:
    """Returns two tensors per fragment, with about this many parameters in total."""
    rows = max(1, round(parameters / (2 * FRAGMENTS) / COLUMNS))
    return [
        TensorSpec(f"layer.{number}.weight", (rows, COLUMNS), "bfloat16", MergeKind.DIRECTION)
        for number in range(2 * FRAGMENTS)
    ]


def write_model(path: Path, tensors: Sequence[TensorSpec]) -> None:
    """Writes random bfloat16 values between 1 and 2, without holding them all."""
    rng = np.random.default_rng(1)
    block = (rng.integers(0, 128, CHUNK_VALUES, np.uint16) | 0x3F80).astype("<u2").tobytes()
    with path.open("wb") as file:
        file.write(header_bytes([(each.name, "BF16", each.shape) for each in tensors])[0])
        for each in tensors:
            left = 2 * each.size
            while left:
                left -= file.write(block[: min(left, len(block))])


async def train(run: Run, tensors: Sequence[TensorSpec], rounds: int, step_s: float) -> list[SyntheticLearner]:
    """Trains until the run has this many merges. Then pauses the run, and waits until no contribution is pending."""
    learners = [SyntheticLearner(name, run.address, tensors, step_s) for name in LEARNERS]
    tasks = [asyncio.create_task(each.live()) for each in learners]
    told = 0
    while (status := await asyncio.to_thread(run.status)).merges < rounds:
        for each, task in zip(learners, tasks, strict=True):
            if each.error is not None or task.done():
                raise SystemExit(f"{each.name} failed: {each.error!r}") from (each.error or task.exception())
        if status.merges > told:
            told = status.merges
            print(f"{told} of {rounds} rounds", flush=True)
        await asyncio.sleep(1.0)
    await asyncio.to_thread(run.pause, "the benchmark ends")
    while (await asyncio.to_thread(run.status)).contributions.pending:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.5)
    await asyncio.sleep(2.0)  # time for the last updates to arrive
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return learners


def checksums(run: Run, tensors: Sequence[TensorSpec]) -> dict[int, tuple[int, int]]:
    """Returns each fragment's version, and its checksum as computed by its shard."""
    return asyncio.run(SyntheticLearner("auditor", run.address, tensors, 1.0).headers())


def measure(parameters: float, shards: int, rounds: int, step_s: float, place: Path) -> Shards:
    """Runs the benchmark in a folder, which needs about 30 bytes of disk per parameter."""
    tensors = tensors_of(parameters)
    count = sum(each.size for each in tensors)
    init = place / "model.safetensors"
    write_model(init, tensors)
    with children(place) as group:
        run = Run(group, place, shards, init)
        run.start()
        began = time.monotonic()
        learners = asyncio.run(train(run, tensors, rounds, step_s))
        wall_s = time.monotonic() - began
        merges = run.status().merges
        before = checksums(run, tensors)
        peaks, used = [peak_bytes(each) for each in run.children], [cpu_s(each) for each in run.children]
        run.kill()
        began = time.monotonic()
        run.start()
        restart_s = time.monotonic() - began
        unchanged = checksums(run, tensors) == before
        run.kill()
    sent, checked = sum(each.sent_bytes for each in learners), sum(each.checked_bytes for each in learners)
    up = sent / (len(LEARNERS) * merges * count / FRAGMENTS)
    return Shards(count, shards, merges, wall_s, restart_s, peaks, used, sent, checked, up, unchanged)


def main() -> None:
    """Measures, prints the figures, and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=1.2e9)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds per simulated inner step")
    parser.add_argument("--place", type=Path, help="folder for all files; default: a temporary folder")
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under = parser.parse_args(), conditions()
    with tempfile.TemporaryDirectory(dir=arguments.place) as folder:
        found = measure(arguments.parameters, arguments.shards, arguments.rounds, arguments.step_s, Path(folder))
    for number, (peak, used) in enumerate(zip(found.peak_bytes, found.cpu_s, strict=True)):
        share = found.parameters / found.shards
        print(
            f"shard {number}: peak {peak / 2**30:.2f} GiB = {(peak - (600 << 20)) / share:.1f} x {share:.3g} + 600 MiB"
        )
        print(f"shard {number}: {used:.1f} CPU seconds")
    print(f"{found.rounds} rounds in {found.wall_s:.0f} s; restart of all shards {found.restart_s:.1f} s")
    print(f"{found.bytes_up_a_parameter:.3f} bytes per parameter up; checksums unchanged: {found.unchanged}")
    if arguments.json_path is not None:
        write_record(arguments.json_path, asdict(found), under)
    if not found.unchanged:
        raise SystemExit("a fragment's checksum changed over the restart")


if __name__ == "__main__":
    main()
