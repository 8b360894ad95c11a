"""Hugging Face's Trainer as a learner: the callback is all that Atoll needs.

pip install '.[transformers]'
python examples/hf_trainer.py --name eu-west

The model is a small GPT-2 with random parameters, and the text is arithmetic, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
import zlib
from typing import Any

import atoll  # noqa: F401 - before anything that imports grpc
import torch
from atoll.integrations.transformers import AtollCallback
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WORDS, LENGTH = 64, 32


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sequences in which each token follows from the one before. seed: decides their first tokens."""

    def __init__(self, count: int, seed: int) -> None:
        self._first = torch.randint(0, WORDS, (count,), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = [int(self._first[index])]
        while len(tokens) < LENGTH:
            tokens.append((5 * tokens[-1] + 17) % WORDS)
        ids = torch.tensor(tokens)
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def main() -> None:
    """Trains for --steps steps, and evaluates twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:7070", help="HOST:PORT of a core or front")
    parser.add_argument("--name", required=True, help="this learner's name, unique in the run")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4)
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "output_dir": folder,
            "max_steps": options.steps,
            "per_device_train_batch_size": 16,
            "learning_rate": 3e-3,
            "eval_strategy": "steps",
            "eval_steps": max(1, options.steps // 2),
            "logging_steps": max(1, options.steps // 6),
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(**given),
            train_dataset=Sequences(100_000, zlib.crc32(options.name.encode())),  # own data for each learner
            eval_dataset=Sequences(256, seed=0),
            callbacks=[AtollCallback(server=options.server, name=options.name)],
        )
        trainer.train()


main()
