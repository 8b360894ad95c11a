"""Kills learners that train on leased data units, and checks that each unit is consumed once.

Each learner logs the units that it begins. After the run, this program computes from the ledger's rows which units are
consumed, and compares the result with the core's accounts and with the dataset.

python -m benchmarks.failures.data_units --units 10000 --every-s 30 --json PATH
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
from atoll.demo.processes import Child, Children, DemoError, children
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc

from benchmarks.conditions import conditions, write_record
from benchmarks.failures.core_kills import ask
from benchmarks.failures.unit_learner import BATCH_ROWS, UNIT_ROWS

NAMES = ("a", "b", "c", "d")
INNER_STEPS, OVERLAP = 8, 4  # H and tau
OPTIONS = ["--fragments", "4", "--inner-steps", str(INNER_STEPS), "--overlap", str(OVERLAP)]
# Above the longest pause of a busy machine: if a silent learner comes back, its units are trained twice. Below END_S: a
# learner whose farewell is lost keeps its units until then.
SILENCE = ("--limit-units-silence-s", "90")
END_S = 240.0  # limit on the time until every unit is consumed, after the last kill, and on the time without progress
LOOK_S = 0.1  # seconds between two looks at the learners
ROUNDING = 1e-6  # of a unit


class Job:
    """The learner processes of a run.

    status: returns the run's status. ledgers: of all shards. pace_s: pause in each step. children: the newest process
    of each learner. kills: (seconds, learner) of each kill, since the first start.
    """

    def __init__(
        self, group: Children, address: str, status: Callable[[], pb.StatusReply], ledgers: Sequence[Path], log: Path,
        *, units: int, epochs: int, pace_s: float,
    ) -> None:  # fmt: skip
        self._group, self._address = group, address
        self.status, self.ledgers, self.log = status, ledgers, log
        self.units, self.epochs, self.pace_s = units, epochs, pace_s
        self.children: dict[str, Child] = {}
        self.lives = 0
        self.kills: list[tuple[float, str]] = []
        self._began = time.monotonic()

    def start(self, name: str) -> None:
        """Starts a process of a learner."""
        self.lives += 1
        command = [sys.executable, "-m", "benchmarks.failures.unit_learner", self._address, name]
        command += [str(self.units), str(self.epochs), str(self.log), str(self.pace_s)]
        self.children[name] = self._group.start(f"learner-{name}-{self.lives}", command)

    def kill(self, name: str) -> None:
        """Kills a learner that still runs, and starts it again."""
        if self.children[name].process.poll() is None:
            self.children[name].kill()
            self.kills.append((round(time.monotonic() - self._began, 1), name))
        self.start(name)

    def check(self) -> None:
        """Raises DemoError if a learner ended with an error."""
        for child in self.children.values():
            if child.process.poll():
                raise DemoError(f"{child.name} ended with status {child.process.returncode}: {child.tail()}")

    def ended(self) -> bool:
        """Returns whether all learners have left without an error."""
        return all(child.process.poll() == 0 for child in self.children.values())

    def merges(self) -> Counter[tuple[str, int]]:
        """Returns the number of merged contributions by learner and fragment."""
        found: Counter[tuple[str, int]] = Counter()
        for ledger in self.ledgers:
            with sqlite3.connect(ledger) as db:
                found.update(db.execute("SELECT learner, fragment FROM contributions WHERE fate='merged'"))
        return found

    def complete(self) -> bool:
        """Returns whether every unit is consumed. Starts a learner again if units returned after the last one left."""
        status = self.status()
        (found,) = status.datasets
        if found.consumed == self.units * self.epochs:
            return True
        if not status.contributions.pending and self.ended() and found.returned:
            self.start(NAMES[0])  # a learner's last work was dropped when it left
        return False


@dataclass(frozen=True, slots=True)
class Account:
    """The units of a run, as the core counts them, and as the ledger's rows and the learners' logs show them.

    merged: merged work on all leases' units, in units. wrong: number of units that were consumed a certain number of
    times other than once, by that number. begun: number of units that a learner began, with repetitions.
    """

    units: int
    epochs: int
    consumed: int
    leased: int
    returned: int
    repeated: float
    lost: float
    merged: float
    begun: int
    wrong: dict[int, int] = field(default_factory=dict)
    foreign: list[tuple[int, int]] = field(default_factory=list)  # epochs and numbers that the dataset does not have

    def faults(self) -> list[str]:
        """Returns what contradicts the rules, in words."""
        total, found = self.units * self.epochs, list[str]()
        if (self.consumed, self.leased, self.returned) != (total, 0, 0):
            found.append(
                f"{self.consumed} of {total} units are consumed, {self.leased} leased, {self.returned} returned"
            )
        if self.wrong or self.foreign:
            found.append(f"units consumed N times: {self.wrong}; units that the dataset lacks: {self.foreign[:5]}")
        if abs(self.merged - (self.consumed + self.repeated - self.lost)) > ROUNDING * total:
            found.append(f"{self.merged} units of merged work, but {self.repeated} repeated and {self.lost} lost")
        return found


def account(job: Job) -> Account:
    """Returns the account of a run whose learners have ended."""
    status = job.status()
    (found,) = status.datasets
    parts = merged_parts(job.ledgers, {each.fragment: each.parameters for each in status.fragments})
    consumed = {(epoch, unit): 0 for epoch in range(job.epochs) for unit in range(job.units)}
    foreign, begun = [], [tuple(map(int, line.split())) for line in job.log.read_text().splitlines()]
    for lease, ordinal, epoch, unit in begun:
        if (epoch, unit) not in consumed:
            foreign.append((epoch, unit))
        else:
            consumed[epoch, unit] += 2 * parts[lease, ordinal] >= status.parameters
    wrong: dict[int, int] = defaultdict(int)
    for count in consumed.values():
        if count != 1:
            wrong[count] += 1
    merged = sum(parts.values()) / status.parameters
    counts = (found.consumed, found.leased, found.returned, found.repeated, found.lost)
    return Account(job.units, job.epochs, *counts, merged, len(begun), dict(wrong), foreign)


def merged_parts(ledgers: Sequence[Path], lengths: dict[int, int]) -> dict[tuple[int, int], int]:
    """Returns, by lease and ordinal, the number of parameters with merged work on the unit.

    lengths: number of parameters of each fragment.
    """
    found: dict[tuple[int, int], int] = defaultdict(int)
    for ledger in ledgers:
        with sqlite3.connect(ledger) as db:
            rows = db.execute("SELECT fragment, units FROM contributions WHERE fate='merged'").fetchall()
        for fragment, units in rows:
            for lease, after, upto in json.loads(units):
                for ordinal in range(after + 1, upto + 1):
                    found[lease, ordinal] += lengths[fragment]
    return found


def bound(kills: int) -> float:
    """Returns the limit on repeated work, in units: each kill repeats at most H + tau steps."""
    return kills * (INNER_STEPS + OVERLAP) * BATCH_ROWS / UNIT_ROWS


def main() -> int:
    """Runs the job and prints its figures. Returns 1 if a rule or the bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=10_000)
    parser.add_argument("--every-s", type=float, default=30.0, help="seconds between two kills")
    parser.add_argument("--pace-s", type=float, default=0.12, help="pause in each step of a learner")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under = parser.parse_args(), conditions()
    with tempfile.TemporaryDirectory() as place, children(Path(place)) as group:
        found = run(group, Path(place), arguments)
    print(json.dumps(found, indent=2))
    if arguments.json_path is not None:
        write_record(arguments.json_path, found, under)
    return 1 if found["faults"] else 0


def run(group: Children, directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one run."""
    core, address = group.start_core(directory / "run", "127.0.0.1:0", [*OPTIONS, *SILENCE])
    rng, began = random.Random(arguments.seed), time.monotonic()  # noqa: S311 - dice
    with grpc.insecure_channel(address) as channel:
        stub = rpc.OperatorStub(channel)
        job = Job(
            group, address, lambda: ask(stub), [directory / "run" / "ledger.sqlite"], directory / "begun",
            units=arguments.units, epochs=1, pace_s=arguments.pace_s,
        )  # fmt: skip
        for name in NAMES:
            job.start(name)
        consumed, grown_at = 0, began
        while not any(child.process.poll() == 0 for child in job.children.values()):
            now = time.monotonic()
            if now - began >= arguments.every_s * (len(job.kills) + 1):
                job.kill(rng.choice(NAMES))
                found = job.status().datasets
                counted = ", ".join(f"{each.consumed} consumed, {each.repeated:.1f} repeated" for each in found)
                print(f"{job.kills[-1][0]:.0f} s: {job.kills[-1][1]} killed: {counted}", flush=True)
                before, consumed = consumed, sum(each.consumed for each in found)
                grown_at = now if consumed > before else grown_at
                if now - grown_at > END_S:
                    raise DemoError(f"no unit was consumed for {now - grown_at:.0f} s: see the core's log")
            job.check()
            time.sleep(LOOK_S)
        deadline = time.monotonic() + END_S
        while not job.complete() and time.monotonic() < deadline:  # otherwise the account shows what is missing
            job.check()
            time.sleep(LOOK_S)
        seconds = time.monotonic() - began
        counts = account(job)
    group.stop(core)
    faults = counts.faults()
    if counts.repeated > bound(len(job.kills)):
        faults.append(f"{counts.repeated} units are repeated, more than {bound(len(job.kills))}")
    return {
        "learners": len(NAMES),
        "seed": arguments.seed,
        "seconds": round(seconds, 1),
        "kills": job.kills,
        "processes": job.lives,
        "repeated_bound": bound(len(job.kills)),
        "account": asdict(counts),
        "faults": faults,
    }


if __name__ == "__main__":
    sys.exit(main())
