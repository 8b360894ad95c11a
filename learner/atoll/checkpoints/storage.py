"""Writes and reads checkpoints with torch.distributed.checkpoint. Writes are atomic, and the files contain no code.

The library stores objects with pickle. Atoll therefore stores only tensors. It packs objects as bytes that torch.load
must accept with weights_only=True. The library's metadata file is a pickle too. `_Reader` allows only metadata classes.

The planners in this module describe each rank's parts as blocks of the whole tensors. Ranks with any other division of
the tensors can read the blocks.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from atoll.checkpoints.directory import CheckpointDirectory, Facts
from atoll.checkpoints.nested_state import Apart, StateError, first_line, pack, unpack
from atoll.checkpoints.staging import HeldPart, Staged
from atoll.ranks.tensor_part import Block, TensorPart

METADATA = ".metadata"
OBJECTS = "objects."  # prefix of the keys of packed objects
ALLOWED = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
ONE_PROCESS = "torch.distributed is disabled, unavailable or uninitialized"  # intended, so not worth a warning
warnings.filterwarnings("ignore", message=ONE_PROCESS, module=r"torch\.distributed\.checkpoint")


def start_save(
    staged: Staged | Exception,
    directory: CheckpointDirectory,
    number: int,
    facts: Facts | None,
    rank: int,
    group: dist.ProcessGroup | None,
) -> Future[Any]:
    """Begins to write a checkpoint in a background thread. Every rank calls this.

    staged: this rank's state, or the error that prevented the copy, which makes the save fail on all ranks. facts: None
    except on rank 0. group: a process group of all ranks that nothing else uses, or None without torch.distributed. The
    returned future raises the error of a failed save.
    """
    save = async_save(
        {},  # the planner has the state, because the library spends tens of microseconds on each key here
        storage_writer=_Writer(directory, number, rank, facts),
        planner=_SavePlanner(staged),
        process_group=group,
    )
    assert isinstance(save, Future), "this writer stages before it returns"
    return save


class SavedTensors:
    """The tensors of a checkpoint. Each rank reads what it needs, independently of the other ranks.

    described: the shape and dtype of each tensor, by key. It is available after `open`.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = _Reader(folder)
        self.described: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def open(self) -> None:
        """Reads the metadata. Raises StateError."""
        try:
            for key, each in self._reader.read_metadata().state_dict_metadata.items():
                if isinstance(each, TensorStorageMetadata):
                    self.described[key] = tuple(each.size), each.properties.dtype
        except Exception as error:
            raise StateError(f"its metadata cannot be read ({first_line(error)})") from error

    def dtype(self, key: str) -> torch.dtype:
        """Returns a tensor's dtype. Raises StateError."""
        if key not in self.described:
            raise StateError(f'it lacks "{key}"')
        return self.described[key][1]

    def read(self, wanted: Mapping[str, HeldPart]) -> None:
        """Fills the values of the wanted parts. Raises StateError."""
        for key in wanted:
            self.dtype(key)
        try:
            load({}, storage_reader=self._reader, planner=_LoadPlanner(wanted), no_dist=True)
        except Exception as error:
            raise StateError(f"it cannot be read ({cause(error)})") from error

    def read_whole(self, key: str) -> torch.Tensor:
        """Returns a whole tensor. Raises StateError."""
        shape, dtype = self.described.get(key, ((), torch.uint8))
        found = torch.empty(shape, dtype=dtype)
        self.read({key: HeldPart(TensorPart.whole(shape), found)})
        return found

    def read_object(self, name: str) -> Apart:
        """Returns a nested state without its tensors. Raises StateError."""
        return unpack(name, self.read_whole(OBJECTS + name))


def cause(error: BaseException) -> str:
    """Returns the first line of the first rank's error."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, Mapping) and failures:
        rank, (inner, _) = min(failures.items())
        return first_line(inner) if len(failures) == 1 and rank == 0 else f"rank {rank}: {first_line(inner)}"
    return first_line(error)


class _Writer(FileSystemWriter):
    """Writes staged tensors to a temporary folder. Rank 0 then publishes the folder."""

    def __init__(self, directory: CheckpointDirectory, number: int, rank: int, facts: Facts | None) -> None:
        super().__init__(directory.part(number), per_thread_copy_ahead=0)
        self._directory, self._number, self._rank, self._facts = directory, number, rank, facts

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the tensors as they are, because Atoll has already copied them."""
        return state_dict

    def write_data(self, plan: SavePlan, planner: Any) -> Any:  # noqa: ANN401
        """Writes this rank's files and then their checksums."""
        written = super().write_data(plan, planner)  # blocks until the files are written
        self._directory.record_sums(self._number, self._rank)
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        assert self._facts is not None, "only rank 0 finishes"
        self._directory.publish(self._number, self._facts)


class _SavePlanner(DefaultSavePlanner):
    """Plans the blocks of the staged state. Packs objects in the background thread. Raises the staging error on all
    ranks. The base class lets only one rank write a block that several ranks have."""

    def __init__(self, staged: Staged | Exception) -> None:
        super().__init__(flatten_state_dict=False)
        self._staged = staged
        self._blocks: dict[MetadataIndex, torch.Tensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        if isinstance(self._staged, Exception):
            raise self._staged
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        assert isinstance(self._staged, Staged), "checked in set_up_planner"
        packed = {OBJECTS + name: pack(apart) for name, apart in self._staged.objects.items()}
        wholes = {key: HeldPart(TensorPart.whole(each.shape), each) for key, each in packed.items()}
        items = []
        for key, held in (self._staged.tensors | wholes).items():
            for block in held.part.blocks():
                values = _narrowed(held.values, block)
                index = MetadataIndex(key, torch.Size(block.offsets))
                self._blocks[index] = values
                properties = TensorProperties(dtype=values.dtype)
                data = TensorWriteData(_chunk(block), properties, torch.Size(held.part.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._blocks[index]


class _LoadPlanner(DefaultLoadPlanner):
    """Plans which blocks of the saved tensors fill the wanted parts."""

    def __init__(self, wanted: Mapping[str, HeldPart]) -> None:
        super().__init__(flatten_state_dict=False)
        self._wanted = wanted
        self._blocks: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "set by set_up_planner"
        items = []
        for key, held in self._wanted.items():
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata), "described"
            blocks = held.part.blocks()
            for block in blocks:
                self._blocks[MetadataIndex(key, torch.Size(block.offsets))] = _narrowed(held.values, block)
            items += create_read_items_for_chunk_list(key, saved, [_chunk(block) for block in blocks])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._blocks[index]


def _narrowed(values: torch.Tensor, block: Block) -> torch.Tensor:
    """Returns a view of a block's values in a part."""
    for dimension, (start, length) in enumerate(zip(block.at, block.sizes, strict=True)):
        values = values.narrow(dimension, start, length)
    return values


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(block.offsets), sizes=torch.Size(block.sizes))


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
            found = PurePath  # the folder of the checkpoint, which nothing reads
        elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        elif module.startswith("torch.distributed.checkpoint.") and "." not in name:
            found = super().find_class(module, name)
            found = found if isinstance(found, type) and found.__module__ == module else None
        if found is None:
            raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which metadata does not need")
        return found
