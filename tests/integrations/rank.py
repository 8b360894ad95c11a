"""One rank of a torchrun job of two ranks: `python -m tests.integrations.rank TRAINER ADDRESS FOLDER`.

Rank 0 prints the learner's counters at the end.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import atoll  # must come before imports of grpc
import torch

from tests.integrations.world import Sentences, gpt

STEPS, BATCH = 8, 4


def transformers(address: str, folder: str) -> Any:
    """Trains with Hugging Face's Trainer, which evaluates and saves after half of the steps."""
    from atoll.integrations.transformers import AtollCallback
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=BATCH, max_steps=STEPS, use_cpu=True, ddp_backend="gloo",
        report_to=[], eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4,
        load_best_model_at_end=True, dataloader_num_workers=1, gradient_accumulation_steps=2,
    )  # fmt: skip
    callback = AtollCallback(server=address, name="a", drain_s=20.0)
    Trainer(model=gpt(), args=args, train_dataset=Sentences(), eval_dataset=Sentences(8), callbacks=[callback]).train()
    return callback.learner


def lightning(address: str, folder: str) -> Any:
    """Trains with Lightning."""
    from atoll.integrations.lightning import AtollCallback
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = gpt()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    callback = AtollCallback(server=address, name="a", drain_s=20.0)
    Trainer(
        max_steps=STEPS, accelerator="cpu", strategy="ddp", devices=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[callback], accumulate_grad_batches=2, default_root_dir=folder,
    ).fit(Module(), torch.utils.data.DataLoader(Sentences(), batch_size=BATCH, num_workers=1))  # fmt: skip
    return callback.learner


def accelerate(address: str, folder: str) -> Any:
    """Trains with Accelerate."""
    from accelerate import Accelerator
    from atoll.integrations.accelerate import AcceleratedLearner

    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), gpt()
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
    accelerator.save_state(f"{folder}/state")
    return learner.learner


if __name__ == "__main__":
    found: atoll.Learner = globals()[sys.argv[1]](*sys.argv[2:])
    if os.environ["RANK"] == "0":
        stats = found.stats()
        print("counted", stats.steps, stats.tokens, stats.pending, stats.abandoned_tokens, flush=True)
