"""Token counts of batches as collators build them."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from atoll import LearnerError
from atoll.integrations.batch_tokens import TokenCounter, count_tokens

IDS = torch.arange(12).reshape(2, 6)
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])
LABELS = torch.where(MASK.bool(), IDS, -100)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": IDS, "attention_mask": MASK, "labels": IDS}, 7),
        (UserDict({"input_ids": IDS, "attention_mask": MASK}), 7),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 6, 6), "labels": LABELS}, 7),
        ({"input_ids": IDS, "labels": LABELS}, 7),
        ({"input_ids": IDS}, 12),
        (IDS, 12),
        ((IDS, LABELS), 7),
        ([IDS, torch.rand(2)], 12),
        ((torch.rand(2, 3, 4, 4), torch.tensor([1, 2])), 2),
    ],
)
def test_tokens_are_counted(batch, tokens):
    assert int(count_tokens(batch)) == tokens


@pytest.mark.parametrize("batch", [{"pixels": IDS}, torch.rand(2, 3), (torch.rand(2), torch.rand(2)), [], "text", None])
def test_a_batch_without_tokens_gives_a_one_line_error(batch):
    with pytest.raises(LearnerError, match=r"^cannot count the tokens of a batch of type .*: pass tokens="):
        count_tokens(batch)


def test_a_counter_adds_micro_batches_and_begins_again():
    counter = TokenCounter(None)
    counter.add({"input_ids": IDS})
    counter.add({"attention_mask": MASK})
    assert (counter.take(), counter.take()) == (19, 0)
    own = TokenCounter(lambda batch: batch["images"])
    own.add({"images": 5})
    assert own.take() == 5
