"""LoRA adapters (arXiv 2106.09685) for the reference model's blocks: only the adapters train."""

from __future__ import annotations

import math

import torch
from atoll.reference.model import Transformer
from torch import Tensor, nn

RANK = 8
SCALE = 2.0  # of the adapters' product: alpha / rank, with the usual alpha of twice the rank


class LowRank(nn.Module):
    """A frozen linear layer plus `SCALE` times the product of two small matrices, `up` (out, RANK) x `down` (RANK, in).

    `up` starts at zero, so the layer starts as the frozen one.
    """

    def __init__(self, frozen: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.empty(RANK, frozen.in_features))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, RANK))
        nn.init.normal_(self.down, 0.0, 1 / math.sqrt(frozen.in_features), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer to x (..., in). Returns (..., out)."""
        plain: Tensor = self.frozen(x)
        return plain + SCALE * (x @ self.down.T @ self.up.T)

    def merged(self) -> Tensor:
        """Returns the weight (out, in) of one linear layer that computes the same."""
        return self.frozen.weight + SCALE * (self.up @ self.down)


def adapt(model: Transformer, seed: int) -> None:
    """Freezes a model, and puts an adapter around each linear layer of its blocks. seed: of the adapters."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, LowRank(layer, generator))


def export(model: Transformer) -> dict[str, Tensor]:
    """Returns the state_dict of a plain model that computes the same as an adapted one."""
    state = model.state_dict()
    for name, layer in model.named_modules():
        if isinstance(layer, LowRank):
            for part in ("frozen.weight", "down", "up"):
                del state[f"{name}.{part}"]
            state[f"{name}.weight"] = layer.merged().detach()
    return state
