"""A model with many unusual properties."""

from __future__ import annotations

import torch
from atoll.model.parameters import Parameters
from torch import nn


class Odd(nn.Module):
    """A model with a tied head, a frozen part, a buffer, a bfloat16 layer, and a non-contiguous tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.middle = nn.Linear(8, 8).to(torch.bfloat16)
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.plain = nn.Linear(20, 30)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("seen", torch.arange(3))


def parameters(model: nn.Module) -> Parameters:
    """Returns the parameters, with an optimizer of all trainable ones."""
    return Parameters(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))
