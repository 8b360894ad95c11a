"""Learners behind a front, in a run with several shards, without a shard, the registrar or the front."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from tests.end_to_end.world import Sharded, Trainee, eventually, front, sharded, train

EU = ("--region", "eu")

pytestmark = pytest.mark.ci  # each test starts several processes


@contextlib.contextmanager
def training(address: str, *names: str, **options: object) -> Iterator[list[Trainee]]:
    """Context manager for learners that train until the block ends, and then leave. No learner may fail."""
    stop = threading.Event()
    trainees = [Trainee(address, name, lambda _: stop.is_set(), pace_s=0.004, **options) for name in names]
    for trainee in trainees:
        trainee.start()
    try:
        eventually(lambda: all(hasattr(t, "learner") and t.learner.stats().merged > 2 for t in trainees))
        yield trainees
    finally:
        stop.set()
    for trainee in trainees:
        trainee.done()


def versions(run: Sharded) -> dict[int, int]:
    """Returns the version of each of the four fragments. Waits until the registrar knows all of them."""
    eventually(lambda: len(run.status().fragments) == 4)
    return {each.fragment: each.version for each in run.status().fragments}


def growing(run: Sharded) -> None:
    """Waits until every fragment has three newer versions."""
    before = versions(run)
    eventually(lambda: all(version > before[fragment] + 2 for fragment, version in versions(run).items()))


def nothing_is_lost(run: Sharded) -> None:
    """Waits for the last merges, then checks that every acknowledged contribution has one receipt."""
    eventually(lambda: run.status().contributions.pending == 0)
    counts = run.status().contributions
    assert counts.accepted == counts.merged + counts.refused, counts


@pytest.mark.parametrize("alone", [False, True])
def test_updates_of_every_shard_cross_the_wan_once(tmp_path, alone):
    with sharded(tmp_path, 2, alone=alone) as run, front(tmp_path, run.address, *EU) as eu:
        trainees = train(eu.address, "a", "b", "c", steps=150)
        nothing_is_lost(run)
        updates = eu.wan_bytes("down", "update")

        def once() -> int:
            """Returns the total parameters in all updates. The registrar's figures may be a second old."""
            return sum(each.version * each.parameters for each in run.status().fragments)

        eventually(lambda: 8 * updates / once() < 4.5)  # bytes of int4 codes and scales, once per update
        assert all(each.version > 5 for each in run.status().fragments)
    assert sum(trainee.learner.stats().bytes_down for trainee in trainees) > 1.8 * updates
    assert all(trainee.losses[-1] < 0.7 * trainee.losses[0] for trainee in trainees)
    assert all(trainee.learner.stats().mismatches == 0 for trainee in trainees)


@pytest.mark.parametrize("alone", [False, True])
def test_learners_behind_a_front_outlast_a_shard_the_registrar_and_the_front(tmp_path, alone):
    with sharded(tmp_path, 2, alone=alone) as run, front(tmp_path, run.address, *EU) as eu:
        with training(eu.address, "a", "b") as trainees:
            before = versions(run)
            run.shards[1].kill()
            eventually(lambda: sum(f.version > before[f.fragment] + 3 for f in run.status().fragments) == 2)
            run.shards[1].start()
            eventually(lambda: all(trainee.learner.stats().connected for trainee in trainees))
            growing(run)

            merged = [trainee.learner.stats().merged for trainee in trainees]
            run.registrar.kill()
            eventually(
                lambda: all(t.learner.stats().merged > m + 6 for t, m in zip(trainees, merged, strict=True))
            )  # learners reach the remaining shards through the front
            run.registrar.start()
            growing(run)

            eu.kill()
            steps = [len(trainee.losses) for trainee in trainees]
            eventually(lambda: all(len(t.losses) > s + 20 for t, s in zip(trainees, steps, strict=True)))
            eu.start()
            eventually(lambda: all(trainee.learner.stats().connected for trainee in trainees))
            growing(run)
        nothing_is_lost(run)
    assert max(trainee.longest_step_s for trainee in trainees) < 2.0


def test_a_front_restarted_without_the_registrar_logs_it_and_recovers_later(tmp_path):
    """A front learns of shards only from a Join's answer. Until the registrar answers one, learners train alone."""
    with sharded(tmp_path, 2) as run, front(tmp_path, run.address, *EU) as eu:
        with training(eu.address, "a", "b") as trainees:
            run.registrar.kill()
            eu.kill()
            eu.start()
            address = run.registrar.address
            eventually(
                lambda: all(
                    f"the core at {address} failed" in trainee.learner.stats().last_error for trainee in trainees
                )
            )
            steps = [len(trainee.losses) for trainee in trainees]
            eventually(lambda: all(len(t.losses) > s + 50 for t, s in zip(trainees, steps, strict=True)))
            run.registrar.start()
            eventually(lambda: all(trainee.learner.stats().connected for trainee in trainees))
            growing(run)
        nothing_is_lost(run)
