"""A run through a real core: work is merged, learners agree, and no learner waits for another."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import threading

import atoll
import numpy as np
import pytest
import structlog
import torch
from atoll import LearnerError
from atoll.demo.processes import ATOLL
from torch import nn

from tests.end_to_end.world import Trainee, core, eventually, small_model, task, train


def test_learners_train_one_model_and_every_contribution_has_a_fate(tmp_path):
    with core(tmp_path) as running:
        first, second = train(running.address, "a", "b", steps=150)
        eventually(lambda: running.status().contributions.pending == 0)
        status = running.status()
    counts = status.contributions
    assert np.mean(first.losses[-10:]) < 0.5 * first.losses[0]
    assert counts.accepted == counts.merged + counts.refused
    assert counts.refused == 0
    assert first.learner.stats().merged > 5
    assert status.merges == sum(f.version for f in status.fragments) > 10
    assert status.tokens_trained == 2 * 150 * 32
    assert 0.9 < status.tokens_merged / status.tokens_trained <= 1.0
    assert {learner.state for learner in status.learners} == {"left"}
    assert 0 < 8 * status.wire.up / status.wire.up_parameters < 4.2  # headers are a large part of small fragments
    assert second.learner.stats().last_error == ""


@pytest.mark.ci
def test_outer_steps_become_plain_means_towards_the_announced_end(tmp_path):
    total = 2 * 400 * 32
    with core(tmp_path, "--total-tokens", str(total), "--outer-cool-down", "0.5") as running:
        train(running.address, "a", "b", steps=400)
        eventually(lambda: running.status().contributions.pending == 0)
        status = running.status()
        said = subprocess.run(
            [*ATOLL, "status", "--server", running.address], capture_output=True, text=True, check=True
        )
    assert status.settings.total_tokens == total
    assert "25,600 of 25,600 (100.0%) trained" in said.stdout
    with contextlib.closing(sqlite3.connect(running.directory / "ledger.sqlite")) as db:
        rules = [json.loads(rule) for (rule,) in db.execute("SELECT rule FROM merges ORDER BY rowid")]
    cooling = [rule for rule in rules if 0 < rule["heat"] < 1]
    assert rules[0]["heat"] == 1.0
    assert min(rule["heat"] for rule in cooling) < 0.6  # learners report their tokens once per second
    assert all(rule["lr"] == pytest.approx(1 - 0.5 * rule["heat"]) for rule in cooling)
    assert all(rule["momentum"] < 0.85 for rule in cooling)


def fast_and_slow(directory, steps: int, *options: str):
    """Trains one learner for `steps` steps, next to one that is five times as slow.

    Returns losses and the final status.
    """
    with core(directory, "--inner-steps", "8", *options) as running:
        fast = Trainee(running.address, "fast", lambda t: len(t.losses) >= steps, pace_s=0.04)
        slow = Trainee(running.address, "slow", lambda _: not fast.is_alive(), pace_s=0.2)
        for trainee in (fast, slow):
            trainee.start()
        for trainee in (fast, slow):
            trainee.done()
        eventually(lambda: running.status().contributions.pending == 0)
        return fast.losses, slow.losses, running.status()


@pytest.mark.ci
def test_a_slow_learner_answers_all_rounds_of_a_step_at_once(tmp_path):
    """Rounds wait for all learners, but open at the pace of the fast one, which takes five steps per slow step."""
    _, slow, status = fast_and_slow(tmp_path, 150, "--fragments", "8", "--quorum", "100%")
    assert status.merges > 1.8 * len(slow)  # one round per step would give 1
    assert status.contributions.merged > 1.8 * status.merges


@pytest.mark.ci
def test_without_a_grace_window_a_slow_learners_work_is_merged_when_it_arrives(tmp_path):
    fast, _, status = fast_and_slow(tmp_path, 120, "--fragments", "8", "--quorum", "1", "--grace-ratio", "0")
    counts = status.contributions
    assert counts.merged < 1.3 * status.merges, "nearly every contribution must be merged alone"
    assert counts.refused == counts.turned_away == 0
    assert counts.merged > len(fast) * 1.3, "the slow learner's work must be merged, too"
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as db:
        merged = "SELECT SUM(version - 1 - base_version), SUM(staleness) FROM contributions WHERE fate='merged'"
        merges, outer_steps = db.execute(merged).fetchone()
    assert 0 < outer_steps < 0.9 * merges, "a merge of one learner's work must count as part of an outer step"


def test_learners_of_one_process_ignore_each_others_events(tmp_path, caplog):
    with core(tmp_path) as running:
        train(running.address, "a", "b", "c", "d", steps=60)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_learners_that_adopted_the_same_version_hold_bit_identical_anchors(tmp_path):
    """Without outstanding work, the parameters equal the anchor."""
    with core(tmp_path) as running:
        train(running.address, "a", "b", steps=80)
        eventually(lambda: running.status().contributions.pending == 0)
        fresh, again = (Trainee(running.address, name, lambda _: True) for name in ("c", "d"))
        for trainee in (fresh, again):
            trainee.start()
            trainee.done()
    for mine, other in zip(fresh.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert fresh.learner.stats().versions == again.learner.stats().versions


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_other_codecs_train_without_whole_fetches(tmp_path, codec):
    with core(tmp_path, "--codec", codec) as running:
        trainees = train(running.address, "a", "b", steps=100)
        eventually(lambda: running.status().contributions.pending == 0)
        assert running.status().contributions.refused == 0
    for trainee in trainees:
        stats = trainee.learner.stats()
        assert (stats.mismatches, stats.last_error) == (0, "")
        assert stats.merged > 5
        assert np.mean(trainee.losses[-10:]) < 0.5 * np.log(32)


def test_a_new_learner_cannot_overwrite_the_global_model(tmp_path):
    with core(tmp_path) as running:
        (trained,) = train(running.address, "a", steps=60)
        eventually(lambda: running.status().contributions.pending == 0)
        newcomer = Trainee(running.address, "b", lambda _: True, model=small_model(seed=99))
        newcomer.start()
        newcomer.done()
    del trained
    other = small_model(seed=99)
    assert not any(torch.equal(a, b) for a, b in zip(newcomer.model.parameters(), other.parameters(), strict=True))


def test_a_learner_started_before_its_core_waits_for_it(tmp_path):
    with core(tmp_path) as running:
        running.kill()
        waiting = Trainee(running.address, "a", lambda t: len(t.losses) >= 10)
        waiting.start()
        running.start()
        assert len(waiting.done().losses) == 10


def test_a_core_that_never_answers_gives_a_one_line_error(tmp_path):
    with core(tmp_path) as running:
        running.kill()
        alone = Trainee(running.address, "a", lambda _: True, connect_timeout_s=0.5)
        alone.start()
        with pytest.raises(LearnerError, match=r"could not join the run at .* within .* s .*start a core"):
            alone.done()


def test_a_frozen_core_does_not_stop_an_inner_step(tmp_path):
    halted = threading.Event()
    with core(tmp_path) as running:
        trainee = Trainee(running.address, "a", lambda t: halted.is_set() and len(t.losses) >= enough[0])
        enough = [10**9]
        trainee.start()
        eventually(lambda: trainee.losses and trainee.learner.stats().merged > 2)
        running.child.process.send_signal(signal.SIGSTOP)
        before = len(trainee.losses)
        enough[0] = before + 100
        halted.set()
        eventually(lambda: len(trainee.losses) >= before + 100)
        running.child.process.send_signal(signal.SIGCONT)
        trainee.done()
    assert trainee.longest_step_s < 0.25  # on two CPUs, shared with all other processes
    assert trainee.learner.stats().blocked_s < 1.0


class Somebodys(nn.Module):
    """A model with a tied head, a frozen part, bfloat16 parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.middle = nn.Linear(16, 16).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        h = torch.tanh(self.frozen(self.table(x)))
        h = h + self.middle(h.to(torch.bfloat16)).float()
        return self.head(self.norm(h))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_users_loop_works_with_three_more_lines(tmp_path, compiled):
    """The loop has tied, frozen and bfloat16 parameters, gradient accumulation, SGD and torch.compile."""
    import atoll

    torch.manual_seed(1)
    with core(tmp_path) as running:
        model = Somebodys()
        wrapped = torch.compile(model) if compiled else model
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)
        generator = torch.Generator().manual_seed(3)
        losses, breath = [], threading.Event()
        with atoll.Learner(wrapped, optimizer, server=running.address, name="theirs") as learner:
            for _ in range(150):
                for _ in range(2):
                    x, y = task(generator)
                    loss = nn.functional.cross_entropy(wrapped(x), y) / 2
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(2 * loss.item())
                breath.wait(0.01)
                learner.step(tokens=64)
        stats = learner.stats()
        status = running.status()
    assert losses[-1] < 0.6 * losses[0]
    assert stats.merged > 3
    assert stats.last_error == ""
    assert status.contributions.turned_away == 0
    assert model.head.weight is model.table.weight


def test_a_learner_that_never_counts_tokens_is_warned_once(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with core(tmp_path) as running, structlog.testing.capture_logs() as said:

        def warned() -> list[object]:
            return [each for each in said if each["event"].startswith("no work is sent")]

        with atoll.Learner(model, optimizer, running.address, "a") as learner:

            def step() -> bool:
                model(torch.randint(32, (4,))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=0)
                return bool(warned())

            eventually(step)
            for _ in range(100):
                step()
            assert learner.stats().merged == 0
        assert len(warned()) == 1


def test_overwrite_is_available_as_in_the_paper(tmp_path):
    with core(tmp_path) as running:
        first, _ = train(running.address, "a", "b", steps=100, adoption="overwrite")
    assert np.mean(first.losses[-10:]) < 0.6 * first.losses[0]
    assert first.learner.stats().abandoned_tokens > 0


def test_an_error_in_the_loop_is_raised_and_the_learner_leaves(tmp_path):
    def fail(trainee: Trainee) -> bool:
        if len(trainee.losses) == 5:
            raise ZeroDivisionError("theirs")
        return False

    with core(tmp_path) as running:
        trainee = Trainee(running.address, "a", fail)
        trainee.start()
        with pytest.raises(ZeroDivisionError, match="theirs"):
            trainee.done()
        assert running.status().learners[0].state == "left"


def test_a_restarted_learner_knows_earlier_tokens_and_steps_of_its_name(tmp_path):
    with core(tmp_path) as running:
        (first,) = train(running.address, "a", steps=30)
        assert (first.learner.stats().earlier_tokens, first.learner.stats().earlier_steps) == (0, 0)
        running.kill()  # the counts must be durable
        running.start()
        (second,) = train(running.address, "a", steps=10)
        (other,) = train(running.address, "b", steps=1)
        (third,) = train(running.address, "a", steps=1)
        told = [(each.learner.stats().earlier_steps, each.learner.stats().earlier_tokens) for each in (second, third)]
    assert told == [(30, 30 * 32), (40, 40 * 32)]
    assert other.learner.stats().earlier_steps == 0
    assert third.learner.stats().steps == 1, "a process's own counters must begin at zero"


def test_earlier_tokens_contain_those_that_were_reported_while_another_learner_started(tmp_path):
    """The core counts such tokens later, when it can compare the learners' rates."""
    model = small_model()
    with core(tmp_path) as running:
        train(running.address, "a", steps=1)
        with atoll.Learner(model, torch.optim.SGD(model.parameters(), 0.1), server=running.address, name="starting"):
            train(running.address, "a", steps=30)
            (again,) = train(running.address, "a", steps=1)
    assert again.learner.stats().earlier_tokens == 31 * 32
