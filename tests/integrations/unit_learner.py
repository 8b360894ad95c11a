"""A learner that trains on leased units: `python -m tests.integrations.unit_learner TRAINER ADDRESS NAME STEPS FOLDER`.

Before its first step, it waits in FOLDER for the learners whose names follow. At the end, it prints the numbers of the
rows of each training batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from atoll.data import Rows

from tests.end_to_end.world import eventually
from tests.integrations.world import LENGTH, VOCABULARY, gpt

ROWS, EPOCHS, BATCH = 160, 2, 2
UNIT = BATCH  # rows in a unit: the batch that a trainer fetches in advance is a whole unit


class Numbered(torch.utils.data.Dataset):
    """Rows whose first two tokens are the row's number."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor([index % VOCABULARY, index // VOCABULARY, *range(LENGTH - 2)])
        return {"input_ids": ids, "labels": ids.clone()}


class Watched:
    """Records the rows of each batch that the model trains on."""

    def __init__(self, model: torch.nn.Module, name: str, folder: Path, others: list[str]) -> None:
        self.rows = list[list[int]]()
        self._mine, self._others = folder / name, [folder / other for other in others]
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, model: torch.nn.Module, arguments: object, named: dict[str, torch.Tensor]) -> None:
        self._mine.touch()
        if not self.rows:
            eventually(lambda: all(each.exists() for each in self._others), 120.0)
        self.rows.append([int(ids[0] + VOCABULARY * ids[1]) for ids in named["input_ids"]])


def transformers(address: str, name: str, steps: int, model: Any, folder: Path) -> None:
    """Trains with Hugging Face's Trainer."""
    from atoll.integrations.transformers import AtollCallback
    from transformers import Trainer, TrainingArguments

    callback = AtollCallback(server=address, name=name)
    data = callback.units(Rows(Numbered(), UNIT), "rows", epochs=EPOCHS)
    args = TrainingArguments(
        output_dir=str(folder / f"{name}.out"), per_device_train_batch_size=BATCH, max_steps=steps, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=args, train_dataset=data, callbacks=[callback]).train()


def lightning(address: str, name: str, steps: int, model: Any, folder: Path) -> None:
    """Trains with Lightning."""
    from atoll.integrations.lightning import AtollCallback
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    callback = AtollCallback(server=address, name=name)
    data = callback.units(Rows(Numbered(), UNIT), "rows", epochs=EPOCHS)
    Trainer(
        max_steps=steps, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[callback], default_root_dir=str(folder),
    ).fit(Module(), torch.utils.data.DataLoader(data, batch_size=BATCH))  # fmt: skip


if __name__ == "__main__":
    trainer, address, name, steps, folder, *others = sys.argv[1:]
    model = gpt()
    watched = Watched(model, name, Path(folder), others)
    globals()[trainer](address, name, int(steps), model, Path(folder))
    print("trained", json.dumps(watched.rows), flush=True)
