"""Models and data for tests of integrations. Models are built from configurations, so that nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from atoll_wire import outer_pb2 as pb
from torch.utils.data import Dataset

from tests.end_to_end.world import Core

LENGTH, VOCABULARY = 16, 32
torch.set_num_threads(1)


def gpt(seed: int = 0) -> Any:
    """Returns a GPT-2 with one small layer, and an output head tied to the embedding."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Sentences(Dataset):
    """Sequences in which each token is 7 times the previous one plus 3. The first `padded` positions are padding."""

    def __init__(self, count: int = 64, padded: int = 4) -> None:
        self._count, self._padded = count, padded

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = [index % VOCABULARY]
        while len(ids) < LENGTH:
            ids.append((ids[-1] * 7 + 3) % VOCABULARY)
        tokens, place = torch.tensor(ids), torch.arange(LENGTH)
        mask = (place >= self._padded).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask.bool(), tokens, -100)}


REAL_TOKENS = LENGTH - 4  # tokens of a sentence without padding


def learner_status(core: Core, name: str = "a") -> pb.LearnerStatus:
    return next(each for each in core.status().learners if each.learner == name)
