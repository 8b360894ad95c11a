"""Runs plain loops with other optimizers and precisions: python -m benchmarks.trainers.loops [--json PATH].

Each case has a new core. A loop must have merged work at its end, or be refused in one line. It needs the packages
bitsandbytes and schedulefree.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import atoll
import torch
from atoll.demo.processes import children
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.conditions import conditions, write_record

WIDTH, VOCABULARY, LENGTH, BATCH = 32, 256, 16, 8
STEPS = 48
SPOILT = 20  # the step at which a GradScaler finds gradients that are not finite
LONGEST_S = 120.0
OPTIONS = ["--fragments", "4", "--inner-steps", "8"]
PACKAGES = ("torch", "bitsandbytes", "schedulefree")
Optimizers = Any  # one optimizer or several
Step = Callable[[int], None]  # trains on one batch; called with the step's number


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a loop. refusal: the error's text, if the learner was refused.

    steps: those that the learner counted, of `taken`. merged_s: seconds from joining to the first merge.
    """

    case: str
    refusal: str = ""
    taken: int = 0
    steps: int = 0
    merged_s: float = 0.0


def model() -> nn.Module:
    """Returns a language model with 17,728 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
    )


def loss_of(trained: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Returns the loss of a random batch."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    logits = trained(tokens)
    return cross_entropy(logits.flatten(0, -2).float(), tokens.flatten())


def usual(trained: Callable[..., torch.Tensor], *optimizers: torch.optim.Optimizer) -> Step:
    """Returns a step without anything special."""

    def step(_: int) -> None:
        for each in optimizers:
            each.zero_grad()
        loss_of(trained).backward()
        for each in optimizers:
            each.step()

    return step


def plain(trained: nn.Module, **options: Any) -> tuple[Optimizers, Step]:  # noqa: ANN401 - AdamW's
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-2, **options)
    return optimizer, usual(trained, optimizer)


def fused(trained: nn.Module) -> tuple[Optimizers, Step]:
    return plain(trained, fused=True)


def eight_bit(trained: nn.Module) -> tuple[Optimizers, Step]:
    optimizer = importlib.import_module("bitsandbytes.optim").AdamW8bit(trained.parameters(), 1e-2)
    return optimizer, usual(trained, optimizer)


def schedule_free(trained: nn.Module) -> tuple[Optimizers, Step]:
    optimizer = importlib.import_module("schedulefree").AdamWScheduleFree(trained.parameters(), 1e-2)
    optimizer.train()
    return optimizer, usual(trained, optimizer)


def compiled(trained: nn.Module) -> tuple[Optimizers, Step]:
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
    return optimizer, usual(torch.compile(trained, backend="aot_eager"), optimizer)


def autocast(trained: nn.Module) -> tuple[Optimizers, Step]:
    optimizer, step = plain(trained)

    def in_bfloat16(number: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            step(number)

    return optimizer, in_bfloat16


def scaled(trained: nn.Module, **options: Any) -> tuple[Optimizers, Step]:  # noqa: ANN401 - AdamW's
    optimizer, scaler = torch.optim.AdamW(trained.parameters(), 1e-2, **options), torch.amp.GradScaler("cpu")

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss = loss_of(trained) * (float("inf") if number == SPOILT else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return optimizer, step


def scaled_fused(trained: nn.Module) -> tuple[Optimizers, Step]:
    return scaled(trained, fused=True)


def muon(trained: nn.Module) -> tuple[Optimizers, Step]:
    matrices = [each.weight for each in trained if isinstance(each, nn.Linear)]  # type: ignore[attr-defined]
    others = [each for each in trained.parameters() if all(each is not matrix for matrix in matrices)]
    both = [torch.optim.Muon(matrices, 1e-2), torch.optim.AdamW(others, 1e-2)]
    return both, usual(trained, *both)


def muon_alone(trained: nn.Module) -> tuple[Optimizers, Step]:
    (first, _), step = muon(trained)
    return first, step


CASES: dict[str, Callable[[nn.Module], tuple[Optimizers, Step]]] = {
    "AdamW": plain,
    "AdamW, fused=True": fused,
    "8-bit AdamW of bitsandbytes": eight_bit,
    "schedule-free AdamW": schedule_free,
    "torch.compile, backend aot_eager": compiled,
    "autocast in bfloat16": autocast,
    "GradScaler, with one skipped step": scaled,
    "GradScaler with fused AdamW, with one skipped step": scaled_fused,
    "Muon and AdamW as a list": muon,
    "Muon and AdamW, only one passed": muon_alone,
}
BESIDE = "a bfloat16 island in the run of a float32 island"


def run(case: str, address: str, trained: nn.Module, optimizers: Optimizers, step: Step) -> Outcome:
    """Trains at least STEPS steps, until work was merged. Raises SystemExit after LONGEST_S seconds."""
    learner, taken, merged_s = atoll.Learner(trained, optimizers, address, case[:4].strip()), 0, 0.0
    try:
        with learner:
            began = time.monotonic()
            while taken < STEPS or not merged_s:
                step(taken)
                learner.step(tokens=BATCH * LENGTH)
                taken += 1
                if not merged_s and learner.stats().merged:
                    merged_s = time.monotonic() - began
                if time.monotonic() - began > LONGEST_S:
                    raise SystemExit(f"{case}: no work was merged in {LONGEST_S:.0f} s")
            return Outcome(case, "", taken, learner.stats().steps, merged_s)
    except atoll.LearnerError as error:
        return Outcome(case, refusal=str(error))


def outcomes() -> list[Outcome]:
    """Runs each case with a new core, and then a second learner in another precision."""
    found = []
    for case, build in CASES.items():
        with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
            core, address = group.start_core(Path(directory) / "run", "127.0.0.1:0", OPTIONS)
            trained = model()
            found.append(run(case, address, trained, *build(trained)))
            told(found[-1])
            if build is plain:
                other = model().to(torch.bfloat16)
                found.append(run(BESIDE, address, other, *plain(other)))
                told(found[-1])
            group.stop(core)
    return found


def told(outcome: Outcome) -> None:
    """Prints an outcome."""
    if outcome.refusal:
        print(f"{outcome.case}: refused: {outcome.refusal}")
    else:
        counted = f"{outcome.steps} of {outcome.taken} steps counted"
        print(f"{outcome.case}: first merge after {outcome.merged_s:.1f} s, {counted}")


def main() -> None:
    """Runs all cases, and prints what became of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under = parser.parse_args(), conditions()
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    torch.set_num_threads(1)
    found = outcomes()
    if arguments.json_path is not None:
        write_record(arguments.json_path, {"loops": [asdict(each) for each in found], "packages": versions}, under)


if __name__ == "__main__":
    main()
