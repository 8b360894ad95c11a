"""Writes the published model as a safetensors file for `load_state_dict`.

The file lacks the frozen parameters that the initial parameters lack. If there are none, `strict=True` works. Trainable
tensors are written in the model's own types, and tied tensors are written once for each name. Frozen tensors and
buffers keep their values from the initial parameters. The metadata names the run, its generation and the version of
each fragment, and lists unshared tensors, buffers and missing frozen parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll_wire.layout.layout import Layout
from atoll_wire.layout.tensor_header import Sink, TensorEntry, TensorHead, write_header
from atoll_wire.model_file.metadata_keys import GENERATION, RUN, VERSIONS
from atoll_wire.model_file.tensor_values import FORMAT_NAME, cast_float32, write_data
from atoll_wire.model_file.unshared_tensors import metadata_lists


class RunId(NamedTuple):
    """The run and generation that a model comes from."""

    run: str
    generation: int


class InitialTensors(Protocol):
    """The tensors of a run's initial parameters, by name and in the order of the file."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """The type and shape of each tensor."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's metadata."""

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Returns a tensor's bytes: uint8 (bytes,)."""


class PublishedFragment(Protocol):
    """One version of a fragment."""

    @property
    def version(self) -> int:
        """The version of the values."""

    @property
    def theta_pub(self) -> NDArray[np.float32]:
        """The published parameters: float32 (fragment.length,)."""


def write_model(
    file: Sink,
    layout: Layout,
    initial: InitialTensors,
    states: Mapping[int, PublishedFragment],
    run: RunId | None,
) -> int:
    """Writes the whole published model. Returns the file's size in bytes.

    states: one version per fragment, by number. run: the run of the values; None after a replay with other settings.
    """
    owners = owners_of(layout)
    heads = heads_of(layout, initial)
    versions = {index: state.version for index, state in states.items()}
    size = write_header(file, heads, metadata_of(layout, initial, versions, run))
    for name, dtype, _ in heads:
        if name in owners:
            for values in _parts(layout, owners[name], states):
                write_data(file, cast_float32(values, dtype))
        else:
            write_data(file, initial.raw(name))
    return size


def owners_of(layout: Layout) -> dict[str, int]:
    """Returns each trainable tensor's index in the layout, by each of the tensor's names."""
    return {name: index for index, t in enumerate(layout.tensors) for name in (t.name, *t.tied_names)}


def heads_of(layout: Layout, initial: InitialTensors) -> list[TensorHead]:
    """Returns the tensors of the model's file, in order."""
    owners = owners_of(layout)
    heads: list[TensorHead] = []
    for name in list(initial.entries) + [name for name in owners if name not in initial.entries]:
        if name in owners:
            tensor = layout.tensors[owners[name]]
            heads.append((name, FORMAT_NAME[tensor.dtype], tensor.shape))
        else:
            heads.append((name, initial.entries[name].dtype, initial.entries[name].shape))
    return heads


def metadata_of(
    layout: Layout, initial: InitialTensors, versions: Mapping[int, int], run: RunId | None
) -> dict[str, str]:
    """Returns the metadata of the model's file. versions: version of each fragment. run: see `write_model`."""
    metadata = {"format": "pt"}
    if run is not None:
        metadata |= {RUN: run.run, GENERATION: str(run.generation)}
    metadata[VERSIONS] = ",".join(str(versions[fragment.index]) for fragment in layout.fragments)
    return metadata | metadata_lists(initial.entries, owners_of(layout), initial.metadata)


def _parts(layout: Layout, tensor: int, states: Mapping[int, PublishedFragment]) -> Iterator[NDArray[Any]]:
    """Yields the published values of a tensor's pieces, in order. tensor: index in the layout."""
    pieces = [
        (piece, fragment.index) for fragment in layout.fragments for piece in fragment.pieces if piece.tensor == tensor
    ]
    for piece, fragment in sorted(pieces, key=lambda place: place[0].start):
        yield states[fragment].theta_pub[piece.offset : piece.offset + piece.length]
