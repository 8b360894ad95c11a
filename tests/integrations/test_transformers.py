"""Hugging Face's Trainer as a learner, with the callback's two lines."""

from __future__ import annotations

import math
import signal
import subprocess
import sys

import atoll
import pytest
import structlog
import torch
from atoll_server.cli.operator_client import OperatorTarget, export_checkpoint
from safetensors.torch import load_file

from tests.end_to_end.world import core, eventually
from tests.integrations.world import REAL_TOKENS, Sentences, gpt, learner_status

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(400)]
BATCH = 4


def trainer(core, folder, *more, steps=24, model=None, name="a", options=None, **arguments):
    """Returns a Trainer and its callback."""
    import transformers
    from atoll.integrations.transformers import AtollCallback

    given = {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH, "max_steps": steps, "use_cpu": True,
        "report_to": [], "save_strategy": "no", "learning_rate": 1e-2, "logging_steps": 4, "disable_tqdm": True,
    }  # fmt: skip
    callback = AtollCallback(server=core.address, name=name, drain_s=10.0, **(options or {}))
    trainer = transformers.Trainer(
        model=model or gpt(), args=transformers.TrainingArguments(**(given | arguments)), train_dataset=Sentences(),
        eval_dataset=Sentences(8), callbacks=[callback, *more],
    )  # fmt: skip
    return trainer, callback


def watched(it, callback):
    """Returns a list, which receives at each load of the best model whether the learner is still in the run."""
    found, load = list[bool](), it._load_best_model

    def loads():
        found.append(callback.learner.stats().connected)
        load()

    it._load_best_model = loads
    return found


@pytest.fixture
def running(tmp_path):
    with core(tmp_path) as it:
        yield it


def test_tokens_are_those_of_the_attention_masks_of_all_micro_batches(running, tmp_path):
    it, callback = trainer(running, tmp_path, steps=12, gradient_accumulation_steps=2)
    it.train()
    stats = callback.learner.stats()
    assert (stats.steps, stats.tokens) == (12, 12 * 2 * BATCH * REAL_TOKENS)
    assert (stats.pending, stats.connected) == (0, False)
    assert learner_status(running).state == "left"
    eventually(lambda: running.status().contributions.merged >= 2)


def test_evaluation_and_saving_pause_and_the_log_has_the_runs_figures(running, tmp_path):
    it, callback = trainer(
        running, tmp_path, steps=12, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=6
    )
    it.train()
    stats = callback.learner.stats()
    assert stats.steps == 12
    assert stats.paused_s > 0.0
    logged = [entry["atoll/run_tokens"] for entry in it.state.log_history if "loss" in entry]
    assert logged == [steps * BATCH * REAL_TOKENS for steps in (4, 8, 12)]
    assert not math.isnan(learner_status(running).loss)


def test_other_integrations_get_the_runs_figures(running, tmp_path):
    import transformers

    seen = list[dict[str, float]]()

    class Elsewhere(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            seen.append(dict(logs))

    it, callback = trainer(running, tmp_path, steps=8)
    it.callback_handler.callbacks.insert(1, Elsewhere())  # as `report_to` does
    it.train()
    assert all("atoll/merged" in logs for logs in seen if "loss" in logs)
    assert len([logs for logs in seen if "loss" in logs]) > 0
    assert callback.learner.stats().steps == 8


def test_the_best_model_is_loaded_after_leaving(running, tmp_path):
    it, callback = trainer(
        running, tmp_path, steps=12, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,  # the worst
    )  # fmt: skip
    connected = watched(it, callback)
    it.train()
    assert connected == [False]
    stats = callback.learner.stats()
    assert stats.abandoned_tokens == 0
    assert stats.pending == 0
    assert "something other than the optimizer" not in stats.last_error
    assert it.state.best_model_checkpoint.endswith("checkpoint-3")
    eventually(lambda: running.status().contributions.pending == 0)
    status = running.status()
    assert status.tokens_merged == pytest.approx(status.tokens_trained)


def test_an_export_beside_the_models_configuration_loads_with_from_pretrained(running, tmp_path):
    from transformers import GPT2LMHeadModel

    it, _ = trainer(running, tmp_path, steps=16)
    it.train()
    eventually(lambda: running.status().contributions.pending == 0)
    folder = tmp_path / "exported"
    gpt().config.save_pretrained(folder)
    export_checkpoint(OperatorTarget(running.address), folder / "model.safetensors", initial=False)
    exported, first = load_file(folder / "model.safetensors"), gpt().state_dict()
    loaded = GPT2LMHeadModel.from_pretrained(folder).state_dict()
    assert exported.keys() <= loaded.keys()
    assert all(torch.equal(loaded[name], value) for name, value in exported.items())
    assert torch.equal(loaded["lm_head.weight"], loaded["transformer.wte.weight"])
    assert not torch.equal(loaded["lm_head.weight"], first["lm_head.weight"]), "the export must be trained"


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_early_stopping_leaves_before_the_best_model_is_loaded(running, tmp_path, strategy):
    import transformers

    stopping = transformers.EarlyStoppingCallback(1)
    it, callback = trainer(
        running, tmp_path, stopping, steps=64, eval_strategy=strategy, eval_steps=2, save_strategy=strategy,
        save_steps=2, load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    connected = watched(it, callback)
    it.train()
    assert connected == [False]
    assert callback.learner.stats().steps < 64
    assert callback.learner.stats().abandoned_tokens == 0
    assert learner_status(running).state == "left"


def test_an_error_in_training_leaves_and_comes_through(running, tmp_path):
    import transformers

    class Failing(transformers.TrainerCallback):
        def on_substep_end(self, *_, **__):
            raise ZeroDivisionError

    it, callback = trainer(running, tmp_path, Failing(), gradient_accumulation_steps=2)
    with pytest.raises(ZeroDivisionError):
        it.train()
    assert learner_status(running).state == "left"
    again, callback = trainer(running, tmp_path, steps=4)
    again.train()
    assert callback.learner.stats().steps == 4


def test_resuming_continues_with_the_checkpoints_optimizer_and_the_runs_parameters(running, tmp_path):
    it, callback = trainer(running, tmp_path, steps=8, save_strategy="steps", save_steps=8)
    it.train()
    eventually(lambda: running.status().contributions.pending == 0)
    mine = {name: value.clone() for name, value in it.model.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in it.optimizer.state.values()]
    found = list[list[torch.Tensor]]()

    import transformers

    class Looks(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, model=None, **_):
            found.append([each["exp_avg"].clone() for each in optimizer.state.values()])
            found.append([value.clone() for value in model.state_dict().values()])

    again, callback = trainer(running, tmp_path, Looks(), steps=12, model=gpt(seed=5), save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert again.state.global_step == 12
    assert callback.learner.stats().steps == 4, "only this process's tokens count"
    assert callback.learner.stats().earlier_steps == 8
    assert callback.learner.stats().tokens == 4 * BATCH * REAL_TOKENS
    for then, now in zip(moments, found[0], strict=True):
        assert torch.equal(then, now)
    assert not any(torch.equal(mine[name], value) for name, value in zip(mine, found[1], strict=True) if "h.0" in name)


def test_the_schedule_follows_the_runs_tokens_and_training_stops_at_their_target(tmp_path):
    target = 20 * BATCH * REAL_TOKENS
    with core(tmp_path, "--total-tokens", str(target)) as running:
        first, callback = trainer(running, tmp_path, steps=8, lr_scheduler_type="linear")
        first.args.max_steps = 8
        with structlog.testing.capture_logs() as logs:
            first.train()
        (early,) = [each for each in logs if "before the run's token target" in each["event"]]
        assert (early["run_tokens"], early["total_tokens"]) == (8 * BATCH * REAL_TOKENS, target)
        assert callback.learner.stats().steps == 8
        rates = [entry["learning_rate"] for entry in first.state.log_history if "learning_rate" in entry]
        assert rates[-1] > 0.006, "the schedule must be at 8 of 20 steps' tokens"
        second, callback = trainer(running, tmp_path, steps=1000, lr_scheduler_type="linear", logging_steps=1)
        with structlog.testing.capture_logs() as logs:
            second.train()
    assert not [each for each in logs if "token target" in each["event"]]
    assert callback.learner.stats().steps == 12, "training must stop at the run's target"
    rates = [entry["learning_rate"] for entry in second.state.log_history if "learning_rate" in entry]
    assert rates[0] == pytest.approx(0.01 * (1 - 8 / 20), abs=2e-4)
    assert second.lr_scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-5)


def test_a_schedule_may_follow_the_processs_own_steps(tmp_path):
    with core(tmp_path, "--total-tokens", "1000000") as running:
        it, callback = trainer(running, tmp_path, steps=8, options={"schedule": False})
        it.train()
    assert it.lr_scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-5)
    assert callback.learner.stats().steps == 8


def test_batches_without_tokens_need_a_counting_function(running, tmp_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(16, 16)

        def forward(self, x):
            return {"loss": (self.layer(x) - x).pow(2).mean()}

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            return {"x": torch.full((16,), index / 64)}

    def begun(**options):
        it, callback = trainer(running, tmp_path, steps=4, model=Model(), options=options, remove_unused_columns=False)
        it.train_dataset = Data()
        it.train()
        return callback

    with pytest.raises(atoll.LearnerError, match="cannot count the tokens of a batch"):
        begun()
    assert begun(tokens=lambda batch: batch["x"].numel()).learner.stats().tokens == 4 * BATCH * 16


KILLED = """
import os, signal, sys, threading
import atoll
from tests.integrations.world import Sentences, gpt
from transformers import Trainer, TrainerCallback, TrainingArguments
from atoll.integrations.transformers import AtollCallback
class Dies(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        threading.Event().wait(0.1)  # the core hears of some steps
        if state.global_step == int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)
args = TrainingArguments(output_dir=sys.argv[2], per_device_train_batch_size=4, max_steps=24, use_cpu=True,
    report_to=[], save_strategy="steps", save_steps=5, disable_tqdm=True)
callback = AtollCallback(server=sys.argv[1], name="a", drain_s=10.0)
trainer = Trainer(model=gpt(), args=args, train_dataset=Sentences(), callbacks=[callback, Dies()])
trainer.train(resume_from_checkpoint=os.path.exists(sys.argv[2] + "/checkpoint-5"))
stats = callback.learner.stats()
print("ended", trainer.state.global_step, stats.steps, stats.earlier_steps)
"""


def test_a_killed_process_resumes_from_its_trainers_checkpoint_under_its_name(running, tmp_path):
    def ran(dies_at):
        command = [sys.executable, "-c", KILLED, running.address, str(tmp_path / "out"), str(dies_at)]
        return subprocess.run(command, capture_output=True, text=True, timeout=180)

    assert ran(12).returncode == -signal.SIGKILL
    eventually(lambda: learner_status(running).state in {"silent", "live"})
    done = ran(-1)
    assert done.returncode == 0, done.stderr[-3000:]
    end, steps, earlier = map(int, done.stdout.split("ended ")[1].split())
    assert (end, steps) == (24, 14), "training must continue at step 10"
    assert 0 < earlier <= 12
    assert "joined at" in done.stdout + done.stderr
    eventually(lambda: running.status().contributions.merged >= 3)
