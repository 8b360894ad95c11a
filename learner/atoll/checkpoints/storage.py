"""Writes and reads checkpoints with torch.distributed.checkpoint, atomically and without code in the files.

The library stores objects with pickle. Atoll therefore stores only tensors: objects are bytes that torch.load must
accept with weights_only=True. The library's metadata file is a pickle too. Its reader here allows only classes of
metadata.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from atoll.checkpoints.directory import CheckpointDirectory, Facts
from atoll.checkpoints.staging import OBJECTS, Staged, StateError, pack

METADATA = ".metadata"
ALLOWED = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
ONE_PROCESS = "torch.distributed is disabled, unavailable or uninitialized"  # not a fault, so not worth a warning
warnings.filterwarnings("ignore", message=ONE_PROCESS, module=r"torch\.distributed\.checkpoint")


def start_save(
    staged: Staged | Exception,
    directory: CheckpointDirectory,
    number: int,
    facts: Facts | None,
    group: dist.ProcessGroup | None,
) -> Future[Any]:
    """Begins to write a checkpoint in a background thread. Every rank calls this.

    staged: this rank's state, or the error that prevented it; the save then fails on all ranks. facts: None except on
    rank 0. group: all ranks; None without torch.distributed. The returned future raises the error of a failed save.
    """
    save = async_save(
        {},  # the planner has the state, because the library spends tens of microseconds on each key here
        storage_writer=_Writer(directory, number, facts),
        planner=_Planner(staged),
        process_group=group,
    )
    assert isinstance(save, Future), "this writer stages at once"
    return save


def read(folder: Path, group: dist.ProcessGroup | None, agree: Callable[[str], bool]) -> dict[str, torch.Tensor] | None:
    """Returns all tensors of a checkpoint by key, or None. Every rank calls this.

    agree: passes a rank's problem, or "", and returns whether no rank has one.
    """
    reader = _Reader(folder)
    tensors: dict[str, torch.Tensor] = {}
    problem = ""
    try:
        for key, each in reader.read_metadata().state_dict_metadata.items():
            if isinstance(each, TensorStorageMetadata):
                tensors[key] = torch.empty(each.size, dtype=each.properties.dtype)
    except Exception as error:
        problem = f"its metadata cannot be read ({first_line(error)})"
    if not agree(problem):
        return None
    try:
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        load(tensors, storage_reader=reader, planner=planner, process_group=group)
    except Exception as error:
        problem = f"it cannot be read ({cause(error)})"
    return tensors if agree(problem) else None


def cause(error: BaseException) -> str:
    """Returns the first line of the first rank's error."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, Mapping) and failures:
        rank, (inner, _) = min(failures.items())
        return first_line(inner) if len(failures) == 1 and rank == 0 else f"rank {rank}: {first_line(inner)}"
    return first_line(error)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


class _Writer(FileSystemWriter):
    """Writes staged tensors to a temporary folder. Rank 0 then publishes the folder."""

    def __init__(self, directory: CheckpointDirectory, number: int, facts: Facts | None) -> None:
        super().__init__(directory.part(number), per_thread_copy_ahead=0)
        self._directory, self._number, self._facts = directory, number, facts

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the tensors as they are, because Atoll has already copied them."""
        return state_dict

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        assert self._facts is not None, "only rank 0 finishes"
        self._directory.publish(self._number, self._facts)


class _Planner(DefaultSavePlanner):
    """Provides the staged state. Packs objects in the background thread. Raises the staging error on all ranks."""

    def __init__(self, staged: Staged | Exception) -> None:
        super().__init__(flatten_state_dict=False)
        self._staged = staged

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        if isinstance(self._staged, Exception):
            raise self._staged
        objects = {OBJECTS + key: pack(key, value) for key, value in self._staged.objects.items()}
        super().set_up_planner({**state_dict, **self._staged.tensors, **objects}, storage_meta, is_coordinator)


class _Reader(FileSystemReader):
    """Reads metadata with a restricted unpickler."""

    _metadata: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:  # noqa: ANN401
        if self._metadata is None:
            found = _MetadataUnpickler(io.BytesIO((Path(self.path) / METADATA).read_bytes())).load()
            if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
                raise StateError(f"{METADATA} does not contain metadata")
            found.storage_meta = found.storage_meta or StorageMeta()
            self._metadata = found
        return self._metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        """Returns a class of metadata. Raises UnpicklingError for anything else, such as a function."""
        found: Any = None
        if (module, name) in ALLOWED:
            found = super().find_class(module, name)
        elif module in {"pathlib", "pathlib._local"} and name in {"PosixPath", "WindowsPath"}:
            found = PurePath  # the folder where it was written, which nothing reads
        elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        elif module.startswith("torch.distributed.checkpoint.") and "." not in name:
            found = super().find_class(module, name)
            found = found if isinstance(found, type) and found.__module__ == module else None
        if found is None:
            raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which metadata does not need")
        return found
