"""The training of both sides: the reference model, in steps of a fixed length.

A step is padded to a fixed length, as if an accelerator computed while the CPU is idle. Four regions therefore do not
slow each other down on two CPUs. The links' rate follows from the step length, so the ratio of the two is exact.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from atoll.reference import data
from atoll.reference.model import SIZES, Transformer, build
from atoll.reference.train import optimizer_for
from torch import Tensor

SIZE, BATCH = "tiny", 2
PEAK, WARM_UP = 3e-3, 20  # learning rate, and number of warm-up steps: the same for both sides
SEED = 0
PAPER_STEP_S = 3.0  # step of the paper's model with 12B parameters


@dataclass(frozen=True, slots=True)
class Job:
    """The job of one rank or learner. record: the file with one line per step."""

    number: int
    step_s: float
    steps: int
    record: Path


class Pace:
    """Takes steps of a fixed length, and records their times in a file."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        self.job = job
        self.model: Transformer = build(SIZE, SEED)
        self.optimizer = optimizer_for(self.model, PEAK)
        corpus = data.load(None, SIZES[SIZE].context)
        stream = f"learner-{job.number}"
        self.batches: Iterator[Tensor] = data.batches(corpus.training, BATCH, SIZES[SIZE].context, SEED, stream)
        self._file = job.record.open("w", buffering=1)

    def begin(self, step: int) -> tuple[float, Tensor]:
        """Begins a step. Returns its time in monotonic seconds, and its batch."""
        rate = PEAK * min(1.0, (step + 1) / WARM_UP)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return time.monotonic(), next(self.batches)

    def pad(self, began: float, part: float = 1.0) -> None:
        """Sleeps until this part of the step's length has passed, as if an accelerator computed. part: 0 to 1."""
        time.sleep(max(0.0, began + part * self.job.step_s - time.monotonic()))

    def end(self, step: int, began: float, loss: float) -> None:
        """Writes a line with the step, its beginning and end in monotonic seconds, and its loss."""
        self._file.write(json.dumps([step, began, time.monotonic(), loss]) + "\n")


def tokens_of_step() -> int:
    """Returns the number of tokens in one learner's step."""
    return BATCH * SIZES[SIZE].context
