"""A whole model, written fragment by fragment, has the same bytes as one written from memory."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from atoll_server.checkpoints.model_data import ModelData, PartError, write_part
from atoll_server.checkpoints.tensor_file import TensorFile, open_tensors
from atoll_server.merging import merge
from atoll_server.merging.merge import FragmentState
from atoll_wire.layout.layout import Layout, MergeKind, TensorSpec, plan
from atoll_wire.model_file.model_file import RunId, write_model

RUN = RunId("run", 2)
SPECS = [
    TensorSpec("large", (300, 40), "float32", MergeKind.AVERAGE, ("tied",)),
    TensorSpec("narrow", (64, 64), "bfloat16", MergeKind.DIRECTION, ()),
    TensorSpec("half", (50, 64), "float16", MergeKind.DIRECTION, ()),
    TensorSpec("scalar", (), "float32", MergeKind.AVERAGE, ()),
]


@pytest.fixture
def model(tmp_path: Path) -> tuple[Layout, TensorFile, dict[int, FragmentState]]:
    drawn = np.random.default_rng(3)
    arrays = {spec.name: drawn.normal(size=spec.shape).astype(np.float32) for spec in SPECS}
    arrays["half"] = arrays["half"].astype(np.float16)
    arrays["frozen"] = drawn.integers(0, 9, (5,))
    path = tmp_path / "initial.safetensors"
    safetensors.numpy.save_file({name: np.asarray(each) for name, each in arrays.items()}, path)
    layout = plan(SPECS, 4)
    states = {}
    for fragment in layout.fragments:
        states[fragment.index] = merge.start(drawn.normal(size=fragment.length).astype(np.float32))
        states[fragment.index] = FragmentState(
            fragment.index + 7, *(getattr(states[fragment.index], part) for part in ("theta", "theta_pub", "momentum"))
        )
    return layout, open_tensors(path), states


def from_memory(layout: Layout, initial: TensorFile, states: dict[int, FragmentState]) -> bytes:
    file = io.BytesIO()
    write_model(file, layout, initial, states, RUN)
    return file.getvalue()


@pytest.mark.parametrize("most", [1, 7, 1000, 1 << 20])
def test_fragments_in_any_order_and_parts_in_chunks_of_any_size_give_the_same_bytes(model, most):
    layout, initial, states = model
    drawn = random.Random(most)
    assert any(len(fragment.pieces) > 1 for fragment in layout.fragments)
    assert any(piece.start for fragment in layout.fragments for piece in fragment.pieces), "a tensor is cut"
    file = io.BytesIO()
    data = ModelData(file, layout, initial, RUN)
    for fragment in drawn.sample(layout.fragments, len(layout.fragments)):
        if fragment.index % 2:
            data.add(fragment, states[fragment.index])
            continue
        part, writer, at = io.BytesIO(), data.part(fragment), 0
        write_part(part, layout, fragment, states[fragment.index])
        while chunk := part.getvalue()[at : at + drawn.randint(1, most)]:
            writer.take(chunk)
            at += len(chunk)
        writer.finish()
    data.copy_fixed()
    assert data.header() + file.getvalue() == from_memory(layout, initial, states)


def test_a_part_with_missing_or_extra_bytes_or_of_another_fragment_is_refused(model):
    layout, initial, states = model
    part = io.BytesIO()
    write_part(part, layout, layout.fragments[0], states[0])
    whole = part.getvalue()
    data = ModelData(io.BytesIO(), layout, initial, RUN)
    for count in (0, 5, 60, len(whole) - 1):
        writer = data.part(layout.fragments[0])
        writer.take(whole[:count])
        with pytest.raises(PartError, match="ended early"):
            writer.finish()
    for other, text, chunk in (
        (0, "too long", whole + b"x"),
        (1, "differ from this run", whole),
        (0, "invalid", b"\xff" * 9),
    ):
        with pytest.raises(PartError, match=text):
            data.part(layout.fragments[other]).take(chunk)
