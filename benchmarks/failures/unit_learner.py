"""A learner process that trains on leased units and records which units it begins.

python -m benchmarks.failures.unit_learner SERVER NAME UNITS EPOCHS LOG PACE

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
from atoll.data.units import Place
from torch import nn
from torch.utils.data import DataLoader

UNIT_ROWS, BATCH_ROWS = 3, 4  # units end in the middle of batches
WORDS = 32


class Noted(atoll.data.Rows):
    """Logs each unit when its first sample is read. place: lease, ordinal and epoch of the newest unit."""

    def __init__(self, rows: list[int], unit: int, log: Path) -> None:
        super().__init__(rows, unit)
        self._log = os.open(log, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        self.place = ""

    def sample(self, unit: int, number: int) -> int:
        """Returns a row."""
        if number == 0:
            os.write(self._log, f"{self.place} {unit}\n".encode())
        row: int = super().sample(unit, number)
        return row


class Units(atoll.data.Units):
    """The product's units, whose source learns the lease of each sample before it is read."""

    def _hand_over(self, place: Place) -> None:
        """Records that the training loop gets a sample."""
        super()._hand_over(place)
        leases = {id(log): lease for lease, log in self._leased._log._leases.items()}
        assert isinstance(self._source, Noted), "main() passes this source"
        self._source.place = f"{leases[id(place.leased.log)]} {place.leased.ordinal} {place.leased.epoch}"


def main(server: str, name: str, units: int, epochs: int, log: Path, pace_s: float) -> None:
    """Trains until every unit of all epochs is finished."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, breath = (
        nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, WORDS)),
        threading.Event(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    source = Noted(list(range(units * UNIT_ROWS)), UNIT_ROWS, log)
    with atoll.Learner(model, optimizer, server, name, drain_s=20.0) as learner:
        data = learner.units(source, "corpus", epochs=epochs)
        data.__class__ = Units
        while data.more():
            for rows in DataLoader(data, batch_size=BATCH_ROWS):
                x = rows % WORDS
                optimizer.zero_grad()
                # Random targets keep the gradients large. If gradients vanished, the core would refuse the work of a
                # restarted process, whose new optimizer takes much larger steps than the others.
                nn.functional.cross_entropy(model(x), torch.randint(WORDS, x.shape)).backward()
                optimizer.step()
                breath.wait(pace_s)
                learner.step(tokens=len(rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]), float(sys.argv[6]))
