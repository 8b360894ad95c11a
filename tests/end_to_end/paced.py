"""A learner or a follower that a test controls line by line: python -m tests.end_to_end.paced ROLE SERVER.

ROLE: learner or follower. Each line of input is a request, and the answer is a line with the versions of all fragments.
A request to the learner is a version: it trains until every fragment has it. A request to the follower is the versions
of all fragments and a file: it waits until it has them or newer ones, and writes its model to the file.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import atoll
import torch
from safetensors.torch import save_file
from torch import nn

from tests.end_to_end.world import small_model, task

LONGEST_WAIT_S = 90.0
PACE_S = 0.005


class Paced:
    """The test's side of a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def send(self, *words: object) -> None:
        """Sends a request."""
        print(*words, file=self.process.stdin, flush=True)

    def receive(self) -> tuple[int, ...]:
        """Waits for the versions in the answer."""
        line = self.process.stdout.readline()
        assert line, f"{self.process.args} ended with status {self.process.wait()}"
        return tuple(map(int, line.split(",")))


@contextlib.contextmanager
def paced(role: str, server: str) -> Iterator[Paced]:
    """Context manager for a process, which ends with the block."""
    command = [sys.executable, "-m", "tests.end_to_end.paced", role, server]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Paced(process)
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def learner(server: str) -> None:
    model, breath, generator = small_model(), threading.Event(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with atoll.Learner(model, optimizer, server, "trainer", connect_timeout_s=60.0) as joined:
        for line in sys.stdin:
            while min(joined.stats().versions) < int(line):
                x, y = task(generator)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                breath.wait(PACE_S)
                joined.step(tokens=len(x))
            answer(joined.stats().versions)


def follower(server: str) -> None:
    model = small_model(1)
    with atoll.Follower(model, server, connect_timeout_s=LONGEST_WAIT_S) as following:
        for line in sys.stdin:
            wanted, path = line.split()
            while any(have < int(want) for have, want in zip(following.versions, wanted.split(","), strict=True)):
                assert following.wait(timeout_s=LONGEST_WAIT_S), f"it stays at {following.versions}, not {wanted}"
            save_file(model.state_dict(), path)
            answer(following.versions)


def answer(versions: tuple[int, ...]) -> None:
    print(*versions, sep=",", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"learner": learner, "follower": follower}[sys.argv[1]](sys.argv[2])
