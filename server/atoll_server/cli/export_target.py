"""Writes the target of an export: one file, a folder of files with an index, or a folder that PEFT loads.

The target appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from atoll_wire.errors import UsageError, UserError
from atoll_wire.layout.tensor_header import (
    INDEX,
    Sink,
    StreamedHeader,
    TensorHeader,
    in_order,
    write_header,
)
from atoll_wire.model_file.export_summary import ADAPTER_CONFIG
from atoll_wire.process.durable import new_file, sync_folder

from atoll_server.checkpoints.folder_writer import folder_writer

SMALLEST_FILE = 1 << 20
ADAPTER = "adapter_model.safetensors"  # PEFT's name
ADAPTER_NAME = re.compile(r"\.(?:modules_to_save\.)?default(?=\.|$)")  # in a model's names; PEFT's files lack it
PART = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


class ExportError(UserError):
    """The target cannot be written. The message is one line with the fix."""


def check_options(max_file_bytes: int | None, adapter: Path | None) -> None:
    """Raises UsageError if the options of an export are invalid."""
    if max_file_bytes is not None and max_file_bytes < SMALLEST_FILE:
        raise UsageError(
            f"--max-file-size {max_file_bytes}: at least 1MiB is needed; see atoll checkpoint export --help"
        )
    if max_file_bytes is not None and adapter is not None:
        raise UsageError("--max-file-size and --adapter write different folders: omit one of them")


@contextlib.contextmanager
def export_target(out: Path, max_file_bytes: int | None, adapter: Path | None = None) -> Iterator[Sink]:
    """Context manager for a target that receives the bytes of one safetensors file. It replaces an earlier export.

    max_file_bytes: limit on the size of each file in a folder; None for one file. adapter: an adapter_config.json, for
    a folder that PEFT loads. Raises ExportError.
    """
    try:
        if adapter is not None:
            target = _adapter_folder(out, adapter)
        else:
            target = new_file(out) if max_file_bytes is None else _folder(out, max_file_bytes)
        with target as sink:
            yield sink
    except OSError as error:
        raise ExportError(f"{out} cannot be written ({error.strerror}): give another path") from error


@contextlib.contextmanager
def _adapter_folder(out: Path, config: Path) -> Iterator[Sink]:
    content = _adapter_config(config)
    out.mkdir(exist_ok=True)
    with new_file(out / ADAPTER) as file:
        sink = _AdapterFile(file)
        yield sink
        sink.finish()
        with new_file(out / ADAPTER_CONFIG) as copy:  # first: the adapters appear when the folder is complete
            copy.write(content)
    sync_folder(out)


def _adapter_config(path: Path) -> bytes:
    """Returns the content of an adapter_config.json. Raises ExportError for another file."""
    try:
        content = path.read_bytes()
        known = json.loads(content)["peft_type"]
    except OSError as error:
        raise ExportError(f"{path} cannot be read ({error.strerror}): give a readable {ADAPTER_CONFIG}") from error
    except (ValueError, KeyError, TypeError):
        known = None
    if not known:
        raise ExportError(f"{path} has no peft_type: write it with save_pretrained of PEFT's LoraConfig")
    return content


class _AdapterFile:
    """Receives the bytes of one safetensors file, and writes them with the names of tensors in a file of PEFT."""

    def __init__(self, file: Sink) -> None:
        self._file = file
        self._head = StreamedHeader()

    def write(self, data: bytes | memoryview, /) -> None:
        """Processes the stream's next bytes, in pieces of any size. Raises ExportError."""
        if self._head.header is None:
            try:
                data = self._head.take(data)
            except ValueError as error:
                raise ExportError(
                    f"the export is invalid ({error}): use the same version of Atoll as the core"
                ) from error
            if self._head.header is not None:
                self._rename(self._head.header)
        self._file.write(data)

    def finish(self) -> None:
        """Raises ExportError if the stream ended within the header."""
        if self._head.header is None:
            raise ExportError("the export ended too early: try again")

    def _rename(self, header: TensorHeader) -> None:
        tensors = [(ADAPTER_NAME.sub("", name), each.dtype, each.shape) for name, each in in_order(header)]
        if header.entries.keys() == {name for name, *_ in tensors}:
            raise ExportError("the run has no adapter named default: omit --adapter")
        write_header(self._file, tensors, header.metadata)


@contextlib.contextmanager
def _folder(out: Path, max_file_bytes: int) -> Iterator[Sink]:
    place = Path(os.path.abspath(out))  # noqa: PTH100 - a symbolic link stays one
    part, old = place.with_name(place.name + ".part"), place.with_name(place.name + ".old")
    for each in (place, part, old):
        _check_replaceable(each)
    if old.exists() and not place.exists():  # an earlier export died between the two renames
        old.rename(place)
    _remove(old)
    _remove(part)
    part.mkdir()
    try:
        with folder_writer(part, max_file_bytes) as writer:
            yield writer
        if place.exists():
            place.rename(old)
        part.rename(place)
        sync_folder(place.parent)
    finally:
        _remove(part)
        if old.exists() and not place.exists():
            old.rename(place)
    with contextlib.suppress(OSError):  # keeps a file that appeared in the old folder meanwhile
        _remove(old)


def _check_replaceable(folder: Path) -> None:
    """Raises ExportError if `folder` exists and is not a folder that contains only the files of an export."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ExportError(f"{folder} exists and is not a folder: give another path, or omit --max-file-size")
    others = [each.name for each in folder.iterdir() if not _is_ours(each)] if folder.exists() else []
    if others:
        raise ExportError(
            f"{folder} contains files that are not part of an export, such as {min(others)!r}: give another path"
        )


def _is_ours(path: Path) -> bool:
    return path.name == INDEX or PART.fullmatch(path.name) is not None


def _remove(folder: Path) -> None:
    """Removes a folder with an export. Raises OSError if the folder contains other files, which stay."""
    if folder.exists():
        for path in folder.iterdir():
            if _is_ours(path):
                path.unlink()
        folder.rmdir()
