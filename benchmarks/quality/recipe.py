"""A recipe: everything that decides the result of one run of the quality report."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from atoll.reference.model import SIZES, ModelSize
from atoll_server.quorum import Quorum
from atoll_server.settings import RunSettings

# Smaller than the reference sizes, so that two CPUs can train them often enough to compare settings.
SMALL = {
    "40k": ModelSize(width=32, layers=2, heads=2, context=64),
    "180k": ModelSize(width=64, layers=3, heads=4, context=64),
    "490k": ModelSize(width=96, layers=4, heads=4, context=64),
    "1m": ModelSize(width=128, layers=5, heads=4, context=64),
}


KEPT_ON_DISK = {"keep_snapshots", "record"}  # settings of a run that do not change its result


@dataclass(frozen=True, slots=True)
class Recipe:
    """One run. All methods see the same tokens: seed, m and n decide batch n of learner m.

    batch: sequences per step, summed over learners (of equal speed). steps: number per learner, at equal speed.
    method: "data-parallel" (every step averages all gradients), "synchronous" (learners wait for the new version) or
    "decoupled". run: (name, value) of settings that are not at Atoll's defaults. speeds: relative, of each learner.
    delay: one way, in steps. failures: mean steps of a learner between failures, or 0 for none. repair: in steps.
    policy: see `policies`. shards: number of shards. fine_tuning: begin with the base model instead of random
    parameters, and train "all" of them, or only adapters ("lora"). The text is then the standard library's tests.
    """

    method: Literal["data-parallel", "synchronous", "decoupled"]
    size: str = "180k"
    steps: int = 1000
    batch: int = 32
    learners: int = 4
    learning_rate: float = 3e-3
    run: tuple[tuple[str, Any], ...] = ()
    adoption: Literal["rebase", "overwrite"] = "rebase"
    merging: Literal["direction", "average"] = "direction"
    down: Literal["coded", "float32"] = "coded"
    speeds: tuple[float, ...] = ()
    delay: float = 0.1
    failures: float = 0.0
    repair: float = 0.0
    policy: str = ""
    shards: int = 1
    fine_tuning: Literal["", "all", "lora"] = ""
    seed: int = 0

    def label(self) -> str:
        """Returns one line with the method, all fields that differ from the defaults, and the seed."""
        said = [
            f"{each.name} {_plain(getattr(self, each.name))}"
            for each in fields(self)
            if each.name not in {"method", "seed"} and getattr(self, each.name) != each.default
        ]
        return ", ".join([self.method, *said, f"seed {self.seed}"])

    def deciding_settings(self) -> dict[str, Any] | None:
        """Returns the run's settings that decide its result, including Atoll's defaults, or None for data-parallel.

        When a default changes, runs that use this default must be trained again.
        """
        return None if self.method == "data-parallel" else self.settings.model_dump(mode="json", exclude=KEPT_ON_DISK)

    @property
    def model(self) -> ModelSize:
        """The size of the model."""
        return SMALL[self.size] if self.size in SMALL else SIZES[self.size]

    @property
    def base(self) -> Recipe:
        """The recipe of the model that fine-tuning begins with."""
        return Recipe("data-parallel", size=self.size, learning_rate=1.5e-2)

    @property
    def text(self) -> Path | None:
        """The argument of `data.load` for the run's text."""
        return Path(sysconfig.get_path("stdlib"), "test") if self.fine_tuning else None

    @property
    def settings(self) -> RunSettings:
        """The run's settings: Atoll's defaults with the changes in `run`.

        "synchronous" has one fragment and a quorum of all learners.
        """
        given = {"total_tokens": self.tokens} | dict(self.run)
        if "quorum" in given:
            given["quorum"] = Quorum.parse(given["quorum"]).model_dump()
        if self.method == "synchronous":
            given = {"fragments": 1, "quorum": Quorum(share=1.0).model_dump(), "codec": "float32"} | given
        return RunSettings().changed(**given)

    @property
    def tokens(self) -> int:
        """Tokens of the whole run, summed over learners."""
        return self.steps * self.batch * self.model.context


def _plain(value: object) -> str:
    """Formats a value: `(("inner_steps", 12),)` as "inner_steps=12", and speeds as "0.5/0.8"."""
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else str(value)
    pairs = all(isinstance(each, tuple) for each in value)
    return " ".join("=".join(map(_plain, each)) for each in value) if pairs else "/".join(map(_plain, value))
