"""A reader gets all bytes of the model's file that training does not change, and the order of tensors."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from atoll_wire.layout.layout import MergeKind, TensorSpec, plan
from atoll_wire.layout.tensor_header import TensorEntry, TensorFileError, header_bytes
from atoll_wire.model_file import fixed_values
from atoll_wire.model_file.fixed_values import FixedFrames, FixedValues
from atoll_wire.model_file.metadata_keys import LISTED
from atoll_wire.model_file.model_file import RunId, write_model

SPECS = [
    TensorSpec("table", (30, 4), "bfloat16", MergeKind.AVERAGE, ("head",)),
    TensorSpec("dense", (6, 6), "float32", MergeKind.DIRECTION),
]
LAYOUT = plan(SPECS, 2)
KINDS = {"I64": np.int64, "F32": np.float32, "BF16": np.uint16, "U8": np.uint8}


@dataclass
class Initial:
    """Initial parameters in memory."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    arrays: dict[str, Any]

    def raw(self, name: str) -> Any:
        return self.arrays[name].reshape(-1).view(np.uint8)


@dataclass
class State:
    version: int
    theta_pub: Any


def initial(metadata: dict[str, str]) -> Initial:
    drawn, entries, arrays, at = np.random.default_rng(1), {}, {}, 0
    shapes = {
        "counts": ("I64", (3,)),
        "table": ("BF16", (30, 4)),
        "empty": ("F32", (0, 2)),
        "frozen": ("F32", (25, 4)),
        "dense": ("F32", (6, 6)),
        "last": ("U8", (5,)),
    }
    for name, (kind, shape) in shapes.items():
        arrays[name] = drawn.integers(0, 99, shape).astype(KINDS[kind])
        entries[name] = TensorEntry(kind, shape, at, at + arrays[name].nbytes)
        at += arrays[name].nbytes
    return Initial(entries, metadata, arrays)


@pytest.mark.parametrize("frame_bytes", [1, 7, 100, 1 << 20])
def test_frames_of_any_size_give_the_file_that_the_initial_parameters_give(frame_bytes, monkeypatch):
    monkeypatch.setattr(fixed_values, "FRAME_BYTES", frame_bytes)
    given = initial({LISTED: '["frozen"]', "author": "unknown"})
    frames = FixedFrames(LAYOUT, given)
    content = b"".join(frames.frame(index) for index in range(frames.count))
    assert len(content) == frames.size_bytes
    assert fixed_values.frame_count(frames.size_bytes) == frames.count
    found = FixedValues.read(np.frombuffer(content, np.uint8))
    assert found.tensors == tuple(SPECS)
    assert len(found.raw("table")) == 0, "a trained tensor must have no values"
    states = {each.index: State(3, np.arange(each.length, dtype=np.float32)) for each in LAYOUT.fragments}
    ours, theirs = io.BytesIO(), io.BytesIO()
    write_model(ours, LAYOUT, found, states, RunId("run", 1))
    write_model(theirs, LAYOUT, given, states, RunId("run", 1))
    assert ours.getvalue() == theirs.getvalue()
    assert b'"atoll.run":"run","atoll.generation":"1","atoll.versions":"3,3","atoll.initial":' in ours.getvalue()


@pytest.mark.parametrize(
    "described",
    [
        "[", "3", "[3]", "[{}]", '{"a": 1}',
        json.dumps([{"name": 3, "shape": [1], "dtype": "float32", "kind": "average", "tied_names": []}]),
        json.dumps([{"name": "a", "shape": [-1], "dtype": "float32", "kind": "average", "tied_names": []}]),
        json.dumps([{"name": "a", "shape": [1.0], "dtype": "float32", "kind": "average", "tied_names": []}]),
        json.dumps([{"name": "a", "shape": [1], "dtype": "float32", "kind": "odd", "tied_names": []}]),
        json.dumps([{"name": "a", "shape": [1], "dtype": "float32", "kind": "average", "tied_names": [1]}]),
    ],
)  # fmt: skip
def test_an_invalid_description_of_the_trained_tensors_is_refused(described):
    head, _ = header_bytes([], {fixed_values.TENSORS: described})
    with pytest.raises(TensorFileError):
        FixedValues.read(np.frombuffer(head, np.uint8))


def test_a_damaged_file_is_refused():
    content = bytearray(FixedFrames(LAYOUT, initial({})).frame(0))
    for damaged in (b"", content[:7], content[:-1], bytes((255,)) + content[1:]):
        with pytest.raises(TensorFileError):
            FixedValues.read(np.frombuffer(bytes(damaged), np.uint8))
