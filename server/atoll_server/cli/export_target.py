"""Writes the target of an export: one file, or a folder of files with an index.

The target appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from atoll_wire.errors import UserError
from atoll_wire.layout.tensor_header import INDEX, Sink
from atoll_wire.process.durable import new_file, sync_folder

from atoll_server.checkpoints.folder_writer import folder_writer

PART = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


class ExportError(UserError):
    """The target cannot be written. The message is one line with the fix."""


@contextlib.contextmanager
def export_target(out: Path, max_file_bytes: int | None) -> Iterator[Sink]:
    """Context manager for a target that receives the bytes of one safetensors file. It replaces an earlier export.

    max_file_bytes: limit on the size of each file in a folder; None for one file. Raises ExportError.
    """
    try:
        with new_file(out) if max_file_bytes is None else _folder(out, max_file_bytes) as sink:
            yield sink
    except OSError as error:
        raise ExportError(f"{out} cannot be written ({error.strerror}): give another path") from error


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
