"""Trains a small GPT on text, byte by byte, with Muon for matrices and AdamW for the rest, and draws its loss curve.

pip install '.[learner,plots]'
python examples/gpt.py --name eu-west --curve loss.png

The text is the source code of Python's standard library, or the file --text. The model has rotary positions, RMSNorm
without parameters, normalised queries and keys, and squared ReLU. `torch.optim.Muon` needs torch 2.9 or later, and
--curve needs matplotlib, which the extra `plots` installs.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
import zlib
from importlib.util import find_spec
from pathlib import Path

import atoll  # before anything that imports grpc
import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without parameters."""
    return functional.rms_norm(x, (x.shape[-1],))


def rotated(x: Tensor) -> Tensor:
    """Adds positions to queries or keys, float32 (batch, heads, length, size), by rotating pairs of values."""
    half = x.shape[-1] // 2
    speed = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], dim=-1)


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(norm(rotated(q)), norm(rotated(k)), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.relu(self.up(norm(x))).square())


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Returns the mean loss per byte. text: int64 (batch, length + 1)."""
        logits = self.head(norm(self.blocks(norm(self.embedding(text[:, :-1])))))
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def corpus(file: Path | None, most: int = 8_000_000) -> Tensor:
    """Returns text as bytes, uint8 (bytes,)."""
    files = [file] if file is not None else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(each.read_bytes() for each in files)[:most]), dtype=torch.uint8)


def windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Returns random windows of the text, int64 (count, length + 1)."""
    starts = torch.randint(0, len(text) - length - 1, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(length + 1)].long()


def draw(curve: list[tuple[int, float]], file: Path, name: str) -> None:
    """Draws the held-out loss over the run's tokens."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only --curve needs it

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([tokens / 1e6 for tokens, _ in curve], [loss for _, loss in curve], marker="o", markersize=3)
    axes.set(xlabel="million bytes trained by all learners", ylabel="held-out loss per byte", title=f"Learner {name}")
    axes.grid(alpha=0.3)
    figure.savefig(file)


def main() -> None:
    """Trains for --steps steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:7070", help="HOST:PORT of a core or front")
    parser.add_argument("--name", required=True, help="this learner's name, unique in the run")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--text", type=Path, help="a file; its last twentieth is held out")
    parser.add_argument("--tls", help="directory of certificates from `atoll certs`")
    parser.add_argument("--curve", type=Path, help="picture of the loss curve")
    for option, default in (("width", 128), ("layers", 4), ("heads", 4), ("length", 128), ("batch", 16)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    if options.curve is not None and find_spec("matplotlib") is None:
        sys.exit("error: --curve needs matplotlib: run `pip install '.[learner,plots]'`, or omit --curve")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = corpus(options.text)
    training, held_out = text[: -len(text) // 20], text[-len(text) // 20 :]
    torch.manual_seed(0)
    model = GPT(options.width, options.layers, options.heads).to(device)
    matrices = list(model.blocks.parameters())
    others = [*model.embedding.parameters(), *model.head.parameters()]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3, betas=(0.8, 0.95))]
    generator = torch.Generator().manual_seed(zlib.crc32(options.name.encode()))  # own windows for each learner
    exam = windows(held_out, 32, options.length, torch.Generator().manual_seed(0)).to(device)
    curve: list[tuple[int, float]] = []
    every, began = max(1, options.steps // 15), time.monotonic()

    where = {"server": options.server, "name": options.name, "tls": options.tls}
    with atoll.Learner(model, optimizers, **where) as learner:
        for step in range(1, options.steps + 1):
            batch = windows(training, options.batch, options.length, generator).to(device)
            loss = model(batch)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            learner.step(tokens=batch[:, 1:].numel(), loss=loss.item())
            if step % every == 0:
                with torch.no_grad():
                    curve.append((learner.run_tokens, model(exam).item()))
                seconds, merged = time.monotonic() - began, learner.stats().merged
                print(f"step {step}: held-out loss {curve[-1][1]:.3f}, {merged} merged, {seconds:.0f} s", flush=True)
    if options.curve is not None:
        draw(curve, options.curve, options.name)


main()
