"""How an input is made from a target's name and a seed, and what watches over its decoding: time and memory."""

from __future__ import annotations

import contextlib
import random
import signal
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Protocol

LONGEST_CPU_S = 5.0  # of one input: whatever takes longer hangs. Processor time, so that a busy machine is no finding


class Target(Protocol):
    """Something that decodes. Inputs of a row of seeds share its state; 1: each input stands for itself."""

    row: int

    def one(self, rng: random.Random) -> bool:
        """Makes an input and feeds it in: True for a value, False for the declared error; raises for whatever else."""

    def close(self) -> None:
        """At the end of a row; raises for a state that should not be."""


class Hang(BaseException):
    """Not an Exception: nothing that decodes may take it for an error of the input."""


class Greed(AssertionError):
    """Decoding took more memory than the input may ask for."""


def generator(name: str, seed: int) -> random.Random:
    """The same for both forms, so that a finding of either replays in the other."""
    return random.Random(f"{name} {seed}")


def first_of_row(row: int, seed: int) -> int:
    """Where to begin, to come to an input by the way that it was come to."""
    return seed - seed % row


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Raises Hang in what takes too much processor time. For the main thread; pytest has the other timer."""

    def hang(_number: int, _frame: FrameType | None) -> None:
        raise Hang(f"one input took {LONGEST_CPU_S} s")

    before = signal.signal(signal.SIGVTALRM, hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def in_room(most_bytes: int) -> Iterator[None]:
    """Raises Greed when what is done in here takes more memory than that at its peak; where memory is traced at all.

    tracemalloc must be on from a process's start: switched on and off beside other threads it crashes the interpreter.
    """
    if not tracemalloc.is_tracing():
        yield
        return
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    yield
    _, peak = tracemalloc.get_traced_memory()
    if peak - before > most_bytes:
        raise Greed(f"{peak - before} bytes were taken where {most_bytes} are enough")


def place() -> tempfile.TemporaryDirectory[str]:
    """A directory in memory where there is one: syncing files is not what is tested."""
    memory = Path("/dev/shm")  # noqa: S108 - a directory of one's own in it
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, ignore_cleanup_errors=True)
