"""A byte-level, decoder-only transformer: pre-norm, rotary positions, GELU. Bytes need no tokenizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Width, number of layers, number of heads, and context length in bytes."""

    width: int
    layers: int
    heads: int
    context: int


SIZES = {
    "tiny": ModelSize(width=128, layers=5, heads=4, context=128),  # 1.05M parameters
    "25m": ModelSize(width=512, layers=8, heads=8, context=256),  # 25.4M
    "124m": ModelSize(width=832, layers=15, heads=13, context=512),  # 125M
}


class Block(nn.Module):
    """Attention and MLP, each on a normalised copy of the residual stream."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.norm_mlp = nn.RMSNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Applies the block. x: (batch, time, width). cos, sin: (time, head / 2). Returns a tensor of x's shape."""
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        mlp: Tensor = self.down(functional.gelu(self.up(self.norm_mlp(x))))
        return x + mlp


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embedding (arXiv 2104.09864) to the halves of each head. x: (..., time, head)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class Transformer(nn.Module):
    """Predicts the next byte. Embedding and head are not tied, because tying saves little with 256 symbols."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        angles = _angles(size)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, symbols: Tensor) -> Tensor:
        """Returns logits, (batch, time, 256). symbols: int64 (batch, time)."""
        time = symbols.shape[1]
        cos, sin = self.get_buffer("cos"), self.get_buffer("sin")
        x = self.embedding(symbols)
        for block in self.blocks:
            x = block(x, cos[:time], sin[:time])
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, window: Tensor) -> Tensor:
        """Returns the mean cross-entropy of each next byte, in nats. window: int64 (batch, time + 1)."""
        logits = self(window[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())


def _angles(size: ModelSize) -> Tensor:
    half = size.width // size.heads // 2
    rates = 10_000.0 ** (-torch.arange(half) / half)
    return torch.outer(torch.arange(size.context), rates)


def build(size: str | ModelSize, seed: int) -> Transformer:
    """Returns a new model. A seed always gives the same parameters, regardless of the state of torch's generator."""
    model = Transformer(SIZES[size] if isinstance(size, str) else size)
    generator = torch.Generator().manual_seed(seed)
    scale = 0.02 if model.size.width >= 512 else 0.05
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue  # norms start at one
        # Layers that write to the residual stream start smaller, so that its variance does not grow with depth.
        writes = name.endswith(("out.weight", "down.weight"))
        deviation = scale / math.sqrt(2 * model.size.layers) if writes else scale
        nn.init.normal_(parameter, 0.0, deviation, generator=generator)
    return model
