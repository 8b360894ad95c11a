"""The synchronous job: its time accounts for short histories, and the job itself with real kills."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice

import psutil
import pytest

from benchmarks.data_parallel import time_accounts
from benchmarks.data_parallel.time_accounts import History, Joined, Kill, Life, Prepared, Step, Up, balance, failures
from tests.end_to_end.world import eventually

DDP = [sys.executable, "-m", "benchmarks.data_parallel"]
STEP_TOKENS = 8 * 128


def life(spawned_s: float, first_step: int, count: int, died_s: float | None = None) -> Life:
    """Returns a rank that is up after 2 s, prepared after 3 s, and joined after 4 s. It then steps every second."""
    one = Life(spawned_s, died_s)
    one.take(Up(spawned_s + 2))
    one.take(Prepared(spawned_s + 3))
    one.take(Joined(spawned_s + 4, first_step))
    for n in range(count):
        one.take(Step(first_step + n, spawned_s + 4 + n, spawned_s + 5 + n, 10, 1.0))
    return one


def job(*starts: Life, kills: tuple[Kill, ...] = ()) -> History:
    """Returns a job of two ranks with the same history."""
    return History(2, starts[0].prepared_s, [[start, start] for start in starts], list(kills))


def adds_up(found) -> None:
    assert found.useful_s + sum(found.lost_s.values()) == pytest.approx(found.provisioned_s)
    assert all(seconds > -1e-9 for seconds in found.lost_s.values())


def test_without_failures_all_time_except_joining_is_useful():
    found = balance(job(life(0, 0, 6)), 10.0, 6)
    assert found.provisioned_s == 2 * 7
    assert found.useful_s == 2 * 6
    assert found.lost_s["joining"] == 2
    assert found.lost_s["interpreter"] == 0  # the first start is before the provisioned time
    assert (found.tokens_trained, found.tokens_kept, found.restart_s) == (120, 120, [])
    adds_up(found)


def test_a_repeated_step_counts_once():
    """The ranks are killed half a second into their seventh step, at 7.5 s.

    They continue from a checkpoint after 4 steps.
    """
    history = job(life(0, 0, 6, died_s=10.5), life(10.75, 4, 3), kills=(Kill(7.5, 1),))
    found = balance(history, 17.75, 7)
    assert found.lost_s["redone"] == 2 * 2
    assert found.useful_s == 2 * (4 + 3)
    assert found.lost_s["cut_off"] == 2 * 0.5
    assert found.lost_s["interpreter"] == 2 * 2
    assert found.lost_s["preparing"] == 2 * 1
    assert found.lost_s["other"] == pytest.approx(2 * 0.25)
    assert (found.tokens_trained, found.tokens_kept) == (180, 140)
    assert found.restart_s == [10.75 + 4 - 10.5]
    assert found.goodput == found.useful_s / (2 * 14.75)
    assert found.goodput_without_interpreter_start == found.useful_s / (2 * 14.75 - 4)
    adds_up(found)


def test_a_start_that_never_joined_loses_all_time_until_the_next_useful_step():
    short = Life(10.0, died_s=13.0)
    short.take(Up(12.0))
    history = job(life(0, 0, 6, died_s=10.0), short, life(13.0, 4, 2), kills=(Kill(7.0, 0), Kill(10.0, 1)))
    found = balance(history, 19.0, 6)
    assert found.restart_s == [17.0 - 10.0, 17.0 - 13.0]
    assert found.lost_s["interpreter"] == 2 * (2 + 2)
    assert found.lost_s["preparing"] == 2 * (1 + 1)
    assert found.tokens_kept == 120
    adds_up(found)


def test_steps_after_the_last_checkpoint_are_lost_if_the_job_ends_during_a_restart():
    history = job(life(0, 0, 6, died_s=10.0), Life(10.0, died_s=11.0), kills=(Kill(7.0, 0),))
    found = balance(history, 11.0, 4)
    assert (found.tokens_trained, found.tokens_kept) == (120, 80)
    assert found.useful_s == 2 * 4
    assert found.restart_s == [None]
    adds_up(found)


def test_a_later_restart_from_an_older_step_undoes_all_starts_before_it():
    history = job(
        life(0, 0, 3, died_s=7.0), life(7.0, 2, 2, died_s=13.0), life(13.0, 0, 4), kills=(Kill(4.0, 0), Kill(10.0, 0))
    )
    found = balance(history, 21.0, 4)
    assert found.useful_s == 2 * 4
    assert found.lost_s["redone"] == 2 * (3 + 2)
    assert found.restart_s == [17.0 - 7.0, 17.0 - 13.0]
    adds_up(found)


def test_events_survive_encoding_and_decoding():
    for event in (
        Up(1.5),
        Prepared(2.5),
        Joined(3.5, 50),
        Step(50, 3.5, 4.0, 1024, 2.25),
        time_accounts.Saved(51, 4.0, 4.1),
    ):
        assert time_accounts.decode(time_accounts.encode(event)) == event


def test_failures_have_the_mean_time_and_follow_from_the_seed():
    drawn = list(islice(failures(7, 60.0, 4), 4000))
    assert drawn == list(islice(failures(7, 60.0, 4), 4000))
    assert drawn[-1].at_s / len(drawn) == pytest.approx(60, rel=0.1)
    assert {kill.rank for kill in drawn} == {0, 1, 2, 3}
    assert drawn[0] != next(failures(8, 60.0, 4))


def run(place, *arguments: str) -> dict:
    """Returns the figures of a job of two ranks."""
    command = [*DDP, "--ranks", "2", "--json", str(place), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(place.read_text())


@pytest.mark.slow
def test_a_killed_job_continues_from_its_checkpoint_and_its_figures_add_up(tmp_path):
    found = run(tmp_path / "out.json", "--seconds", "20", "--kills", "9:1", "--checkpoint-steps", "10")
    assert (found["kills"], found["killed"][0]["rank"]) == (1, 1)
    first, resumed = found["first_steps"]
    assert first == 0
    assert resumed > 0
    assert resumed % 10 == 0
    assert found["steps"] > resumed
    unrecorded = found["steps"] * 2 * STEP_TOKENS - found["tokens_kept"]
    assert unrecorded in {0, STEP_TOKENS}, "a rank may be killed after a saved step, and before it records the step"
    assert found["tokens_lost"] == found["tokens_trained"] - found["tokens_kept"]
    assert 0 <= found["tokens_lost"] <= 10 * 2 * STEP_TOKENS
    assert found["useful_s"] + sum(found["lost_s"].values()) == pytest.approx(found["provisioned_s"])
    assert all(seconds > -1e-6 for seconds in found["lost_s"].values())
    assert found["provisioned_s"] == pytest.approx(2 * found["seconds"])
    assert 20 <= found["seconds"] < 30
    assert found["goodput"] == pytest.approx(found["useful_s"] / found["provisioned_s"])
    assert 2 * found["restart_s"][0] > found["interpreter_start_s"] > 0


@pytest.mark.slow
def test_failures_do_not_change_what_is_trained(tmp_path):
    """Rank 0 dies in a step, and again while ranks start. The model is bit-identical."""
    tokens = ["--tokens", str(40 * 2 * STEP_TOKENS), "--checkpoint-steps", "8"]
    calm = run(tmp_path / "calm.json", *tokens)
    struck = run(tmp_path / "struck.json", *tokens, "--kills", "2:0,2.5:1")
    assert (calm["kills"], struck["kills"]) == (0, 2)
    assert struck["first_steps"][1] is None
    assert struck["steps"] == calm["steps"] == 40
    assert struck["tokens_kept"] == calm["tokens_kept"]
    assert struck["validation_loss"] == calm["validation_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_job(number, tmp_path):
    """This holds even after SIGKILL, because ranks notice that their parent is gone."""
    unbuffered = dict(os.environ, PYTHONUNBUFFERED="1", TMPDIR=str(tmp_path))
    command = [*DDP, "--ranks", "2", "--seconds", "60", "--kills", "2:0"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=unbuffered)
    ranks: list[psutil.Process] = []
    try:
        assert "SIGKILL to rank 0" in parent.stdout.readline()
        time.sleep(3)  # until the ranks train again
        ranks = psutil.Process(parent.pid).children()
        assert len(ranks) == 2
        parent.send_signal(number)
        assert parent.wait(20) != 0
        eventually(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in ranks))
    finally:
        parent.kill()
        parent.wait()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        parent.stdout.close()
