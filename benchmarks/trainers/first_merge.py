"""Measures when an example's first work is merged: python -m benchmarks.trainers.first_merge [--json PATH].

Each example runs alone with a new core. It needs the packages that the first lines of the examples list.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from atoll.demo.processes import Child, children
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc

from benchmarks.conditions import conditions, write_record

FOLDER = Path(__file__).parents[2] / "examples"
OPTIONS = ["--fragments", "4", "--inner-steps", "8"]
EXAMPLES = ("plain_loop", "hf_trainer", "lightning_module", "accelerate_loop", "lora_adapters", "data_units", "gpt")
WITH_RANKS = ("torchrun_ddp", "torchrun_fsdp2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TRAINERS = ("transformers", "accelerate", "lightning", "peft")
LONGEST_S, ASK_EVERY_S, ANSWER_S = 120.0, 0.05, 20.0


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one example, in seconds since its start."""

    example: str
    joined_s: float
    merged_s: float


def measured(example: str) -> Times:
    """Starts a core and an example. Raises SystemExit if the example ends or takes too long before its first merge."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        core, address = group.start_core(Path(directory) / "run", "127.0.0.1:0", OPTIONS)
        launcher = TORCHRUN if example in WITH_RANKS else ()
        script = str(FOLDER / f"{example}.py")
        command = [sys.executable, *launcher, script, "--server", address, "--name", "eu-west"]
        with grpc.insecure_channel(address) as channel:
            stub = rpc.OperatorStub(channel)
            began = time.monotonic()
            child = group.start(example, command)
            joined_s = _until(lambda: bool(_status(stub).learners), child, began)
            merged_s = _until(lambda: _status(stub).contributions.merged > 0, child, began)
        group.stop(child)
        group.stop(core)
    return Times(example, joined_s, merged_s)


def _status(stub: rpc.OperatorStub) -> pb.StatusReply:
    reply: pb.StatusReply = stub.Status(pb.StatusRequest(), timeout=ANSWER_S, wait_for_ready=True)
    return reply


def _until(found: Callable[[], bool], child: Child, began: float) -> float:
    while not found():
        passed_s = time.monotonic() - began
        if child.process.poll() is not None or passed_s > LONGEST_S:
            raise SystemExit(f"{child.log.name} merged nothing in {passed_s:.0f} s:\n{child.log.read_text()}")
        time.sleep(ASK_EVERY_S)
    return time.monotonic() - began


def _versions() -> Iterator[tuple[str, str]]:
    for name in TRAINERS:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise SystemExit(f"{name} is missing: run this in an environment with {', '.join(TRAINERS)}") from error


def main() -> None:
    """Measures each example, and prints its times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, versions, under = parser.parse_args(), dict(_versions()), conditions()
    rows = []
    for example in (*EXAMPLES, *WITH_RANKS):
        rows.append(measured(example))
        print(f"{example}: joined after {rows[-1].joined_s:.1f} s, first merge after {rows[-1].merged_s:.1f} s")
    if arguments.json_path is not None:
        write_record(arguments.json_path, {"examples": [asdict(each) for each in rows]} | {"trainers": versions}, under)


if __name__ == "__main__":
    main()
