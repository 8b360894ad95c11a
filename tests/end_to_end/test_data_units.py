"""Processes train on leased units, and are killed: each unit of each epoch is consumed exactly once."""

from __future__ import annotations

import json
import random
import sqlite3
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from atoll.demo.processes import Child

from tests.end_to_end.world import Core, core, eventually

NAMES = ("a", "b", "c")
SILENCE = ("--limit-units-silence-s", "20")  # else a learner that ends on a busy machine may keep its lease


class Job:
    """One run's learner processes. shards: the run's other shards. kills: number of killed learners.

    pace_s: pause in each step.
    """

    def __init__(
        self, running: Core, log: Path, shards: Sequence[Core] = (), *, units: int = 400, epochs: int = 2,
        pace_s: float = 0.004,
    ) -> None:  # fmt: skip
        self.running, self.log = running, log
        self.units, self.epochs, self.pace_s = units, epochs, pace_s
        self.ledgers = [each.directory / "ledger.sqlite" for each in (running, *shards)]
        self.children: dict[str, Child] = {}
        self.lives = 0
        self.kills = 0

    def start(self, name: str) -> None:
        self.lives += 1
        command = [sys.executable, "-m", "tests.end_to_end.data_learner", self.running.address, name]
        command += [str(self.units), str(self.epochs), str(self.log), str(self.pace_s)]
        self.children[name] = self.running.group.start(f"learner-{name}-{self.lives}", command)

    def kill(self, name: str) -> None:
        if self.children[name].process.poll() is None:
            self.children[name].kill()
            self.kills += 1
        self.start(name)

    def ended(self) -> bool:
        return all(child.process.poll() == 0 for child in self.children.values())


def merged_parts(ledgers: Sequence[Path], lengths: dict[int, int]) -> dict[tuple[int, int], int]:
    """Returns, by lease and ordinal, the number of parameters with merged work on the unit."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    for ledger in ledgers:
        with sqlite3.connect(ledger) as db:
            rows = db.execute("SELECT fragment, units FROM contributions WHERE fate='merged'").fetchall()
        for fragment, units in rows:
            for lease, after, upto in json.loads(units):
                for ordinal in range(after + 1, upto + 1):
                    found[lease, ordinal] += lengths[fragment]
    return found


@pytest.mark.parametrize(
    "seed", [pytest.param(1, marks=pytest.mark.ci), *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 3))]
)
def test_each_unit_is_consumed_once_although_learners_and_the_core_are_killed(tmp_path, seed):
    rng, pause = random.Random(seed), threading.Event()
    print("seed", seed)
    with core(tmp_path, "--fragments", "4", "--inner-steps", "8", *SILENCE) as running:
        job = Job(running, tmp_path / "begun")
        for name in NAMES:
            job.start(name)
        eventually(lambda: bool(running.status().datasets), 60.0)
        for target in ("a", "core", "b", "c", "a"):
            pause.wait(rng.uniform(0.3, 1.2))
            if target == "core":
                running.kill()
                running.start()
            else:
                job.kill(target)
        account(job)
    assert job.kills >= 3, "the learners ended before enough kills"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_units_although_a_learner_is_killed_every_thirty_seconds(tmp_path):
    rng, pause, inner_steps = random.Random(4), threading.Event(), 8
    with core(tmp_path, "--fragments", "4", "--inner-steps", str(inner_steps), *SILENCE) as running:
        job = Job(running, tmp_path / "begun", units=10_000, epochs=1, pace_s=0.12)
        for name in (*NAMES, "d"):
            job.start(name)
        eventually(lambda: bool(running.status().datasets), 60.0)
        while not (pause.wait(30.0) or any(child.process.poll() == 0 for child in job.children.values())):
            job.kill(rng.choice(list(job.children)))
        account(job)
        (found,) = running.status().datasets
    assert job.kills >= 5
    unit_steps = 3 / 4  # data_learner's batches have 4 rows, and units have 3
    assert found.repeated <= job.kills * 2 * inner_steps / unit_steps, "a kill repeats at most two rounds of work"


@pytest.mark.parametrize(
    "point",
    [
        *(pytest.param(each, marks=pytest.mark.ci) for each in ("units.leased", "units.decided")),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("merge.committed", "contribution.committed")),
    ],
)
def test_a_core_killed_at_a_crash_point_loses_no_unit_and_leases_none_twice(tmp_path, monkeypatch, point):
    nth = random.Random(point).randrange(2, 6)
    print("point", point, nth)
    with core(tmp_path, "--fragments", "2", "--inner-steps", "4", *SILENCE) as running:
        running.kill()
        monkeypatch.setenv("ATOLL_CRASH_AT", f"{point}:{nth}")
        running.start()
        monkeypatch.delenv("ATOLL_CRASH_AT")
        job = Job(running, tmp_path / "begun")
        for name in NAMES[:2]:
            job.start(name)
        assert running.child.process.wait(60) == -9
        running.start()
        account(job)


def account(job: Job) -> None:
    """Waits until every unit is consumed. Checks that each was consumed once, and that all merges are counted."""
    running, total = job.running, job.units * job.epochs
    eventually(job.ended, 180.0)

    def complete() -> bool:
        (found,) = running.status().datasets
        if found.consumed < total and not running.status().contributions.pending and job.ended() and found.returned:
            job.start("a")  # a learner's last work was dropped when it left
        return found.consumed == total

    eventually(complete, 90.0)
    status = running.status()
    (found,) = status.datasets
    assert (found.leased, found.returned, found.epoch) == (0, 0, job.epochs)
    lengths = {each.fragment: each.parameters for each in status.fragments}
    parts = merged_parts(job.ledgers, lengths)
    assert sum(parts.values()) / status.parameters == pytest.approx(total + found.repeated - found.lost)
    consumed: dict[tuple[int, int], int] = defaultdict(int)
    for line in job.log.read_text().splitlines():
        lease, ordinal, epoch, unit = map(int, line.split())
        consumed[epoch, unit] += 2 * parts[lease, ordinal] >= status.parameters
    assert {place: count for place, count in consumed.items() if count != 1} == {}
    assert sorted(consumed) == [(epoch, unit) for epoch in range(job.epochs) for unit in range(job.units)]
    print(f"{job.kills} learners killed, {found.repeated:.1f} units repeated, {found.lost:.1f} lost")
