"""Text as bytes: the Python standard library's own sources (real text, on every machine), or any files of yours.

A file belongs to training or to validation by a hash of its name; a single file is cut near its end. Batches are
random windows from a stream that a seed and a stream number fix, so that islands see different text.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from atoll_wire.errors import UserError
from numpy.typing import NDArray

MOST_BYTES = 8_000_000  # read at most: a restarted learner should not read for long
HELD_OUT = 20  # one file in so many, or one byte in so many of a single file
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class DataError(UserError):
    """Text that cannot be read, or too little of it."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """uint8 training and validation text; sha256 over both, so that runs can be compared."""

    training: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    sha256: str


def load(path: Path | None, context: int) -> Corpus:
    """Reads a file, a folder, or (None) the standard library. Raises DataError."""
    if path is not None and not path.exists():
        raise DataError(f"--data {path} does not exist: give a text file or a folder")
    try:
        if path is not None and path.is_file():
            text = np.frombuffer(path.read_bytes()[:MOST_BYTES], np.uint8)
            cut = len(text) - len(text) // HELD_OUT
            parts = [text[:cut], text[cut:]]
        else:
            parts = _folder(path)
    except OSError as error:
        raise DataError(f"--data {path} cannot be read ({error.strerror}): check its permissions") from error
    where = path or "the standard library"
    for kind, part in zip(("training", "validation"), parts, strict=True):
        if len(part) <= context + 1:
            raise DataError(f"{where} gives {len(part)} bytes of {kind} text, {context + 2} are needed: give more text")
    digest = hashlib.sha256(b"".join(hashlib.sha256(part.tobytes()).digest() for part in parts)).hexdigest()
    return Corpus(parts[0], parts[1], digest)


def _folder(path: Path | None) -> list[NDArray[np.uint8]]:
    chosen: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for name, file in _files(path):
        content = file.read_bytes()
        held_out = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT == 0
        chosen[held_out].append(content)
        total += len(content)
        if total >= MOST_BYTES:
            break
    return [np.frombuffer(b"\n".join(contents), np.uint8) for contents in chosen]


def _files(path: Path | None) -> Iterator[tuple[str, Path]]:
    """Files below a folder in a fixed order, each with its name there; no tests of the standard library."""
    root = path if path is not None else Path(sysconfig.get_path("stdlib"))
    for place, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if path is not None or name not in LEFT_OUT)
        for name in sorted(names):
            file = Path(place, name)
            if file.is_file() and (path is not None or name.endswith(".py")):
                yield file.relative_to(root).as_posix(), file


def batches(text: NDArray[np.uint8], batch: int, context: int, seed: int, stream: str) -> Iterator[torch.Tensor]:
    """Endless int64 (batch, context + 1) windows. stream: another name gives another order of the same text."""
    number = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "big")
    random = np.random.default_rng([seed, number])
    while True:
        yield windows(text, random.integers(0, len(text) - context - 1, batch), context)


def windows(text: NDArray[np.uint8], starts: NDArray[np.int64], context: int) -> torch.Tensor:
    """int64 (len(starts), context + 1)."""
    return torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))


def validation_windows(corpus: Corpus, count: int, context: int) -> torch.Tensor:
    """The same evenly spaced windows of held-out text, every time."""
    starts = np.linspace(0, len(corpus.validation) - context - 2, count).astype(np.int64)
    return windows(corpus.validation, starts, context)
