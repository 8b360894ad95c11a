"""One rank of a torchrun job of two ranks: `python -m tests.integrations.rank TRAINER ADDRESS FOLDER`.

Rank 0 prints the learner's counters at the end. Trainers whose names end with "_fsdp2" shard the model. The others
(without Accelerate) save a checkpoint in FOLDER and resume from it. If KILL_AT is set, rank 1 kills its process group
after that step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import atoll  # must come before imports of grpc
import torch
import torch.distributed.fsdp

from tests.integrations.world import Sentences, gpt

STEPS, SAVE_EVERY, BATCH = 8, 3, 4
KILL_AT = int(os.environ.get("KILL_AT", "-1"))
BLOCK = "GPT2Block"  # the module that is sharded


def may_die(step: int) -> None:
    """Kills this rank's process group, which includes its loader's workers, if it is rank 1 and the step is KILL_AT."""
    if step == KILL_AT and os.environ["RANK"] == "1":
        os.killpg(0, signal.SIGKILL)


def transformers(address: str, folder: str) -> Any:
    """Trains with Hugging Face's Trainer, which also evaluates."""
    from atoll.integrations.transformers import AtollCallback
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Dies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            may_die(state.global_step)

    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=BATCH, max_steps=STEPS, use_cpu=True, ddp_backend="gloo",
        report_to=[], eval_strategy="steps", eval_steps=SAVE_EVERY, save_strategy="steps", save_steps=SAVE_EVERY,
        load_best_model_at_end=True, dataloader_num_workers=1, gradient_accumulation_steps=2,
    )  # fmt: skip
    callback = AtollCallback(server=address, name="a", drain_s=20.0)
    data = {"train_dataset": Sentences(), "eval_dataset": Sentences(8)}
    trainer = Trainer(model=gpt(), args=args, callbacks=[callback, Dies()], **data)
    trainer.train(resume_from_checkpoint=Path(folder, f"checkpoint-{SAVE_EVERY}").exists())
    assert trainer.state.global_step == STEPS
    return callback.learner


def transformers_fsdp2(address: str, folder: str) -> Any:
    """Trains with Hugging Face's Trainer, which shards the model and evaluates.

    It saves nothing: on CPUs, the Trainer's save of a sharded model aborts also without Atoll.
    """
    from atoll.integrations.transformers import AtollCallback
    from transformers import Trainer, TrainingArguments

    allow_fsdp_on_cpus()
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=BATCH, max_steps=STEPS, use_cpu=True, ddp_backend="gloo",
        report_to=[], eval_strategy="steps", eval_steps=4, save_strategy="no", dataloader_num_workers=1,
        gradient_accumulation_steps=2, fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": [BLOCK]},
    )  # fmt: skip
    callback = AtollCallback(server=address, name="a", drain_s=20.0)
    data = {"train_dataset": Sentences(), "eval_dataset": Sentences(8)}
    trainer = Trainer(model=gpt(), args=args, callbacks=[callback], **data)
    trainer.train()
    check_sharded(trainer.model)
    return callback.learner


def lightning(address: str, folder: str) -> Any:
    """Trains with Lightning."""
    found, _ = fitted("ddp", address, folder)
    return found


def lightning_fsdp2(address: str, folder: str) -> Any:
    """Trains with Lightning, whose module shards the model."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    found, module = fitted(strategy, address, folder)
    check_sharded(module)
    return found


def fitted(strategy: Any, address: str, folder: str) -> tuple[Any, Any]:
    """Returns the learner and the module after Lightning's `fit`."""
    from atoll.integrations.lightning import AtollCallback
    from lightning import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Dies(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            may_die(trainer.global_step)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = gpt()

        def configure_model(self) -> None:
            if strategy != "ddp":
                torch.distributed.fsdp.fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    callback, module, saved = AtollCallback(server=address, name="a", drain_s=20.0), Module(), Path(folder, "a.ckpt")
    callbacks = [callback, Dies()]
    if saves := strategy == "ddp":
        callbacks += [ModelCheckpoint(folder, "a", every_n_train_steps=SAVE_EVERY, enable_version_counter=False)]
    trainer = Trainer(
        max_steps=STEPS, accelerator="cpu", strategy=strategy, devices=2, logger=False, enable_checkpointing=saves,
        enable_progress_bar=False, callbacks=callbacks, accumulate_grad_batches=2, default_root_dir=folder,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Sentences(), batch_size=BATCH, num_workers=1)
    trainer.fit(module, loader, ckpt_path=saved if saved.exists() else None)
    assert trainer.global_step == STEPS
    return callback.learner, module


def accelerate(address: str, folder: str) -> Any:
    """Trains with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    found, _ = accelerated(accelerator, address)
    accelerator.save_state(f"{folder}/state")
    return found


def accelerate_fsdp2(address: str, folder: str) -> Any:
    """Trains with Accelerate, which shards the model."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    allow_fsdp_on_cpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[BLOCK]
    )
    found, model = accelerated(Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin), address)
    check_sharded(model)
    return found


def accelerated(accelerator: Any, address: str) -> tuple[Any, Any]:
    """Returns the learner and the prepared model after a loop with Accelerate."""
    from atoll.integrations.accelerate import AcceleratedLearner

    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = torch.utils.data.DataLoader(Sentences(16 * BATCH * STEPS), batch_size=BATCH, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with AcceleratedLearner(accelerator, model, optimizer, server=address, name="a", drain_s=20.0) as learner:
        for number, batch in enumerate(loader, 1):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            learner.step(batch)
            if number == 2 * STEPS:
                break
    return learner.learner, model


def allow_fsdp_on_cpus() -> None:
    """Makes Accelerate, which the Trainer also uses, shard models on CPUs. Without it, Accelerate uses DDP there."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    begin = AcceleratorState.__init__

    def begin_sharded(self: Any, *arguments: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        begin(self, *arguments, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = begin_sharded


def check_sharded(model: torch.nn.Module) -> None:
    """Raises AssertionError unless each rank holds a part of every parameter."""
    from atoll.ranks.placements import reshard
    from torch.distributed.tensor import DTensor

    reshard(model)  # nothing has to be adopted after the last evaluation, so the learner may not have done it
    assert all(isinstance(each, DTensor) for each in model.parameters())
    assert all(each.to_local().numel() < each.numel() for each in model.parameters())


if __name__ == "__main__":
    found: atoll.Learner = globals()[sys.argv[1]](*sys.argv[2:])
    if os.environ["RANK"] == "0":
        stats = found.stats()
        counted = stats.steps, stats.tokens, stats.pending, stats.abandoned_tokens
        print("counted", *counted, stats.earlier_steps, stats.earlier_tokens, flush=True)
