"""Exports the published model as a safetensors file that `load_state_dict(strict=True)` accepts.

Trainable tensors are written in the model's own types, and tied tensors are written once for each name. Frozen tensors
and buffers keep their values from the initial parameters. The metadata lists the tensors whose values may have changed
in training, and the frozen parameters that the initial parameters lack. Without these, the model loads over its base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from atoll_wire.layout.layout import Layout
from atoll_wire.layout.tensor_header import Sink, TensorHead, write_header
from numpy.typing import NDArray

from atoll_server.checkpoints.tensor_file import FORMAT_NAME, TensorFile, cast_float32, write_data
from atoll_server.checkpoints.unshared_tensors import metadata_lists
from atoll_server.merging.merge import FragmentState

VERSIONS = "atoll.versions"  # key in the metadata


def write_checkpoint(file: Sink, layout: Layout, initial: TensorFile, states: Mapping[int, FragmentState]) -> int:
    """Writes the whole published model. Returns the file's size in bytes. states: one per fragment, by number."""
    owners = _owners(layout)
    heads = heads_of(layout, initial)
    size = write_header(
        file, heads, metadata_of(layout, initial, {index: state.version for index, state in states.items()})
    )
    for name, dtype, _ in heads:
        if name in owners:
            for values in _parts(layout, owners[name], states):
                write_data(file, cast_float32(values, dtype))
        else:
            write_data(file, initial.raw(name))
    return size


def _owners(layout: Layout) -> dict[str, int]:
    """Returns the index in the layout of each trainable tensor, by each of its names."""
    return {name: index for index, t in enumerate(layout.tensors) for name in (t.name, *t.tied_names)}


def heads_of(layout: Layout, initial: TensorFile) -> list[TensorHead]:
    """Returns the tensors of the model's file, in order."""
    owners = _owners(layout)
    heads: list[TensorHead] = []
    for name in list(initial.entries) + [name for name in owners if name not in initial.entries]:
        if name in owners:
            tensor = layout.tensors[owners[name]]
            heads.append((name, FORMAT_NAME[tensor.dtype], tensor.shape))
        else:
            heads.append((name, initial.entries[name].dtype, initial.entries[name].shape))
    return heads


def metadata_of(layout: Layout, initial: TensorFile, versions: Mapping[int, int]) -> dict[str, str]:
    """Returns the metadata of the model's file. versions: by fragment."""
    metadata = {
        "format": "pt",
        VERSIONS: ",".join(str(versions[fragment.index]) for fragment in layout.fragments),
    }
    return metadata | metadata_lists(initial.entries, _owners(layout), initial.metadata)


def _parts(layout: Layout, tensor: int, states: Mapping[int, FragmentState]) -> Iterator[NDArray[np.float32]]:
    """Yields the published values of a tensor's pieces, in order. tensor: index in the layout."""
    pieces = [
        (piece, fragment.index) for fragment in layout.fragments for piece in fragment.pieces if piece.tensor == tensor
    ]
    for piece, fragment in sorted(pieces, key=lambda place: place[0].start):
        yield states[fragment].theta_pub[piece.offset : piece.offset + piece.length]
