"""Processes train on leased units, and are killed: each unit of each epoch is consumed exactly once."""

from __future__ import annotations

import argparse
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from atoll.demo.processes import children

from benchmarks.failures import data_units
from benchmarks.failures.data_units import SILENCE, Job
from tests.end_to_end.world import Core, core, eventually

pytestmark = pytest.mark.timeout(600)  # after a lost farewell, units return after 90 s
NAMES = ("a", "b", "c")


def job_of(running: Core, folder: Path, shards: Sequence[Core] = ()) -> Job:
    """Returns learners of a short job, which have not started. shards: the run's other shards."""
    ledgers = [each.directory / "ledger.sqlite" for each in (running, *shards)]
    return Job(
        running.group, running.address, running.status, ledgers, folder / "begun", units=800, epochs=2, pace_s=0.02
    )


@pytest.mark.parametrize(
    "seed", [pytest.param(1, marks=pytest.mark.ci), *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 3))]
)
def test_each_unit_is_consumed_once_although_learners_and_the_core_are_killed(tmp_path, seed):
    rng, pause = random.Random(seed), threading.Event()
    print("seed", seed)
    with core(tmp_path, "--fragments", "4", "--inner-steps", "8", *SILENCE) as running:
        job = job_of(running, tmp_path)
        for name in NAMES:
            job.start(name)
        eventually(lambda: bool(running.status().datasets), 60.0)
        for target in ("a", "core", "b", "c", "a"):
            pause.wait(rng.uniform(0.3, 1.2))
            if target == "core":
                running.kill()
                running.start()
                follow_up(job)
            else:
                job.kill(target)
        account(job)
    assert len(job.kills) >= 3, "the learners ended before enough kills"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_units_although_a_learner_is_killed_every_thirty_seconds(tmp_path):
    with children(tmp_path) as group:
        options = argparse.Namespace(units=10_000, every_s=30.0, pace_s=0.12, seed=4)
        found = data_units.run(group, tmp_path, options)
    assert not found["faults"]
    assert len(found["kills"]) >= 5


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
        job = job_of(running, tmp_path)
        for name in NAMES[:2]:
            job.start(name)
        assert running.child.process.wait(60) == -9
        running.start()
        account(job)


def follow_up(job: Job) -> None:
    """Waits until each learner that was not killed has two more merges of each fragment, or has ended.

    Called after an outage. Otherwise, a kill would repeat its steps, which the bound does not contain.
    """
    names = set(job.children) - {name for _, name in job.kills}
    before, fragments = job.merges(), range(len(job.status().fragments))

    def merged() -> bool:
        now = job.merges()
        here = [name for name in names if job.children[name].process.poll() is None]
        return all(now[name, each] >= before[name, each] + 2 for name in here for each in fragments)

    eventually(merged, 120.0)


def account(job: Job) -> None:
    """Waits until every unit is consumed. Checks that each was consumed once, that all merges are counted, and that
    only kills of learners repeat work, within the bound."""
    eventually(job.ended, 180.0)
    eventually(job.complete, data_units.END_S)
    found = data_units.account(job)
    assert not found.faults()
    assert found.repeated <= data_units.bound(len(job.kills)), "more work is repeated than kills explain"
    assert job.status().datasets[0].epoch == job.epochs
    print(f"{len(job.kills)} learners killed, {found.repeated:.1f} units repeated, {found.lost:.1f} lost")
