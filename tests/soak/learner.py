"""One learner of the soak test as a process: python -m tests.soak.learner NAME ADDRESS METRICS_PORT PACE_S [--leak].

It trains a tiny model until SIGTERM, then leaves. --leak keeps one file open per reconnect: the planted defect that
the soak test must find.
"""

from __future__ import annotations

import argparse
import signal
import threading
from io import FileIO

import atoll
import torch
from atoll_wire.process.logs import configure
from torch import nn

from tests.end_to_end.world import small_model, task

NOISE = 0.3  # share of wrong labels: near zero loss, a new optimizer's first steps would be refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("address")
    parser.add_argument("metrics_port", type=int)
    parser.add_argument("pace_s", type=float)
    parser.add_argument("--leak", action="store_true")
    arguments = parser.parse_args()
    configure("info", json=False)
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    train(arguments, asked)


def train(arguments: argparse.Namespace, asked: threading.Event) -> None:
    """Trains until `asked` is set. Waiting for it also paces the loop."""
    model, leaked = small_model(), list[FileIO]()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(sum(arguments.name.encode()))
    with atoll.Learner(
        model, optimizer, server=arguments.address, name=arguments.name, connect_timeout_s=60.0, drain_s=5.0,
        metrics_listen=f"127.0.0.1:{arguments.metrics_port}",
    ) as learner:  # fmt: skip
        while not asked.wait(arguments.pace_s):
            x, y = task(generator)
            y = torch.where(torch.rand(y.shape, generator=generator) < NOISE, y.roll(1), y)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.step(tokens=len(x), loss=loss.item())
            if arguments.leak and learner.stats().reconnects > len(leaked):
                leaked.append(FileIO("/dev/null"))


if __name__ == "__main__":
    main()
