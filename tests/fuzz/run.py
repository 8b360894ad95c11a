"""The long form of fuzzing: `make fuzz INPUTS=1000000`. It prints each finding with the argument that replays it.

python -m tests.fuzz.run --inputs N [--json PATH] | --replay TARGET:SEED
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sys
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import structlog
from atoll_server.merging import merge

from tests.fuzz.call_limits import CallLimits
from tests.fuzz.core_calls import Calls
from tests.fuzz.decoders import Frames, Layouts
from tests.fuzz.initial_parameters import InitialParameters
from tests.fuzz.learner_inputs import Ears
from tests.fuzz.model_folders import ModelFolders
from tests.fuzz.watch import Greed, Hang, Target, first_of_row, generator, in_time

BATCH = 2500  # inputs of one target in one process; a finding ends it
MEASURED = 20  # one in this many batches traces its memory, which is slow
MAX_MEMORY_BYTES = 2 << 30  # address space that a process may add after its start

TARGETS: dict[str, tuple[Callable[[], Target], float]] = {  # name -> target and its share of the inputs
    "frames": (Frames, 0.5),
    "layouts": (Layouts, 0.05),
    "initial parameters": (InitialParameters, 0.075),
    "model folders": (ModelFolders, 0.025),
    "door": (CallLimits, 0.1),
    "calls of a core": (Calls, 0.175),
    "calls of a core without parameters": (partial(Calls, initialised=False), 0.025),
    "what a learner hears": (Ears, 0.05),
}


def feed(name: str, first: int, stop: int) -> tuple[str, int]:
    """Runs a target on the inputs from `first` to below `stop`, in whole rows.

    Returns the finding, or an empty string, and the number of answered inputs.
    """
    make, answered = TARGETS[name][0], 0
    target, seed = make(), first
    row = target.row
    try:
        for seed in range(first, stop):
            if seed > first and seed % row == 0 and row > 1:
                target.close()
                target = make()
            try:
                with in_time():
                    answered += target.one(generator(name, seed))
            except Greed:
                # The row is repeated, because memory that a process allocates only once, such as a library's, must not
                # count.
                target.close()
                target = make()
                for again in range(max(first, first_of_row(row, seed)), seed + 1):
                    with in_time():
                        target.one(generator(name, again))
        target.close()
    except (Exception, Hang):
        return f"{name}:{seed}\n{traceback.format_exc()}", answered
    return "", answered


def fed_quietly(name: str, first: int, stop: int) -> tuple[str, int]:
    """Runs `feed` in a worker process, without logs and with limited memory."""
    quiet()
    merge.warm_up()  # else the first input's memory would include the kernels
    return feed(name, first, stop)


def quiet() -> None:
    """Switches off logs, and limits this process's memory."""
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    status = Path("/proc/self/statm").read_text().split()
    most = int(status[0]) * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--replay", help="TARGET:SEED of a finding; repeats its row up to this seed")
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments = parser.parse_args()
    if arguments.replay:
        name, seed = arguments.replay.split(":")
        quiet()
        merge.warm_up()
        tracemalloc.start()
        found, _ = feed(name, first_of_row(TARGETS[name][0]().row, int(seed)), int(seed) + 1)
        print(found or "nothing found")
        return 1 if found else 0
    began, said = time.monotonic(), 0.0
    fed, answered, findings = Counter[str](), Counter[str](), []
    with ProcessPoolExecutor() as pool, ProcessPoolExecutor(1, initializer=tracemalloc.start) as measured:
        waiting = {}
        for name, (_, share) in TARGETS.items():
            stop = arguments.first + round(share * arguments.inputs)
            for first in range(arguments.first, stop, BATCH):
                end = min(stop, first + BATCH)
                where = measured if (first - arguments.first) // BATCH % MEASURED == 0 else pool
                waiting[where.submit(fed_quietly, name, first, end)] = name, end - first
        for done in as_completed(waiting):
            name, count = waiting[done]
            found, sound = done.result()
            fed[name] += count
            answered[name] += sound
            if found:
                findings.append(found)
                print(found, flush=True)
            if time.monotonic() - said > 10:
                said = time.monotonic()
                print(f"[{said - began:4.0f} s] {fed.total():,} inputs, {len(findings)} findings", flush=True)
    for name, count in fed.items():
        print(f"{count:10,}  {name} ({answered[name] / count:.0%} valid enough to be accepted)")
    print(f"{fed.total():10,}  inputs, {len(findings)} findings, {time.monotonic() - began:.0f} s")
    if arguments.json_path is not None:
        found = {"inputs": fed, "taken": answered, "findings": findings, "seconds": round(time.monotonic() - began)}
        arguments.json_path.write_text(json.dumps(found) + "\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
