"""A layout contains every parameter once, its fragments are nearly equal, and all processes compute the same."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from atoll_wire.layout.layout import (
    FRAME_PARAMETERS,
    LayoutError,
    MergeKind,
    TensorSpec,
    first_difference,
    plan,
    remedy,
)
from hypothesis import given, settings
from hypothesis import strategies as st

A, D = MergeKind.AVERAGE, MergeKind.DIRECTION

shapes = st.lists(st.integers(1, 60), min_size=0, max_size=3).map(tuple)
models = st.lists(st.tuples(shapes, st.sampled_from([A, D])), min_size=1, max_size=12).map(
    lambda parts: [TensorSpec(f"t{i}", shape, "float32", kind) for i, (shape, kind) in enumerate(parts)]
)


def gpt(layers: int = 12, width: int = 768, table: int = 50257) -> list[TensorSpec]:
    block = [
        ("qkv", (3 * width, width)),
        ("out", (width, width)),
        ("up", (4 * width, width)),
        ("down", (width, 4 * width)),
        ("norm", (width,)),
    ]
    tensors = [TensorSpec("embedding", (table, width), "float32", A)]
    return tensors + [TensorSpec(f"{n}.{name}", shape, "float32", D) for n in range(layers) for name, shape in block]


@given(tensors=models, fragments=st.integers(0, 10))
@settings(max_examples=200, deadline=None)
def test_every_parameter_lies_in_exactly_one_piece_and_one_frame(tensors, fragments):
    try:
        layout = plan(tensors, fragments)
    except LayoutError as error:
        assert fragments
        assert "--fragments" in str(error)
        return
    seen = [0] * len(tensors)
    for fragment in layout.fragments:
        assert fragment.length > 0
        offset = 0
        for piece in fragment.pieces:
            assert piece.offset == offset
            offset += piece.length
            seen[piece.tensor] += piece.length
        position = 0
        for span in fragment.frames:
            assert span.offset == position
            assert span.length == sum(s.length for s in span.segments) <= FRAME_PARAMETERS
            assert len(span.segments) == 1 or all(fragment.pieces[s.piece].length == s.length for s in span.segments)
            position += span.length
        assert position == offset == fragment.length
    assert seen == [tensor.size for tensor in tensors]
    assert layout.parameters == sum(seen)


def test_embeddings_balance_the_fragments_of_a_gpt():
    layout = plan(gpt(), 24)
    mean = layout.parameters / 24
    assert max(fragment.length for fragment in layout.fragments) < 1.001 * mean


@given(tensors=models, fragments=st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_embeddings_are_cut_only_at_rows(tensors, fragments):
    try:
        layout = plan(tensors, fragments)
    except LayoutError:
        return
    for piece in (p for f in layout.fragments for p in f.pieces if p.kind is A):
        row = tensors[piece.tensor].row
        assert piece.start % row == 0
        assert piece.length % row == 0


def test_a_tensor_merged_by_direction_is_cut_only_above_twice_the_mean():
    tensors = [TensorSpec("big", (700, 100), "float32", D)] + [
        TensorSpec(f"s{i}", (100, 100), "float32", D) for i in range(5)
    ]
    mean = 120_000 / 4
    pieces = [piece for fragment in plan(tensors, 4).fragments for piece in fragment.pieces]
    assert tensors[0].size > 2 * mean
    assert sum(piece.tensor == 0 for piece in pieces) == 3
    assert all(piece.name.startswith("big[") for piece in pieces if piece.tensor == 0)
    assert all(sum(piece.tensor == n for piece in pieces) == 1 for n in range(1, 6))


def test_default_is_24_fragments_or_what_the_tensors_allow():
    assert len(plan(gpt(), 0).fragments) == 24
    assert len(plan([TensorSpec("a", (3,), "float32", D), TensorSpec("b", (), "float32", D)], 0).fragments) == 4


def test_the_error_for_too_many_fragments_states_the_maximum():
    with pytest.raises(LayoutError, match="with --fragments 2, or omit the option"):
        plan([TensorSpec("a", (2, 50), "float32", A)], 7)


def test_the_fingerprint_is_the_same_in_another_process_and_differs_for_another_model():
    code = "from tests.wire.test_layout import gpt, plan; print(plan(gpt(2, 64, 300), 5).fingerprint.hex())"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    ours = plan(gpt(2, 64, 300), 5).fingerprint.hex()
    assert other.stdout.strip() == ours
    # Golden values: a changed layout breaks existing runs, so a change must be deliberate (increment layout.FORMAT).
    assert ours == "c7174e516860a781b251007b507c24b2117fd45d2d94e949e0bf8fc8f45a1071"
    assert plan(gpt(2, 64, 301), 5).fingerprint.hex() != ours
    assert plan(gpt(2, 64, 300), 4).fingerprint.hex() != ours


T = TensorSpec("w", (2, 3), "float32", D)


def named(name: str) -> TensorSpec:
    return replace(T, name=name)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([T], [T], None),
        ([T], [], 'it has 0 tensors, but the run has 1: missing "w"'),
        (
            [T],
            [TensorSpec("w", (2, 4), "float32", D)],
            '"w" is float32 [2, 4] merged by direction, but in the run it is float32 [2, 3] merged by direction',
        ),
        ([T], [TensorSpec("w", (2, 3), "bfloat16", D)], '"w" is bfloat16 [2, 3]'),
        ([T], [TensorSpec("w", (2, 3), "float32", D, ("v",))], "tied to v"),
        ([T], [T, TensorSpec("x", (1,), "float32", D)], '"x" is not in the run'),
        ([T], [replace(T, dtype="bfloat16"), TensorSpec("x", (1,), "float32", D)], '"x" is not in the run'),
        (
            [T, TensorSpec("x", (1,), "float32", D)],
            [TensorSpec("x", (1,), "float32", D), T],
            'a different order, first at "x"',
        ),
        ([T], [named("net.w")], 'the names of its tensors begin with "net.", but those of the run do not'),
        ([named("net.w")], [T], 'the run\'s tensors begin with "net.", but its own do not'),
    ],
)
def test_a_difference_between_models_names_the_tensor(ours, theirs, said):
    found = first_difference(ours, theirs)
    assert found is None if said is None else said in (found or "")


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([T, named("v")], [named("a.b.w"), named("a.b.v")], 'pass AtollCallback(module="a.b")'),
        ([named("net.w")], [T], 'pass a module whose attribute "net" is this model'),
        ([T], [TensorSpec("w", (2, 3), "bfloat16", D)], "call model.to(torch.float32) before"),
        ([T], [TensorSpec("w", (2, 4), "bfloat16", D)], "build the model of the run"),
        ([T, named("v")], [named("a.w"), named("b.v")], "build the model of the run"),
        ([T, named("v")], [named("a.w")], "build the model of the run"),
        ([T, named("v")], [T], "build the model of the run"),
        ([T], [], "build the model of the run"),
        ([named("w")], [named("xw")], "build the model of the run"),
    ],
)
def test_the_remedy_for_a_different_model_depends_on_the_difference(ours, theirs, said):
    assert said in remedy(ours, theirs)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([], "no trainable parameters"),
        ([TensorSpec("w", (0,), "float32", D)], "no trainable parameters"),
        ([T, T], 'two tensors are named "w"'),
        ([TensorSpec("w", (2,), "int8", D)], '"w" is int8'),
    ],
)
def test_malformed_models_are_refused_in_one_line(tensors, said):
    with pytest.raises(LayoutError, match=said):
        plan(tensors, 1)
