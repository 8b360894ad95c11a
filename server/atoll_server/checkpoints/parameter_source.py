"""Reads the model at the path in `--init`: a safetensors file, or a folder of such files with an index.

`open_source` checks the headers of all files before any data is copied. The copy is one file. It is read in chunks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll_wire.layout.tensor_header import (
    INDEX,
    MAX_HEADER_BYTES,
    SUFFIX,
    WHOLE,
    TensorFileError,
    TensorHeader,
    header_bytes,
    in_order,
)

from atoll_server.checkpoints.tensor_file import read_header
from atoll_server.storage.disk import DISK

MAX_INDEX_BYTES = MAX_HEADER_BYTES  # an index is about as large as the headers of its files together
MAX_SHOWN = 80  # limit on the characters of a name in messages
COPY_BYTES = 1 << 20
OURS = "atoll."  # prefix of Atoll's own metadata
AGAIN = "download or save the folder again"


@dataclass(frozen=True, slots=True)
class FileRange:
    """Consecutive bytes of a file."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """One combined safetensors file, whose bytes may come from several files.

    head: the bytes before the first range.
    """

    head: bytes
    ranges: tuple[FileRange, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the combined file."""
        return len(self.head) + sum(each.stop - each.start for each in self.ranges)

    def chunks(self) -> Iterator[bytes]:
        """Yields the combined file's bytes. No chunk is empty.

        Raises OSError, or TensorFileError if a file becomes shorter.
        """
        if self.head:
            yield self.head
        for part in self.ranges:
            with closing(DISK.open(part.path)) as file:
                at = part.start
                while at < part.stop:
                    if not (chunk := file.read_at(at, min(COPY_BYTES, part.stop - at))):
                        raise TensorFileError(
                            f"{part.path} became shorter while it was read: copy it again, then retry"
                        )
                    yield chunk
                    at += len(chunk)


def open_source(path: Path) -> ParameterSource:
    """Reads the headers of a file or folder. Raises TensorFileError, whose message names the first fault."""
    try:
        if not path.is_dir():
            return _whole_file(path)
        if (path / INDEX).is_file():
            return _folder(path)
        if (path / WHOLE).is_file():
            return _whole_file(path / WHOLE)
    except OSError as error:
        place = error.filename or path
        raise TensorFileError(f"{place} cannot be read ({error.strerror}): check the path and permissions") from error
    raise TensorFileError(
        f"{path} has neither {INDEX} nor {WHOLE}: give a safetensors file, or a folder that save_pretrained wrote"
    )


def _whole_file(path: Path) -> ParameterSource:
    _, size = _header(path)
    return ParameterSource(b"", (FileRange(path, 0, size),))


def _header(path: Path) -> tuple[TensorHeader, int]:
    """Returns a file's header and the file's size."""
    with closing(DISK.open(path)) as file:
        return read_header(path, file), file.size


def _folder(path: Path) -> ParameterSource:
    """Returns a source with the folder's tensors, ordered by file name and by position within each file."""
    expected = _read_index(path / INDEX)
    tensors_of: dict[str, list[str]] = {}
    for tensor, name in expected.items():
        tensors_of.setdefault(name, []).append(tensor)
    _check_files(path, set(tensors_of))
    heads, ranges, header_total = [], [], 0
    metadata: dict[str, str] | None = None
    for name in sorted(tensors_of):
        header, _ = _header(path / name)
        header_total += header.base
        if header_total > MAX_HEADER_BYTES:
            raise TensorFileError(
                f"the headers of the files in {path} have more than {MAX_HEADER_BYTES} bytes: "
                "use a model with fewer tensors"
            )
        _check_tensors(path, name, header, expected, tensors_of[name])
        metadata = _common(path, name, metadata, header.metadata)
        for tensor, entry in in_order(header):
            heads.append((tensor, entry.dtype, entry.shape))
            ranges.append(FileRange(path / name, entry.start, entry.stop))
    head, _ = header_bytes(heads, metadata)
    return ParameterSource(head, tuple(each for each in ranges if each.stop > each.start))


def _read_index(path: Path) -> dict[str, str]:
    """Returns each tensor's file name, keyed by tensor name."""
    with closing(DISK.open(path)) as file:
        if file.size > MAX_INDEX_BYTES:
            raise TensorFileError(
                f"{path} has {file.size} bytes, but at most {MAX_INDEX_BYTES} are read: use a model with fewer tensors"
            )
        text = file.read_at(0, file.size)
    try:
        index = json.loads(text, object_pairs_hook=_without_repeats)
        files = index["weight_map"]
        if not isinstance(files, dict) or not files:
            raise ValueError("weight_map has no tensors")
        for name in files.values():
            _check_name(name)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = "it has no weight_map" if isinstance(error, KeyError | TypeError) else error
        raise TensorFileError(f"{path} is not the index of a model ({reason}): {AGAIN}") from error
    return files


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object.

    Raises ValueError if a name is repeated, since JSON parsers keep only one of its values.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"it names {_shown(twice)} twice")
    return found


def _check_name(name: object) -> None:
    """Raises ValueError unless `name` is the name of a safetensors file directly in the folder."""
    if not isinstance(name, str):
        raise ValueError("a file's name is not a string")
    if any(character in name for character in "/\\\0") or not name.endswith(SUFFIX):
        raise ValueError(f"{_shown(name)} is not the name of a {SUFFIX} file in the same folder")


def _check_files(path: Path, named: set[str]) -> None:
    """Raises TensorFileError unless the folder contains exactly the safetensors files that the index names."""
    present = {each.name for each in path.iterdir() if each.name.endswith(SUFFIX) and each.is_file()}
    if missing := named - present:
        raise TensorFileError(f"{path} lacks {_shown(min(missing))}, which its index names: {AGAIN}")
    if others := present - named:
        raise TensorFileError(
            f"{path} contains {_shown(min(others))}, which its index does not name: move that file out of the folder"
        )


def _check_tensors(
    path: Path, name: str, header: TensorHeader, expected: Mapping[str, str], here: Iterable[str]
) -> None:
    """Raises TensorFileError unless a file contains exactly the tensors that the index lists for it.

    expected: each tensor's file in the index, keyed by tensor name. here: the tensors that the index lists for this
    file.
    """
    for tensor in header.entries:
        if tensor not in expected:
            raise TensorFileError(
                f"{_shown(name)} in {path} has tensor {_shown(tensor)}, which the index does not name: {AGAIN}"
            )
        if expected[tensor] != name:
            raise TensorFileError(
                f"{_shown(name)} in {path} has tensor {_shown(tensor)}, which the index expects in "
                f"{_shown(expected[tensor])}: {AGAIN}"
            )
    for tensor in here:
        if tensor not in header.entries:
            raise TensorFileError(
                f"{_shown(name)} in {path} lacks tensor {_shown(tensor)}, which the index expects there: {AGAIN}"
            )


def _common(path: Path, name: str, so_far: dict[str, str] | None, metadata: object) -> dict[str, str]:
    """Returns the metadata that all files share. so_far: metadata that earlier files share, or None.

    Raises TensorFileError if Atoll's own metadata differ, because the files are then from different exports.
    """
    if not isinstance(metadata, Mapping) or not all(isinstance(value, str) for value in metadata.values()):
        raise TensorFileError(f"{_shown(name)} in {path} has metadata that is not text: {AGAIN}")
    if so_far is None:
        return dict(metadata)
    if differing := [key for key, _ in so_far.items() ^ metadata.items() if key.startswith(OURS)]:
        raise TensorFileError(
            f"{_shown(name)} in {path} comes from a different export than the earlier files ({_shown(min(differing))} "
            "differs): export the model again"
        )
    return {key: value for key, value in so_far.items() if metadata.get(key) == value}


def _shown(name: str) -> str:
    return json.dumps(name[:MAX_SHOWN])
