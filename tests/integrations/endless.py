"""A learner that trains until SIGTERM: `python -m tests.integrations.endless TRAINER ADDRESS FOLDER`.

It prints "step 4" after its fourth step, and "ended" if training returns.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.integrations.world import Sentences, gpt

STEPS, SAID_AT = 1_000_000, 4


def say(steps: int) -> None:
    if steps == SAID_AT:
        print("step", steps, flush=True)


def transformers(address: str, folder: str) -> None:
    """Trains with Hugging Face's Trainer."""
    from atoll.integrations.transformers import AtollCallback
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Says(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            say(state.global_step)

    args = TrainingArguments(output_dir=folder, max_steps=STEPS, use_cpu=True, report_to=[], save_strategy="no")
    callbacks = [AtollCallback(server=address, name="a"), Says()]
    Trainer(model=gpt(), args=args, train_dataset=Sentences(), callbacks=callbacks).train()


def lightning(address: str, folder: str) -> None:
    """Trains with Lightning."""
    from atoll.integrations.lightning import AtollCallback
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = gpt()

        def training_step(self, batch: Any, _: int) -> Any:
            say(self.global_step)
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    Trainer(
        max_steps=STEPS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[AtollCallback(server=address, name="a")], default_root_dir=folder,
    ).fit(Module(), torch.utils.data.DataLoader(Sentences(), batch_size=4))  # fmt: skip


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("ended", flush=True)
