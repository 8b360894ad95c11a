"""kill -9 of the core and learners: no acknowledged work is lost or merged twice, and replays give the state."""

from __future__ import annotations

import random
import shutil
import sqlite3
import threading

import numpy as np
import pytest
from atoll_server.cli.run_directory import read_run

from tests.end_to_end.world import Trainee, core, eventually


@pytest.mark.ci
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_after_kill_9_at_a_random_moment_the_state_is_a_replay_of_the_ledger(tmp_path, seed):
    rng, stop = random.Random(seed), threading.Event()
    pause = threading.Event()
    print("seed", seed)
    with core(tmp_path, "--record", "--snapshot-every-s", "1") as running:
        trainees = [Trainee(running.address, name, lambda _: stop.is_set(), pace_s=0.004) for name in ("a", "b", "c")]
        for trainee in trainees:
            trainee.start()
        eventually(lambda: all(len(t.losses) > 5 for t in trainees))
        for life in range(3):
            pause.wait(rng.uniform(0.3, 1.5))
            running.kill()
            dead = tmp_path / f"dead{life}"
            shutil.copytree(running.directory, dead)
            came_back, replayed = read_run(dead), read_run(dead, from_start=True)
            for mine, other in zip(came_back.states.values(), replayed.states.values(), strict=True):
                assert mine.version == other.version
                assert mine.theta.tobytes() == other.theta.tobytes()
                assert mine.theta_pub.tobytes() == other.theta_pub.tobytes()
                assert mine.momentum.tobytes() == other.momentum.tobytes()
            running.start()
            assert [f.version for f in running.status().fragments] >= [s.version for s in came_back.states.values()]
            before = [len(t.losses) for t in trainees]
            eventually(lambda before=before: all(len(t.losses) > b + 10 for t, b in zip(trainees, before, strict=True)))
            eventually(lambda: all(t.learner.stats().connected for t in trainees))
        stop.set()
        for trainee in trainees:
            trainee.done()
        eventually(lambda: running.status().contributions.pending == 0)
        status = running.status()
    assert status.epoch == 4
    assert status.contributions.accepted == status.contributions.merged + status.contributions.refused
    each_merged_once(running.directory / "ledger.sqlite")
    untrained = np.log(32)  # the initial loss of 32 symbols; a learner that joined late began lower
    ends = [(len(t.losses), float(np.mean(t.losses[-10:]))) for t in trainees]
    assert all(loss < 0.8 * untrained for _, loss in ends), ends
    merged = sum(t.learner.stats().merged for t in trainees)
    assert abs(status.contributions.merged - merged) <= 2 * len(trainees)  # others are merged after Leave


def each_merged_once(path) -> None:
    """Checks that every merged contribution is in exactly one merge, and that each share is a merged contribution."""
    import json

    with sqlite3.connect(path) as db:
        shares = [
            (learner, incarnation, fragment, seq)
            for fragment, text in db.execute("SELECT fragment, shares FROM merges")
            for learner, incarnation, seq, _, _ in json.loads(text)
        ]
        query = "SELECT learner, incarnation, fragment, seq FROM contributions WHERE fate='merged'"
        merged = [tuple(row) for row in db.execute(query)]
    assert len(shares) == len(set(shares))
    assert sorted(shares) == sorted(merged)


def test_a_restarted_learner_is_a_new_incarnation_and_the_old_one_is_fenced(tmp_path):
    stop = threading.Event()
    with core(tmp_path) as running:
        other = Trainee(running.address, "other", lambda _: stop.is_set())
        other.start()
        first = Trainee(running.address, "a", lambda t: len(t.losses) >= 30)
        first.start()
        first.done()
        second = Trainee(running.address, "a", lambda t: len(t.losses) >= 30)
        second.start()
        second.done()
        stop.set()
        other.done()
        incarnations = {each.learner: each.incarnation for each in running.status().learners}
    assert incarnations == {"a": 2, "other": 1}


def test_a_clean_stop_takes_a_snapshot_and_the_run_continues_from_it(tmp_path):
    with core(tmp_path) as running:
        trainee = Trainee(running.address, "a", lambda t: len(t.losses) >= 40)
        trainee.start()
        trainee.done()
        eventually(lambda: running.status().contributions.pending == 0)
        versions = [f.version for f in running.status().fragments]
        running.stop()
        assert "snapshot taken" in running.log()
        running.start()
        status = running.status()
    assert [f.version for f in status.fragments] == versions
    assert status.tokens_trained == 40 * 32


@pytest.mark.ci
def test_the_spool_holds_only_payloads_that_two_snapshots_do_not_cover(tmp_path):
    stop = threading.Event()
    with core(tmp_path, "--snapshot-every-s", "0.5") as running:
        trainee = Trainee(running.address, "a", lambda _: stop.is_set(), pace_s=0.004)
        trainee.start()
        eventually(lambda: running.log().count("snapshot taken") >= 6)
        files = list((running.directory / "spool").rglob("*.frames"))
        accepted = running.status().contributions.accepted
        stop.set()
        trainee.done()
    assert len(files) < 0.7 * accepted
    assert len(list((running.directory / "snapshots").glob("*.safetensors"))) <= 4
