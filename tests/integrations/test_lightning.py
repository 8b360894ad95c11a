"""Lightning as a learner, with the callback's two lines."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from tests.end_to_end.world import core, eventually
from tests.integrations.world import REAL_TOKENS, Sentences, gpt, learner_status

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(400)]
BATCH = 4


def module(seed=0, rate=1e-2, decays=False):
    """Returns a LightningModule with a GPT-2 as its attribute `net`."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = gpt(seed)

        def training_step(self, batch, index):
            return self.net(**batch).loss

        def validation_step(self, batch, index):
            self.log("validation", self.net(**batch).loss)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), rate)
            if not decays:
                return optimizer
            length = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / length))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module()


def loader(count=64):
    return torch.utils.data.DataLoader(Sentences(count), batch_size=BATCH)


def trainer(core, folder, *more, steps=24, name="a", options=None, **arguments):
    """Returns a Lightning Trainer and its callback."""
    import lightning
    from atoll.integrations.lightning import AtollCallback

    callback = AtollCallback(server=core.address, name=name, drain_s=10.0, **(options or {}))
    given = {
        "max_steps": steps, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "devices": 1,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(folder),
    }  # fmt: skip
    return lightning.Trainer(callbacks=[callback, *more], **(given | arguments)), callback


@pytest.fixture
def running(tmp_path):
    with core(tmp_path) as it:
        yield it


def test_tokens_are_those_of_the_attention_masks_of_all_micro_batches(running, tmp_path):
    it, callback = trainer(running, tmp_path, steps=12, accumulate_grad_batches=2)
    it.fit(module(), loader())
    stats = callback.learner.stats()
    assert (stats.steps, stats.tokens) == (12, 12 * 2 * BATCH * REAL_TOKENS)
    assert (stats.pending, stats.abandoned_tokens) == (0, 0)
    assert learner_status(running).state == "left"
    eventually(lambda: running.status().contributions.merged >= 2)


def test_validation_pauses_and_loggers_get_the_runs_figures(running, tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    it, callback = trainer(
        running, tmp_path, steps=12, val_check_interval=3, logger=logger, log_every_n_steps=4, limit_val_batches=2
    )
    it.fit(module(), loader(), loader(8))
    assert callback.learner.stats().steps == 12
    assert callback.learner.stats().paused_s > 0.0
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [float(row["atoll/run_tokens"]) for row in csv.DictReader(file) if row.get("atoll/run_tokens")]
    assert rows == [steps * BATCH * REAL_TOKENS for steps in (4, 8, 12)]
    assert learner_status(running).loss > 0


def test_resuming_continues_with_the_checkpoints_optimizer_and_the_runs_parameters(running, tmp_path):
    it, callback = trainer(running, tmp_path, steps=8, enable_checkpointing=True)
    first = module()
    it.fit(first, loader())
    it.save_checkpoint(tmp_path / "saved.ckpt")
    moments = [state["exp_avg"].clone() for state in it.optimizers[0].state.values()]
    eventually(lambda: running.status().contributions.pending == 0)
    found = list[list[torch.Tensor]]()

    import lightning

    class Looks(lightning.Callback):
        def on_train_start(self, trainer, pl_module):
            found.append([state["exp_avg"].clone() for state in trainer.optimizers[0].state.values()])

    again, callback = trainer(running, tmp_path, Looks(), steps=12)
    again.fit(module(seed=5), loader(), ckpt_path=tmp_path / "saved.ckpt")
    stats = callback.learner.stats()
    assert (stats.steps, stats.tokens) == (4, 4 * BATCH * REAL_TOKENS), "each step must run once"
    assert stats.earlier_steps == 8
    for then, now in zip(moments, found[0], strict=True):
        assert torch.equal(then, now)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_training_leaves_and_comes_through(running, tmp_path, error):
    import lightning

    class Failing(lightning.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 3:
                raise error

    it, callback = trainer(running, tmp_path, Failing())
    with pytest.raises((error, SystemExit)):  # Lightning exits after Ctrl-C
        it.fit(module(), loader())
    assert callback.learner.stats().steps == 3
    assert learner_status(running).state == "left"


def test_early_stopping_leaves(running, tmp_path):
    from lightning.pytorch.callbacks import EarlyStopping

    stopping = EarlyStopping("validation", mode="max", patience=1)  # the loss falls
    it, callback = trainer(running, tmp_path, stopping, steps=64, val_check_interval=2, limit_val_batches=2)
    it.fit(module(), loader(), loader(8))
    stats = callback.learner.stats()
    assert stopping.stopped_epoch == 0
    assert 0 < stats.steps < 64
    assert (stats.pending, stats.abandoned_tokens, stats.connected) == (0, 0, False)
    assert learner_status(running).state == "left"
    eventually(lambda: running.status().contributions.pending == 0)
    assert running.status().tokens_merged == pytest.approx(running.status().tokens_trained)


def test_schedulers_follow_the_runs_tokens_and_training_stops_at_their_target(tmp_path):
    with core(tmp_path, "--total-tokens", str(20 * BATCH * REAL_TOKENS)) as running:
        first, callback = trainer(running, tmp_path, steps=8)
        first.fit(module(decays=True), loader())
        assert first.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * (1 - 8 / 20), abs=2e-3)
        second, callback = trainer(running, tmp_path, steps=1000)
        second.fit(module(decays=True), loader())
    assert callback.learner.stats().steps == 12, "training must stop at the run's target"
    assert second.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-4)


def test_a_scheduler_that_lightning_steps_after_each_epoch_follows_the_runs_tokens_in_epochs(tmp_path):
    class Halving(type(module())):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), 0.01)
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]

    with core(tmp_path, "--total-tokens", str(8 * BATCH * REAL_TOKENS)) as running:
        it, callback = trainer(running, tmp_path, steps=-1, max_epochs=4)
        it.fit(Halving(), loader(4 * BATCH))
    assert callback.learner.stats().steps == 8, "training must stop at the run's target, after two of four epochs"
    assert it.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**4), "the schedule must be complete"


def test_a_submodule_can_join_a_run_of_another_trainer(running, tmp_path):
    import atoll

    plain = gpt()
    with atoll.Learner(plain, torch.optim.AdamW(plain.parameters()), running.address, "plain"):
        pass
    wrong, _ = trainer(running, tmp_path, steps=2)
    with pytest.raises(atoll.LearnerError, match=r'has a different model.* pass AtollCallback\(module="net"\)'):
        wrong.fit(module(seed=1), loader())
    it, callback = trainer(running, tmp_path, steps=2, name="b", options={"module": "net"})
    it.fit(module(seed=1), loader())
    assert callback.learner.stats().steps == 2


def test_manual_optimization_of_two_optimizers_counts_one_step_per_batch(running, tmp_path):
    import lightning

    class Two(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

        def training_step(self, batch, index):
            loss = (self.second(self.first(batch["input_ids"].float())) - 1.0).square().mean()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), 1e-6) for part in (self.first, self.second)]

    it, callback = trainer(running, tmp_path, steps=-1, max_epochs=1)
    it.fit(Two(), loader(40))
    assert callback.learner.stats().steps == 10
