"""`make simulate`: runs many seeds on all CPUs, and counts their events. Failing seeds are printed with their traces.

A seed succeeds, violates an invariant, or ends with another exception: a fault of the simulator or an unexpected crash.
Failures are reported with their seed, and other seeds continue.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.bookkeeping import Violation
from tests.simulation.loop import Dead
from tests.simulation.seed import simulate
from tests.simulation.sharded_world import ShardedWorld, simulate_sharded
from tests.simulation.world import World

BATCH = 25
LINES = 60  # lines printed of a failing seed's trace
MOST = 5  # limit on printed failing seeds


@dataclass
class Found:
    """The result of some seeds. violations: seed -> message, with the end of its trace. faults: seed -> traceback."""

    seeds: int = 0
    events: Counter[int] = field(default_factory=Counter)  # hundreds of events -> number of seeds
    counts: Counter[str] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)

    def add(self, other: Found) -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.counts += other.counts
        self.violations |= other.violations
        self.faults |= other.faults

    def bad(self) -> dict[int, str]:
        """Returns the message of each failure, by seed."""
        return self.violations | {seed: f"the simulator failed\n{text}" for seed, text in self.faults.items()}


@dataclass(frozen=True, slots=True)
class Kind:
    """What the runs have in common. sharded: they have several shards. data: all have a dataset, not only some."""

    sharded: bool = False
    data: bool = False

    def simulate(self, seed: int) -> World | ShardedWorld:
        world = simulate_sharded if self.sharded else simulate
        return world(seed, data=1.0) if self.data else world(seed)


ANY = Kind()


def run(seeds: list[int], kind: Kind = ANY) -> Found:
    """Runs some seeds in sequence, and continues after failures."""
    found = Found(seeds=len(seeds))
    gc.collect()
    gc.freeze()  # later collections then look only at a seed's objects
    gc.disable()
    for seed in seeds:
        try:
            world = kind.simulate(seed)
        except Violation as violation:
            world = violation.world  # type: ignore[attr-defined]
            found.violations[seed] = "\n".join([str(violation), *world.checks.trace[-LINES:]])
        except (Exception, Dead):
            found.faults[seed] = traceback.format_exc()
            continue
        found.events[world.network.events // 100] += 1
        found.counts.update(world.counts)
        found.counts.update(world.sums())
        del world
        gc.collect()
    gc.enable()
    return found


def many(first: int, count: int, kind: Kind) -> Iterator[Found]:
    """Runs seeds on all CPUs. Yields partial results."""
    batches = [list(range(at, min(at + BATCH, first + count))) for at in range(first, first + count, BATCH)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for batch, result in [(batch, pool.submit(run, batch, kind)) for batch in batches]:
            try:
                yield result.result()
            except BrokenProcessPool as error:  # a worker died, by a signal or for lack of memory
                text = f"a worker process died, perhaps because of one of the seeds {batch[0]} to {batch[-1]}: {error}"
                yield Found(faults={batch[0]: text})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--json", type=Path, help="write {seeds, events, crashes, partitions, violations, faults}")
    parser.add_argument("--shards", action="store_true", help="simulate runs with several shards")
    parser.add_argument("--data", action="store_true", help="simulate only runs whose learners lease data units")
    arguments = parser.parse_args()
    began, total, shown = time.monotonic(), Found(), 0
    for found in many(arguments.first, arguments.seeds, Kind(arguments.shards, arguments.data)):
        total.add(found)
        for seed, text in list(found.bad().items())[: max(0, MOST - shown)]:
            shown += 1
            print(f"\nseed {seed}: {text}\n", flush=True)
        seconds = time.monotonic() - began
        print(f"\r{total.seeds} seeds, {total.counts['events']} events, {_wrong(total)}, "
              f"{seconds:.0f} s", end="", file=sys.stderr, flush=True)  # fmt: skip
    print(file=sys.stderr)
    _show(total, time.monotonic() - began)
    if arguments.json is not None:
        crashes = sum(total.counts[f"{what} crashes"] for what in ("core", "registrar", "shard", "learner"))
        counted = {"seeds": total.seeds, "events": total.counts["events"], "crashes": crashes,
                   "partitions": total.counts["partitions"], "violations": len(total.violations),
                   "faults": len(total.faults)}  # fmt: skip
        arguments.json.write_text(json.dumps(counted | {"seconds": time.monotonic() - began}) + "\n")
    return 1 if total.bad() else 0


def _wrong(total: Found) -> str:
    return f"{len(total.violations)} violations, {len(total.faults)} simulator faults"


def _show(total: Found, seconds: float) -> None:
    print(f"{total.seeds} seeds in {seconds:.0f} s, {_wrong(total)} {sorted(total.bad())}")
    for what, count in sorted(total.counts.items()):
        print(f"  {what:32} {count:9} {count / total.seeds:9.2f} a seed")
    print("  events of a seed:")
    for hundreds in sorted(total.events):
        share = total.events[hundreds] / total.seeds
        print(f"    {100 * hundreds:5} to {100 * hundreds + 99:5}  {'#' * round(100 * share)} {total.events[hundreds]}")


if __name__ == "__main__":
    sys.exit(main())
