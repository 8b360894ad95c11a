"""The long form: `make fuzz INPUTS=1000000`. A finding is printed with what replays it: a seed gives one input.

python -m tests.fuzz.run --inputs N [--json PATH] | --replay TARGET:SEED
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from tests.fuzz.core_calls import Calls
from tests.fuzz.decoders import Frames, Layouts, TensorFiles
from tests.fuzz.learner_ears import Ears

BATCH = 2500  # inputs of one target in a row; a finding ends it
MOST_MEMORY_BYTES = 2 << 30  # of address space beyond what a process has at its start


class Target(Protocol):
    """Something that decodes."""

    def one(self, rng: random.Random) -> None:
        """Makes one input and feeds it in. Raises for whatever is not declared."""


TARGETS: dict[str, tuple[Callable[[], Target], float]] = {  # with their shares of the inputs
    "frames": (Frames, 0.6),
    "layouts": (Layouts, 0.05),
    "tensor files": (TensorFiles, 0.1),
    "calls of a core": (Calls, 0.175),
    "calls of a core without parameters": (partial(Calls, initialised=False), 0.025),
    "what a learner hears": (Ears, 0.05),
}


def feed(name: str, first: int, count: int) -> str:
    """Inputs `first` and on of a target; what was found, or nothing. Replays: `feed(name, seed, 1)`."""
    quiet()
    target = TARGETS[name][0]()
    for seed in range(first, first + count):
        try:
            target.one(random.Random(f"{name} {seed}"))
        except Exception:
            return f"{name}:{seed} (in a row that began at {first})\n{traceback.format_exc()}"
    return ""


def quiet() -> None:
    """No logs, and no memory without end."""
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    status = Path("/proc/self/statm").read_text().split()
    most = int(status[0]) * resource.getpagesize() + MOST_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--replay", help="TARGET:SEED or TARGET:SEED:COUNT, from a finding")
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments = parser.parse_args()
    if arguments.replay:
        name, seed, *count = arguments.replay.split(":")
        found = feed(name, int(seed), int(count[0]) if count else 1)
        print(found or "nothing found")
        return 1 if found else 0
    began, fed, findings, said = time.monotonic(), Counter[str](), [], 0.0
    with ProcessPoolExecutor() as pool:
        waiting = {}
        for name, (_, share) in TARGETS.items():
            for first in range(0, round(share * arguments.inputs), BATCH):
                count = min(BATCH, round(share * arguments.inputs) - first)
                waiting[pool.submit(feed, name, arguments.first + first, count)] = name, count
        for done in as_completed(waiting):
            name, count = waiting[done]
            fed[name] += count
            if done.result():
                findings.append(done.result())
                print(done.result(), flush=True)
            if time.monotonic() - said > 10:
                said = time.monotonic()
                print(f"[{said - began:4.0f} s] {fed.total():,} inputs, {len(findings)} findings", flush=True)
    for name, count in fed.items():
        print(f"{count:10,}  {name}")
    print(f"{fed.total():10,}  inputs, {len(findings)} findings, {time.monotonic() - began:.0f} s")
    if arguments.json_path is not None:
        arguments.json_path.write_text(json.dumps({"inputs": fed, "findings": findings}) + "\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
