"""Text as bytes: the Python standard library's own sources (real text, on every machine), or any files of yours.

A file of a folder belongs to training or to validation by a hash of its name; a single file, or a folder of few, is
cut near its end. Batches are random windows that a seed, a stream and their number fix, so that islands see different
text and a restarted one can go on where it was.
"""

from __future__ import annotations

import hashlib
import itertools
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
HELD_OUT = 20  # one file in so many, or one byte in so many
LEAST_HELD_OUT, MOST_HELD_OUT = 0.01, 0.25  # of a folder's bytes: outside, its files are too few to be dealt out whole
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
    try:
        if path is not None and not path.exists():
            raise DataError(f"--data {path} does not exist: give a text file or a folder")
        parts = _cut(_beginning(path)) if path is not None and path.is_file() else _folder(path)
    except OSError as error:
        raise DataError(f"--data {path} cannot be read ({error.strerror}): check its permissions") from error
    where = path or "the standard library"
    for kind, part in zip(("training", "validation"), parts, strict=True):
        if len(part) <= context + 1:
            raise DataError(f"{where} gives {len(part)} bytes of {kind} text, {context + 2} are needed: give more text")
    digest = hashlib.sha256(b"".join(hashlib.sha256(part.tobytes()).digest() for part in parts)).hexdigest()
    return Corpus(parts[0], parts[1], digest)


def _beginning(file: Path) -> bytes:
    """Never the whole of a large file: it may be larger than memory."""
    with file.open("rb") as opened:
        return opened.read(MOST_BYTES)


def _cut(text: bytes) -> list[NDArray[np.uint8]]:
    whole = np.frombuffer(text, np.uint8)
    cut = len(whole) - len(whole) // HELD_OUT
    return [whole[:cut], whole[cut:]]


def _folder(path: Path | None) -> list[NDArray[np.uint8]]:
    """Whole files to either side, so that held-out text is of other files; few files cannot be dealt out like that."""
    chosen: tuple[list[bytes], list[bytes]] = ([], [])
    everything: list[bytes] = []
    total = 0
    for name, file in _files(path):
        content = _beginning(file)
        everything.append(content)
        held_out = int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:4], "big") % HELD_OUT == 0
        chosen[held_out].append(content)
        total += len(content)
        if total >= MOST_BYTES:
            break
    if not LEAST_HELD_OUT * total <= sum(map(len, chosen[True])) <= MOST_HELD_OUT * total:
        return _cut(b"\n".join(everything))
    return [np.frombuffer(b"\n".join(contents), np.uint8) for contents in chosen]


def _files(path: Path | None) -> Iterator[tuple[str, Path]]:
    """Files below a folder in a fixed order, each with its name there; no tests of the standard library."""
    root = path if path is not None else Path(sysconfig.get_path("stdlib"))
    for place, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = sorted(name for name in folders if path is not None or name not in LEFT_OUT)
        for name in sorted(names):
            file = Path(place, name)
            if file.is_file() and (path is not None or name.endswith(".py")):
                yield file.relative_to(root).as_posix(), file


def _refuse(error: OSError) -> None:
    """os.walk would pass over a folder that it cannot read, and the text would be another one than was asked for."""
    raise error


def batches(
    text: NDArray[np.uint8], batch: int, context: int, seed: int, stream: str, first: int = 0
) -> Iterator[torch.Tensor]:
    """Endless int64 (batch, context + 1) windows, from batch number `first` on: each batch depends on its number alone.

    stream: another name gives another order of the same text.
    """
    number = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "big")
    for nth in itertools.count(first):
        random = np.random.default_rng([seed, number, nth])
        yield windows(text, random.integers(0, len(text) - context - 1, batch), context)


def windows(text: NDArray[np.uint8], starts: NDArray[np.int64], context: int) -> torch.Tensor:
    """int64 (len(starts), context + 1)."""
    return torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))


def validation_windows(corpus: Corpus, count: int, context: int) -> torch.Tensor:
    """The same evenly spaced windows of held-out text, every time."""
    starts = np.linspace(0, len(corpus.validation) - context - 2, count).astype(np.int64)
    return windows(corpus.validation, starts, context)
