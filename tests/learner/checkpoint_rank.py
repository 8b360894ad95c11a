"""One rank of a learner that saves checkpoints, for `test_checkpoints_of_ranks`.

python -m tests.learner.checkpoint_rank KIND[/OPTIMIZER] RANK SIZE ADDRESS FOLDER NAME [die]

It writes the learner's state at the start, and the saved state, to FOLDER/NAME-RANK.pt.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atoll
import torch
import torch.distributed as dist
from atoll.checkpoints import storage
from torch import nn
from torch.distributed.tensor import DTensor

from tests.end_to_end.island_rank import WORDS, model_of
from tests.learner.loops import BREATH

End = Callable[[dict[str, Any]], None]
STEPS = 3
SLOW_S = 1.0


class Position:
    """A data loader's position, which differs by rank."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Average:
    """A running average of the parameters, which has their placements."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {plain(name): value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, value in model.named_parameters():
            self.values[plain(name)].lerp_(value.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self.values.items():
            value.copy_(state["values"][name])


class Rows(torch.optim.SGD):
    """An optimizer with state of other shapes: a value per row of gradients, and a tensor that all ranks have."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            rows = parameter.grad.square().mean(-1, keepdim=True) if parameter.dim() > 1 else parameter.grad.square()
            state = self.state[parameter]
            state.setdefault("rows", torch.zeros_like(rows)).lerp_(rows, 0.1)
            state.setdefault("seen", torch.zeros(3)).add_(1)
            parameter.add_(parameter.grad / (state["rows"].sqrt() + 1e-3), alpha=-1e-3)


OPTIMIZERS = {"adamw": torch.optim.AdamW, "rows": Rows}


def live(kind: str, rank: int, size: int, address: str, folder: Path, end: End) -> None:
    """Trains and saves a checkpoint. end: called in the block with the state at the start and the saved state."""
    model, options, number, _ = model_of(kind.partition("/")[0])
    optimizer = OPTIMIZERS[kind.partition("/")[2] or "adamw"](model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    position, average = Position(), Average(model)
    extra = {"position": position, "scheduler": scheduler, "average": average, "random": atoll.RandomState()}
    options |= {"checkpoint_dir": folder / "saved", "checkpoint_every_s": None, "extra_state": extra}
    generator = torch.Generator().manual_seed(number)

    def state() -> dict[str, Any]:
        names = {value: plain(name) for name, value in model.named_parameters()}
        found = {
            "model": {name: whole(value) for value, name in names.items()},
            "optimizer": {
                f"{names[value]}.{key}": whole(each)
                for value, row in optimizer.state.items()
                for key, each in row.items()
            },
            "average": {name: whole(value) for name, value in average.values.items()},
        }
        return found | {"epoch": scheduler.last_epoch, "position": position.at}

    with atoll.Learner(model, optimizer, address, "a", connect_timeout_s=60, drain_s=5, **options) as learner:
        begun = state()
        for _ in range(STEPS):
            x = torch.randint(0, WORDS, (16,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (x * 7 + 3) % WORDS).backward()
            optimizer.step()
            scheduler.step()
            average.update(model)
            position.at += 10 + rank
            learner.step(tokens=16)
        if rank == size - 1:
            learner.save_checkpoint()
        steps_s = []
        while not saved_by_all(learner.stats().checkpoints, size):
            assert not learner.stats().checkpoints_failed, "no save may fail"
            BREATH.wait(0.02)
            blocked_s = learner.stats().blocked_s
            learner.step(tokens=0)
            steps_s.append(learner.stats().blocked_s - blocked_s)
        end({"begun": begun, "saved": state(), "steps_s": steps_s, "has_lock": learner._checkpoints._lock.is_held})
        if rank == size - 1:
            learner.save_checkpoint()
    assert learner.stats().checkpoints == 2, "leaving must save the requested checkpoint"


def saved_by_all(mine: int, size: int) -> bool:
    if size == 1:
        return bool(mine)
    found = torch.tensor([mine])
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def plain(name: str) -> str:
    return name.removeprefix("module.")


def slow_down() -> None:
    """Delays the last rank's write by SLOW_S seconds."""
    write = storage._Writer.write_data

    def slow(self, *given):
        time.sleep(SLOW_S)
        return write(self, *given)

    storage._Writer.write_data = slow


def main() -> None:
    kind, rank, size, address, place, name, *end = sys.argv[1:]
    folder = Path(place)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}.store", rank=int(rank), world_size=int(size))
    if int(rank) == int(size) - 1:
        slow_down()

    def report(found: dict[str, Any]) -> None:
        torch.save(found, folder / f"{name}-{rank}.pt")
        dist.barrier()
        if end:
            os.kill(os.getpid(), signal.SIGKILL)

    live(kind, int(rank), int(size), address, folder, report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
