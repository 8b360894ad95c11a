"""Kills a learner, restarts it with or without its checkpoint, and compares the loss with an undisturbed learner.

Each seed has one learner, and the same batches in all runs. The learner sends itself SIGKILL after a step. Then the
core is stopped and its directory is copied. A new process continues from each copy with the next batch: once with the
checkpoint and once without. This program also measures the copy that a saving `step()` waits for.

With --schedule, the learning rate follows a torch scheduler, which the checkpoint includes. Otherwise, it is constant.

python -m benchmarks.failures.learner_restart --seeds 3 --json PATH
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from atoll import Learner
from atoll.checkpoints.learner_state import LearnerState
from atoll.demo.processes import Children, children
from atoll.model.parameters import Parameters
from atoll.reference import data
from atoll.reference.model import ModelSize, Transformer, build
from torch import nn
from torch.nn import functional

from benchmarks.conditions import conditions, write_record

SIZE, BATCH = ModelSize(width=64, layers=2, heads=2, context=64), 16
LEARNING_RATE, BETAS = 3e-3, (0.9, 0.999)
# Plain averaging: with outer momentum, the loss of outstanding work hides the effect of the lost optimizer state.
CORE = ["--fragments", "2", "--inner-steps", "10", "--outer-lr", "1", "--outer-momentum", "0"]
KILLED_AT, SAVED_AT = 300, 290  # steps: the kill, and the checkpoint before it
WARM_UP, DECAYED, LAST_RATE = 50, 400, 0.1  # the schedule: steps to its peak, steps to its end, last share of the peak
AFTER = (1, 2, 5, 10, 20, 30, 40, 50)  # steps after the kill at which the validation loss is measured
WINDOWS = 64  # number of validation windows
STAGED, COPIES = 10_000_000, 11  # parameters of the model whose state is copied; number of copies
LIFE_S = 600.0  # limit on the duration of one process
ARMS = ("not killed", "with checkpoint", "without checkpoint")


def main() -> int:
    """Runs all seeds and prints the losses. Returns 1 if the mean loss with a checkpoint is higher than without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--schedule", action="store_true")
    parser.add_argument("--json", type=Path, dest="json_path")
    parser.add_argument("--life", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.life is not None:
        live(*arguments.life)
        return 0
    under, copies_ms = conditions(), staging_ms()
    first, median = copies_ms[0], statistics.median(copies_ms[1:])
    print(f"copy of {STAGED / 1e6:.0f}M parameters with AdamW: first {first:.0f} ms, then {median:.0f} ms (median)")
    runs = [run(seed, schedule=arguments.schedule) for seed in range(arguments.seeds)]
    found = {arm: [each[arm] for each in runs] for arm in ARMS}
    if arguments.json_path is not None:
        write_record(arguments.json_path, {"copies_ms": copies_ms, "losses": found}, under)
    print(f"{'steps after the kill':<22}" + "".join(f"{after:>9}" for after in AFTER))
    for arm in ARMS:
        print(f"{arm:<22}" + "".join(f"{mean(found[arm], after):>9.4f}" for after in AFTER))
    for arm in ARMS[1:]:
        changes = [100 * (one["50"] / other["50"] - 1) for one, other in zip(found[arm], found[ARMS[0]], strict=True)]
        print(f"{arm}, after 50 steps vs. not killed: " + ", ".join(f"{change:+.2f} %" for change in changes))
    whole = {arm: statistics.mean(mean(found[arm], after) for after in AFTER) for arm in ARMS}
    print("mean of these steps: " + ", ".join(f"{arm} {loss:.4f}" for arm, loss in whole.items()))
    return 0 if whole[ARMS[1]] <= whole[ARMS[2]] else 1


def staging_ms() -> list[float]:
    """Returns the durations of consecutive copies of a state, in milliseconds."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(STAGED // 1_000_000)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    state, times = LearnerState(Parameters(model, optimizer), {}, 0, 1), []
    for _ in range(COPIES):
        began = time.perf_counter()
        staged = state.stage()
        times.append(1e3 * (time.perf_counter() - began))
        state.staging.returned(staged.tensors)
    return times


def mean(runs: list[dict[str, float]], after: int) -> float:
    """Returns the mean validation loss of all seeds, `after` steps after the kill."""
    return statistics.mean(each[str(after)] for each in runs)


def run(seed: int, *, schedule: bool) -> dict[str, dict[str, float]]:
    """Returns the validation losses by arm of the experiment, then by steps after the kill."""
    found = {}
    with tempfile.TemporaryDirectory() as place, children(Path(place)) as group:
        directory, report = Path(place), Path(place) / "report.json"
        words = (str(report), str(seed), "scheduled" if schedule else "constant")
        train(group, directory / "whole", words, life="whole")
        found[ARMS[0]] = json.loads(report.read_text())
        train(group, directory / "killed", words, life="killed")
        for arm in ARMS[1:]:
            shutil.copytree(directory / "killed", directory / arm)
            if arm == ARMS[2]:
                shutil.rmtree(directory / arm / "saved")
            train(group, directory / arm, words, life="restarted")
            found[arm] = json.loads(report.read_text())
    print(f"seed {seed}: {json.dumps(found)}", flush=True)
    return found


def train(group: Children, directory: Path, words: Sequence[str], *, life: str) -> None:
    """Runs a core and one process of the learner. words: its last arguments."""
    core, address = group.start_core(directory / "run", "127.0.0.1:0", CORE)
    module = [sys.executable, "-m", "benchmarks.failures.learner_restart", "--life"]
    learner = group.start("learner", [*module, life, address, str(directory / "saved"), *words])
    status = learner.process.wait(LIFE_S)
    if status != (-signal.SIGKILL if life == "killed" else 0):
        raise RuntimeError(f"the learner ended with status {status}: {learner.tail()}")
    group.stop(core)


def live(life: str, address: str, saved: str, report: str, seed: str, rate: str) -> None:
    """Trains one learner. life: "whole" (never killed), "killed" (until the kill), or "restarted" (after it)."""
    torch.set_num_threads(1)
    model = build(SIZE, int(seed))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, BETAS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scheduled if rate == "scheduled" else lambda _: 1.0)
    corpus = data.load(None, SIZE.context)
    held_out = data.validation_windows(corpus, WINDOWS, SIZE.context)
    step = KILLED_AT if life == "restarted" else 0
    losses: dict[int, float] = {}
    options: dict[str, Any] = {"checkpoint_dir": saved, "checkpoint_every_s": None, "connect_timeout_s": 120.0}
    options["extra_state"] = {"scheduler": scheduler}
    with Learner(model, optimizer, address, "a", **options) as learner:
        for window in data.batches(corpus.training, BATCH, SIZE.context, int(seed), "a", first=step):
            optimizer.zero_grad()
            loss_of(model, window).backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step == SAVED_AT:
                learner.save_checkpoint()
            learner.step(tokens=BATCH * SIZE.context)
            if step == KILLED_AT and life == "killed":
                die(learner)
            if step - KILLED_AT in AFTER:
                with learner.pause(), torch.no_grad():
                    losses[step - KILLED_AT] = loss_of(model, held_out).item()
            if step == KILLED_AT + AFTER[-1]:
                break
    Path(report).write_text(json.dumps(losses))


def scheduled(step: int) -> float:
    """Returns the learning rate as a share of its peak: a linear warm-up, then a cosine decay."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = min(1.0, (step - WARM_UP) / (DECAYED - WARM_UP))
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def loss_of(model: Transformer, windows: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss per byte. windows: int64 (batch, context + 1)."""
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def die(learner: Learner) -> None:
    """Waits until the checkpoint is complete, without training, and kills this process."""
    while not learner.stats().checkpoints:
        learner.step(tokens=0)
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
