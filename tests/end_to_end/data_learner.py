"""A learner process that trains on leased units: python -m tests.end_to_end.data_learner SERVER NAME UNITS EPOCHS LOG
PACE.

PACE: seconds of pause in each step. The process appends one line to LOG for each unit that it begins: lease, ordinal,
epoch, unit.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import atoll
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.end_to_end.world import small_model

ROWS = 3  # rows of a unit, so that units end in the middle of batches


class Noted(atoll.data.Rows):
    """Logs each unit when its first sample is read. ordinals: number of units that this process began."""

    def __init__(self, rows: list[int], unit: int, log: Path) -> None:
        super().__init__(rows, unit)
        self._log = os.open(log, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        self.place = ""  # lease and ordinal of the newest unit

    def sample(self, unit: int, number: int) -> int:
        if number == 0:
            os.write(self._log, f"{self.place} {unit}\n".encode())
        return super().sample(unit, number)


class Units(atoll.data.Units):
    """The product's units, whose source learns the lease of each sample before it is read."""

    def hand_over(self, place) -> None:
        super().hand_over(place)
        leases = {id(log): lease for lease, log in self._leased._log._leases.items()}
        self._source.place = f"{leases[id(place.leased.log)]} {place.leased.ordinal} {place.leased.epoch}"


def main(server: str, name: str, units: int, epochs: int, log: Path, pace_s: float) -> None:
    torch.set_num_threads(1)
    model, breath = small_model(), threading.Event()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    source = Noted(list(range(units * ROWS)), ROWS, log)
    with atoll.Learner(model, optimizer, server, name, drain_s=20.0) as learner:
        data = learner.units(source, "corpus", epochs=epochs)
        data.__class__ = Units
        while data.more():
            for rows in DataLoader(data, batch_size=4):
                x = rows % 32
                optimizer.zero_grad()
                # Random targets keep the gradients large. If gradients vanished, the core would refuse the work of a
                # restarted process, whose new optimizer takes much larger steps than the others.
                nn.functional.cross_entropy(model(x), torch.randint(32, x.shape)).backward()
                optimizer.step()
                breath.wait(pace_s)
                learner.step(tokens=len(rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]), float(sys.argv[6]))
