"""The base model of fine-tuning: trained once on this machine by the recipe's `base`, and kept under build/."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from atoll.reference.model import Transformer, build
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.quality.recipe import Recipe

FOLDER = Path(__file__).parents[2] / "build" / "quality"


def path_of(base: Recipe) -> Path:
    """Returns the file of a base model."""
    return FOLDER / f"base-{base.size}-{hashlib.sha256(base.label().encode()).hexdigest()[:12]}.safetensors"


def keep(model: Transformer, base: Recipe) -> None:
    """Writes a trained base model. base: its recipe."""
    path = path_of(base)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file(model.state_dict(), part)
    part.rename(path)


def read(base: Recipe) -> Transformer:
    """Returns a new model with the parameters of a base model, which `train.make_base` has made."""
    model = build(base.model, base.seed)
    model.load_state_dict(_state(path_of(base)))
    return model


def digest(base: Recipe) -> str:
    """Returns the SHA-256 of a base model's file, for records."""
    return hashlib.sha256(path_of(base).read_bytes()).hexdigest()


@cache
def _state(path: Path) -> dict[str, Tensor]:
    return load_file(path)
