"""A training loop with Accelerate as a learner."""

from __future__ import annotations

import pytest
import torch
from atoll import LearnerError
from atoll.data import Rows
from torch.utils.data import DataLoader

from tests.end_to_end.world import core, eventually
from tests.integrations.unit_learner import ROWS, UNIT, Numbered
from tests.integrations.world import REAL_TOKENS, VOCABULARY, Sentences, gpt, learner_status

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(400)]
BATCH = 4


class Loop:
    """A loop with Accelerate: gradient accumulation over two micro-batches, clipping, and a schedule."""

    def __init__(self, address, *, seed=0, length=12, **options):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState
        from atoll.integrations.accelerate import AcceleratedLearner

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, loader = gpt(seed), torch.utils.data.DataLoader(Sentences(), batch_size=BATCH)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / length))
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.learner = AcceleratedLearner(
            self.accelerator, self.model, self.optimizer, server=address, name="a", drain_s=10.0,
            scheduler=self.scheduler, schedule_steps=length, **options,
        )  # fmt: skip

    def train(self, micro_batches):
        """Trains. Returns the number of micro-batches after which the run reached its target, or None."""
        done = 0
        while True:
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                done += 1
                if self.learner.step(batch, loss.item()):
                    return done
                if done == micro_batches:
                    return None


@pytest.fixture
def running(tmp_path):
    with core(tmp_path) as it:
        yield it


def test_tokens_count_all_micro_batches_and_steps_are_the_optimizers(running):
    loop = Loop(running.address)
    with loop.learner as learner:
        loop.train(16)
        with learner.pause():
            loop.model.eval()
        assert learner.metrics()["atoll/run_tokens"] == 16 * BATCH * REAL_TOKENS
    stats = learner.learner.stats()
    assert (stats.steps, stats.tokens) == (8, 16 * BATCH * REAL_TOKENS)
    assert stats.paused_s > 0
    assert learner_status(running).state == "left"
    eventually(lambda: running.status().contributions.merged >= 2)


def test_units_are_trained_on_once(tmp_path):
    from accelerate import Accelerator
    from atoll.integrations.accelerate import AcceleratedLearner

    accelerator, plain, rows = Accelerator(cpu=True), gpt(), list[int]()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), 1e-2))
    with core(tmp_path, "--fragments", "2", "--inner-steps", "4") as running:
        learner = AcceleratedLearner(accelerator, model, optimizer, running.address, "a", drain_s=30.0)
        source = Rows(Numbered(), UNIT)
        with pytest.raises(LearnerError, match="call it in the `with` block"):
            learner.units(source, "rows")
        with learner:
            for batch in accelerator.prepare(DataLoader(learner.units(source, "rows"), batch_size=UNIT)):
                rows += [int(ids[0] + VOCABULARY * ids[1]) for ids in batch["input_ids"]]
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                learner.step(batch)
        eventually(lambda: running.status().datasets[0].consumed == ROWS // UNIT)
    assert sorted(rows) == list(range(ROWS))


def test_a_loaded_state_continues_with_its_optimizer_and_the_runs_parameters(running, tmp_path):
    loop = Loop(running.address)
    with loop.learner:
        loop.train(8)
        loop.accelerator.save_state(str(tmp_path / "state"))
    moments = [state["exp_avg"].clone() for state in loop.optimizer.state.values()]
    eventually(lambda: running.status().contributions.pending == 0)
    again = Loop(running.address, seed=5)
    again.accelerator.load_state(str(tmp_path / "state"))
    with again.learner as learner:
        for then, state in zip(moments, again.optimizer.state.values(), strict=True):
            assert torch.equal(then, state["exp_avg"])
        again.train(4)
        assert learner.learner.stats().steps == 2
        assert learner.learner.stats().earlier_steps == 4
        assert "something other than the optimizer" not in learner.learner.stats().last_error


def test_the_schedule_follows_the_runs_tokens_and_the_loop_ends_at_their_target(tmp_path):
    with core(tmp_path, "--total-tokens", str(20 * BATCH * REAL_TOKENS)) as running:
        first = Loop(running.address, length=10)
        with first.learner:
            assert first.train(8) is None
            assert first.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * (1 - 8 / 20), abs=1e-6)
        second = Loop(running.address, length=10)
        with second.learner:
            assert second.train(1000) == 12
            assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("given", ["scheduler", "schedule_steps"])
def test_a_scheduler_without_its_number_of_steps_is_refused(running, given):
    from atoll.integrations.accelerate import AcceleratedLearner

    loop = Loop(running.address)
    with pytest.raises(LearnerError, match="only one of scheduler= and schedule_steps="):
        AcceleratedLearner(
            loop.accelerator, loop.model, loop.optimizer, running.address,
            **{given: {"scheduler": loop.scheduler, "schedule_steps": 5}[given]},
        )  # fmt: skip


def test_an_error_ends_the_learner_and_is_raised(running):
    loop = Loop(running.address)

    def fail():
        with loop.learner:
            loop.train(4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert learner_status(running).state == "left"
    assert loop.learner.learner.stats().steps == 2
