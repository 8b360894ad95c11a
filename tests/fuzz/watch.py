"""Derives inputs from a target's name and a seed, and limits the time and memory of decoding."""

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

LONGEST_CPU_S = 5.0  # limit on an input's CPU time; wall-clock time would depend on other processes


class Target(Protocol):
    """Code that decodes inputs. row: number of consecutive seeds whose inputs share the target's state; at least 1."""

    row: int

    def one(self, rng: random.Random) -> bool:
        """Makes an input and decodes it. Returns True for a value, and False for the declared error."""

    def close(self) -> None:
        """Ends a row. Raises an error for an invalid state."""


class Hang(BaseException):
    """Decoding took too long. Not an Exception, so that no decoder treats it as invalid input."""


class Greed(AssertionError):
    """Decoding used more memory than the input may require."""


def generator(name: str, seed: int) -> random.Random:
    """Returns the input's random generator. Pytest and `make fuzz` use the same, so each replays the other's inputs."""
    return random.Random(f"{name} {seed}")


def first_of_row(row: int, seed: int) -> int:
    """Returns the first seed of an input's row. A replay must repeat the row in order."""
    return seed - seed % row


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Context manager that raises Hang after too much CPU time.

    Works only on the main thread. It uses the CPU-time timer, because pytest uses the other one.
    """

    def hang(_number: int, _frame: FrameType | None) -> None:
        raise Hang(f"one input took more than {LONGEST_CPU_S} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def in_room(most_bytes: int) -> Iterator[None]:
    """Context manager that raises Greed for a peak of more than `most_bytes`, if memory is traced.

    tracemalloc must be on from a process's start: switching it on while other threads run crashes the interpreter.
    """
    if not tracemalloc.is_tracing():
        yield
        return
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    yield
    _, peak = tracemalloc.get_traced_memory()
    if peak - before > most_bytes:
        raise Greed(f"decoding used {peak - before} bytes, the limit is {most_bytes}")


def place() -> tempfile.TemporaryDirectory[str]:
    """Returns a temporary directory, in memory if possible, because the tests need no durable files."""
    memory = Path("/dev/shm")  # noqa: S108 - a directory of one's own in it
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, ignore_cleanup_errors=True)
