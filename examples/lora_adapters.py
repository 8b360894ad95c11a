"""LoRA adapters with PEFT and Hugging Face's Trainer. Learners exchange only the adapters.

pip install '.[transformers]' peft
python examples/lora_adapters.py --name eu-west

The base model has random parameters from one seed, so nothing is downloaded. Each learner builds the same base model.
"""

from __future__ import annotations

import argparse
import tempfile
import zlib
from typing import Any

import atoll  # noqa: F401 - before anything that imports grpc
import peft
import torch
from atoll.integrations.transformers import AtollCallback
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WORDS, LENGTH = 64, 32


def sequences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Returns sequences in which each token follows from the one before. seed: decides their first tokens."""
    tokens = [torch.randint(0, WORDS, (count,), generator=torch.Generator().manual_seed(seed))]
    while len(tokens) < LENGTH:
        tokens.append((5 * tokens[-1] + 17) % WORDS)
    return [{"input_ids": ids, "labels": ids} for ids in torch.stack(tokens, dim=1)]


def main() -> None:
    """Trains for --steps steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:7070", help="HOST:PORT of a core or front")
    parser.add_argument("--name", required=True, help="this learner's name, unique in the run")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    torch.manual_seed(0)  # the same base model for every learner; usually `from_pretrained`
    base = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4))
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    model.print_trainable_parameters()
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "output_dir": folder,
            "max_steps": options.steps,
            "per_device_train_batch_size": 16,
            "learning_rate": 1e-2,
            "logging_steps": max(1, options.steps // 6),
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**given),
            train_dataset=sequences(10_000, zlib.crc32(options.name.encode())),  # type: ignore[arg-type]  # a list will do
            callbacks=[AtollCallback(server=options.server, name=options.name)],
        )
        trainer.train()


main()
