"""Splits the stream of one safetensors file into a folder of smaller files with an index. Does not use NumPy.

The files contain the tensors in the stream's order. The writer processes the data in chunks, so it never holds a whole
tensor in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from atoll_wire.layout.tensor_header import (
    INDEX,
    LENGTH_BYTES,
    SUFFIX,
    StreamedHeader,
    TensorEntry,
    TensorFileError,
    TensorHead,
    TensorHeader,
    encoded,
    header_bytes,
    header_item,
    in_order,
)
from atoll_wire.process.durable import sync_folder


@dataclass(slots=True)
class PlannedFile:
    """One file of the folder.

    size_bytes: upper bound on the file's size, including the header. data_bytes: size of the data of its tensors.
    """

    tensors: list[TensorHead]
    size_bytes: int
    data_bytes: int


class FolderWriter:
    """Receives the bytes of one safetensors file and writes the folder's files as the bytes arrive.

    max_file_bytes: limit on each file's size. A larger tensor gets its own file.
    """

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._head = StreamedHeader()
        self._files: list[PlannedFile] = []
        self._names: list[str] = []
        self._begun = 0  # number of files started so far
        self._left = 0  # number of bytes still missing from the newest file
        self._file: BinaryIO | None = None

    def write(self, data: bytes | memoryview, /) -> None:
        """Processes the stream's next bytes, in pieces of any size. Raises TensorFileError or OSError."""
        view = memoryview(data) if self._head.header is not None else self._take_head(data)
        while view:
            if not self._left:
                raise _invalid("it continues after the last tensor")
            assert self._file is not None, "a file with missing bytes is open"
            part = view[: self._left]
            self._file.write(part)
            self._left -= len(part)
            view = view[len(part) :]
            self._advance()

    def finish(self) -> None:
        """Writes the index and makes all files durable. Raises TensorFileError if the stream is incomplete."""
        if self._head.header is None or self._left:
            raise _invalid("it ends too early")
        index = {
            "metadata": {"total_size": sum(file.data_bytes for file in self._files)},
            "weight_map": {
                tensor[0]: name for name, file in zip(self._names, self._files, strict=True) for tensor in file.tensors
            },
        }
        with (self._folder / INDEX).open("wb") as written:
            written.write(json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")
            _sync(written)
        sync_folder(self._folder)

    def close(self) -> None:
        """Closes the file that is being written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take_head(self, data: bytes | memoryview) -> memoryview:
        """Reads a part of the header and plans the files once the header is complete. Returns the rest of `data`."""
        try:
            rest = self._head.take(data)
            if self._head.header is not None:
                self._plan(self._head.header)
        except ValueError as error:
            raise _invalid(str(error)) from error
        return rest

    def _plan(self, header: TensorHeader) -> None:
        tensors = in_order(header)
        if not isinstance(header.metadata, dict) or not all(isinstance(each, str) for each in header.metadata.values()):
            raise ValueError("its metadata is not text")
        stops = [header.base, *(entry.stop for _, entry in tensors)]
        if any(entry.start != stop for stop, (_, entry) in zip(stops, tensors, strict=False)):
            raise ValueError("its tensors overlap or have gaps")
        self._files = list(planned(tensors, header.metadata, self._max_file_bytes))
        self._names = file_names(len(self._files))
        self._advance()

    def _advance(self) -> None:
        """Closes the current file if it is complete, then starts the next file.

        A file's tensors may contain no data.
        """
        while not self._left:
            if self._file is not None:
                _sync(self._file)
            self.close()
            if self._begun == len(self._files):
                return
            assert self._head.header is not None, "files are planned from the header"
            file = self._files[self._begun]
            self._file = (self._folder / self._names[self._begun]).open("wb")
            head, self._left = header_bytes(file.tensors, self._head.header.metadata)
            self._file.write(head)
            self._begun += 1


@contextmanager
def folder_writer(folder: Path, max_file_bytes: int) -> Iterator[FolderWriter]:
    """Context manager for a writer to an existing folder. All files and the index are durable when the body ends.

    Raises TensorFileError or OSError. The folder is incomplete after an error.
    """
    with closing(FolderWriter(folder, max_file_bytes)) as writer:
        yield writer
        writer.finish()


def planned(
    tensors: Iterable[tuple[str, TensorEntry]], metadata: dict[str, str], max_file_bytes: int
) -> Iterator[PlannedFile]:
    """Yields the plans of one or more files for these tensors.

    Each file contains as many of the next tensors as fit.
    """
    smallest = LENGTH_BYTES + len(encoded({"__metadata__": metadata})) + 8  # includes the padding of the header
    file = PlannedFile([], smallest, 0)
    for name, entry in tensors:
        # An item is encoded with its own braces, which allow for the comma after the item.
        item_bytes = len(encoded(header_item(name, entry.dtype, entry.shape, file.data_bytes)))
        if file.tensors and file.size_bytes + item_bytes + entry.size_bytes > max_file_bytes:
            yield file
            file = PlannedFile([], smallest, 0)
        file.tensors.append((name, entry.dtype, entry.shape))
        file.size_bytes += item_bytes + entry.size_bytes
        file.data_bytes += entry.size_bytes
    yield file


def file_names(count: int) -> list[str]:
    """Returns the names of a folder's files, in the form that Hugging Face's libraries use."""
    return [f"model-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _invalid(reason: str) -> TensorFileError:
    return TensorFileError(f"the core sent an invalid safetensors file ({reason}): use the core's version of Atoll")
