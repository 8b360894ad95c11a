"""Text as bytes, from your files or from the sources of the Python standard library, which every machine has.

A hash of a file's name assigns the file to training or validation. The text of a single file, or of a folder with few
files, is split near its end. Batches consist of random windows, which depend only on a seed, a stream and the batch's
number. The stream is the learner's name. Learners therefore train on different text, and a restarted learner continues
where it stopped.
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

MAX_BYTES = 8_000_000  # limit on the text that is read, so that a restarted learner starts quickly
HELD_OUT = 20  # one in this many files, or bytes, is validation text
MIN_HELD_OUT, MAX_HELD_OUT = 0.01, 0.25  # allowed share of validation bytes; otherwise, files are not split by name
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class DataError(UserError):
    """The text cannot be read, or is too short."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and validation text, uint8 (bytes,). sha256: digest of both texts, to compare runs."""

    training: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    sha256: str


def load(path: Path | None, context: int) -> Corpus:
    """Reads a file, a folder, or the standard library (path None). context: bytes per window. Raises DataError."""
    try:
        if path is not None and not path.exists():
            raise DataError(f"--data {path} does not exist: give a text file or a folder")
        parts = _cut(_beginning(path)) if path is not None and path.is_file() else _folder(path)
    except OSError as error:
        raise DataError(f"--data {path} cannot be read ({error.strerror}): check its permissions") from error
    where = path or "the standard library"
    for kind, part in zip(("training", "validation"), parts, strict=True):
        if len(part) <= context + 1:
            raise DataError(
                f"{where} has only {len(part)} bytes of {kind} text, but {context + 2} are needed: give more text"
            )
    digest = hashlib.sha256(b"".join(hashlib.sha256(part.tobytes()).digest() for part in parts)).hexdigest()
    return Corpus(parts[0], parts[1], digest)


def _beginning(file: Path) -> bytes:
    """Reads at most MAX_BYTES of a file, which may be larger than memory."""
    with file.open("rb") as opened:
        return opened.read(MAX_BYTES)


def _cut(text: bytes) -> list[NDArray[np.uint8]]:
    whole = np.frombuffer(text, np.uint8)
    cut = len(whole) - len(whole) // HELD_OUT
    return [whole[:cut], whole[cut:]]


def _folder(path: Path | None) -> list[NDArray[np.uint8]]:
    """Returns training and validation text from different files.

    If this would leave too little or too much validation text, splits the joined text of all files near its end.
    """
    chosen: tuple[list[bytes], list[bytes]] = ([], [])
    everything: list[bytes] = []
    total = 0
    for name, file in _files(path):
        content = _beginning(file)
        everything.append(content)
        held_out = int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:4], "big") % HELD_OUT == 0
        chosen[held_out].append(content)
        total += len(content)
        if total >= MAX_BYTES:
            break
    if not MIN_HELD_OUT * total <= sum(map(len, chosen[True])) <= MAX_HELD_OUT * total:
        return _cut(b"\n".join(everything))
    return [np.frombuffer(b"\n".join(contents), np.uint8) for contents in chosen]


def _files(path: Path | None) -> Iterator[tuple[str, Path]]:
    """Yields the files below a folder in a fixed order, with relative names. Skips the standard library's tests."""
    root = path if path is not None else Path(sysconfig.get_path("stdlib"))
    for place, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = sorted(name for name in folders if path is not None or name not in LEFT_OUT)
        for name in sorted(names):
            file = Path(place, name)
            if file.is_file() and (path is not None or name.endswith(".py")):
                yield file.relative_to(root).as_posix(), file


def _refuse(error: OSError) -> None:
    """Makes os.walk raise the error. Otherwise, it would skip an unreadable folder, and learners' text would differ."""
    raise error


def batches(
    text: NDArray[np.uint8], batch: int, context: int, seed: int, stream: str, first: int = 0
) -> Iterator[torch.Tensor]:
    """Yields batches of windows forever, int64 (batch, context + 1), starting at batch number `first`.

    A batch depends only on its number, the seed and the stream. Another stream gives other windows of the same text.
    """
    number = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "big")
    for nth in itertools.count(first):
        random = np.random.default_rng([seed, number, nth])
        yield windows(text, random.integers(0, len(text) - context - 1, batch), context)


def windows(text: NDArray[np.uint8], starts: NDArray[np.int64], context: int) -> torch.Tensor:
    """Returns windows of text that begin at `starts`, int64 (len(starts), context + 1)."""
    return torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))


def validation_windows(corpus: Corpus, count: int, context: int) -> torch.Tensor:
    """Returns evenly spaced windows of validation text, always the same: int64 (count, context + 1)."""
    starts = np.linspace(0, len(corpus.validation) - context - 2, count).astype(np.int64)
    return windows(corpus.validation, starts, context)
