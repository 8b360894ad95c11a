"""Divides data into numbered units: rows of a map-style dataset, or tokens of a file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike

from atoll.errors import LearnerError

PROBES, PROBE_BYTES = 64, 4096  # number and size of the parts of a file that its fingerprint covers


class Source(Protocol):
    """Data that is divided into units. All learners of a run need the same units under the same numbers.

    A program may implement this protocol for its own data. With `Units.loader(num_workers=...)`, worker processes call
    `sample`.

    Example:
        ```python
        class Squares:
            units, unit_tokens, fingerprint = 100, 0, b"squares"

            def samples(self, unit):
                return 8

            def sample(self, unit, number):
                return torch.tensor((8 * unit + number) ** 2)
        ```
    """

    @property
    def units(self) -> int:
        """The number of units."""

    @property
    def unit_tokens(self) -> int:
        """The number of tokens in a unit; 0 if it is unknown."""

    @property
    def fingerprint(self) -> bytes:
        """At most 64 bytes that identify the data. The core refuses a learner with other bytes."""

    def samples(self, unit: int) -> int:
        """Returns the number of samples in a unit, at least 1.

        Args:
            unit: The unit's number, from 0.
        """

    def sample(self, unit: int, number: int) -> Any:  # noqa: ANN401 - what the training loop needs
        """Returns one sample of a unit.

        Args:
            unit: The unit's number, from 0.
            number: The sample's number in the unit, from 0.
        """


class Rows:
    """Units of consecutive rows of a map-style dataset, such as a Hugging Face dataset.

    Args:
        rows: Any object that supports `len()` and indexing.
        unit: The number of rows in a unit. The last unit may have fewer. Training on a unit should take a few steps.
        tokens: The number of tokens in a row, if all rows have the same number.
        version: A text that identifies the data's content. Without it, the core compares only the numbers of rows.

    Raises:
        LearnerError: If `rows` is empty or cannot be indexed, or `unit` is below 1.

    Example:
        ```python
        source = Rows(["a", "b", "c"], unit=2)
        assert (source.units, source.samples(1), source.sample(1, 0)) == (2, 1, "c")
        ```
    """

    def __init__(self, rows: Any, unit: int, *, tokens: int = 0, version: str = "") -> None:  # noqa: ANN401 - see above
        if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")) or not len(rows):
            raise LearnerError(
                f"Rows got a {type(rows).__name__} that is empty or cannot be indexed: pass a map-style dataset "
                "with at least one row, such as a list or a non-streamed Hugging Face dataset"
            )
        if unit < 1:
            raise LearnerError(f"Rows got unit={unit}: pass the number of rows in a unit, at least 1")
        self._rows = rows
        self._unit = unit
        self._version = version
        self.units = -(-len(rows) // unit)
        self.unit_tokens = unit * tokens

    @property
    def fingerprint(self) -> bytes:
        return hashlib.sha256(f"{len(self._rows)} {self._unit} {self._version}".encode()).digest()

    def samples(self, unit: int) -> int:
        return min(self._unit, len(self._rows) - unit * self._unit)

    def sample(self, unit: int, number: int) -> Any:  # noqa: ANN401 - a row
        return self._rows[unit * self._unit + number]


class TokenFile:
    """Units of a file of tokens, which is mapped into memory. A sample is an int64 tensor of `tokens` tokens.

    Args:
        path: A file of token IDs without a header.
        tokens: The number of tokens in a sample. Tokens after the last whole sample are not used.
        unit: The number of samples in a unit.
        dtype: The type of the IDs in the file.
        overlap: The number of tokens that a sample shares with the next one, such as 1 if the loop shifts a sample to
            get its targets.

    Raises:
        LearnerError: If the file cannot be read or is shorter than a sample, or an argument is out of range.

    Example:
        ```python
        source = TokenFile("corpus.bin", tokens=1025, unit=16, overlap=1)
        ```
    """

    def __init__(
        self, path: str | Path, tokens: int, unit: int, *, dtype: DTypeLike = np.uint16, overlap: int = 0
    ) -> None:
        self._path, self._dtype, self._tokens, self._unit, self._overlap = (
            Path(path),
            np.dtype(dtype),
            tokens,
            unit,
            overlap,
        )
        if unit < 1 or not 0 <= overlap < tokens:
            raise LearnerError(
                f"TokenFile got unit={unit}, tokens={tokens} and overlap={overlap}: pass a unit and tokens of at "
                "least 1, and an overlap from 0 to tokens - 1"
            )
        try:
            self._length = self._path.stat().st_size // self._dtype.itemsize
        except OSError as error:
            raise LearnerError(f"{path} cannot be read ({error.strerror}): pass a readable file of tokens") from error
        self._samples = max(0, (self._length - overlap) // (tokens - overlap))
        if not self._samples:
            raise LearnerError(
                f"{path} has {self._length} tokens of type {self._dtype}, fewer than the {tokens} of one sample: pass "
                "the dtype that the file was written with, or a smaller tokens="
            )
        self.units = -(-self._samples // unit)
        self.unit_tokens = unit * tokens
        self._map: Any = None  # opened on first use, also in worker processes

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a worker process needs to open the file itself."""
        return self.__dict__ | {"_map": None}

    @property
    def fingerprint(self) -> bytes:
        """A digest of the sizes and of parts of the file. Computing it reads at most 256 KiB."""
        digest = hashlib.sha256(f"{self._length} {self._dtype} {self._tokens} {self._unit} {self._overlap}".encode())
        size = self._path.stat().st_size
        with self._path.open("rb") as file:
            for place in range(PROBES):
                file.seek(max(0, size - PROBE_BYTES) * place // (PROBES - 1))
                digest.update(file.read(PROBE_BYTES))
        return digest.digest()

    def samples(self, unit: int) -> int:
        return min(self._unit, self._samples - unit * self._unit)

    def sample(self, unit: int, number: int) -> torch.Tensor:
        if self._map is None:
            self._map = np.memmap(self._path, self._dtype, "r")
        at = (unit * self._unit + number) * (self._tokens - self._overlap)
        return torch.from_numpy(self._map[at : at + self._tokens].astype(np.int64))
