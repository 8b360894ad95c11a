"""A run with several shards: training, and what continues without a shard or the registrar."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.end_to_end.world import Trainee, eventually, sharded, train


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_learners_train_over_several_shards(tmp_path, alone):
    with sharded(tmp_path, 2, alone=alone) as run:
        trainees = train(run.address, "a", "b", steps=150)
        eventually(lambda: run.status().contributions.pending == 0)
        eventually(lambda: len(run.status().fragments) == 4)
        status = run.status()
    assert all(f.version > 5 for f in status.fragments), status.fragments
    assert status.contributions.accepted == status.contributions.merged + status.contributions.refused
    assert all(float(np.mean(t.losses[-10:])) < 0.8 * np.log(32) for t in trainees)


@pytest.mark.ci
def test_a_missing_shard_or_registrar_stalls_only_its_own_part(tmp_path):
    stop = threading.Event()
    with sharded(tmp_path, 2, alone=True) as run:
        trainees = [Trainee(run.address, name, lambda _: stop.is_set(), pace_s=0.004) for name in ("a", "b")]
        for trainee in trainees:
            trainee.start()
        eventually(lambda: all(len(t.losses) > 20 for t in trainees))

        before = {f.fragment: f.version for f in run.status().fragments}
        run.shards[1].kill()
        eventually(lambda: sum(f.version > before[f.fragment] + 3 for f in run.status().fragments) == 2)
        run.shards[1].start()
        before = {f.fragment: f.version for f in run.status().fragments}
        eventually(lambda: all(f.version > before[f.fragment] + 3 for f in run.status().fragments))

        steps = [len(t.losses) for t in trainees]
        merged = [t.learner.stats().merged for t in trainees]
        run.registrar.kill()
        eventually(lambda: all(t.learner.stats().merged > m + 10 for t, m in zip(trainees, merged, strict=True)))
        eventually(lambda: all(len(t.losses) > s + 20 for t, s in zip(trainees, steps, strict=True)))
        run.registrar.start()
        eventually(lambda: all(t.learner.stats().connected for t in trainees))
        stop.set()
        for trainee in trainees:
            trainee.done()
        eventually(lambda: run.status().contributions.pending == 0)
        status = run.status()
    assert status.contributions.accepted == status.contributions.merged + status.contributions.refused


@pytest.mark.ci
def test_a_restarted_registrar_knows_what_an_absent_shard_has_merged(tmp_path):
    """Otherwise, goodput and traffic would fall until the shard is back, and alerts would fire."""
    with sharded(tmp_path, 2) as run:
        train(run.address, "a", "b", steps=100)
        eventually(lambda: run.status().contributions.pending == 0)
        before = run.status()
        eventually(lambda: run.status().wire == before.wire)  # two equal answers, so the last summary has arrived
        threading.Event().wait(2.5)  # time for a summary and the next save of the accounts
        before = run.status()
        run.shards[1].kill()
        run.registrar.kill()
        run.registrar.start()
        after = run.status()
    assert before.wire.up > 0
    assert after.wire == before.wire
    assert after.tokens_merged == before.tokens_merged


@pytest.mark.ci
@pytest.mark.parametrize("point", ["stage.committed", "begun.committed"])
def test_a_shard_killed_while_the_run_begins_starts_with_the_parameters_that_the_registrar_chose(
    tmp_path, monkeypatch, point
):
    with sharded(tmp_path, 2) as run:
        shard = run.shards[1]
        shard.kill()
        monkeypatch.setenv("ATOLL_CRASH_AT", point)
        shard.start()
        monkeypatch.delenv("ATOLL_CRASH_AT")
        stop = threading.Event()
        trainees = [Trainee(run.address, name, lambda _: stop.is_set()) for name in ("a", "b")]
        for trainee in trainees:
            trainee.start()
        assert shard.child.process.wait(30) == -9
        shard.start()
        eventually(lambda: len(found := run.status().fragments) == 4 and all(f.version > 3 for f in found))
        stop.set()
        for trainee in trainees:
            trainee.done()
        eventually(lambda: run.status().contributions.pending == 0)
