"""A fragment's parameters as float32 on the host, for any memory and type of the model."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from atoll.boundary.host_memory import HostMemory
from atoll.fragments.segments import load, store
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import FragmentLayout, plan
from torch import nn

from tests.learner.odd import Odd, parameters


def looking_at(model: nn.Module, fragments: int) -> tuple[list[nn.Parameter], HostMemory, tuple[FragmentLayout, ...]]:
    mine = parameters(model)
    layout = plan(mine.tensors, fragments)
    return mine.values, HostMemory(mine.values, layout.runs, Codec.INT4), layout.fragments


def test_reading_and_writing_a_fragment_are_inverse_on_any_layout_of_memory():
    model = Odd()
    values, host_memory, fragments = looking_at(model, 3)
    for number, fragment in enumerate(fragments):
        vector = np.random.default_rng(number).integers(-8, 8, fragment.length).astype(np.float32)
        store(vector, host_memory.read(number), host_memory.shapes[number])
        host_memory.write(number)
        assert np.array_equal(load(host_memory.read(number), host_memory.shapes[number]), vector)
        flat = [values[p.tensor].detach().float().reshape(-1)[p.start :][: p.length] for p in fragment.pieces]
        assert np.array_equal(torch.cat(flat).numpy(), vector)  # in the order of elements, not of memory
    assert model.head.weight is model.table.weight


def test_the_rounding_to_a_narrow_type_is_recorded():
    _, host_memory, fragments = looking_at(nn.Linear(40, 30).to(torch.bfloat16), 1)
    vector = np.random.default_rng(0).standard_normal(fragments[0].length).astype(np.float32)
    store(vector, host_memory.read(0), host_memory.shapes[0])
    said = host_memory.write(0)
    assert said is not None
    wanted, stored = said
    assert np.array_equal(wanted, vector)
    assert np.array_equal(stored, torch.from_numpy(vector).to(torch.bfloat16).float().numpy())
    _, host_memory, _ = looking_at(nn.Linear(40, 30), 1)
    host_memory.read(0)
    assert host_memory.write(0) is None


def test_changes_of_the_model_between_two_reads_are_seen():
    """Views are kept, but not across `p.data = ...`, which `Module.to` uses."""
    values, host_memory, fragments = looking_at(Odd(), 3)

    def read() -> np.ndarray:
        return np.concatenate([load(host_memory.read(f.index), host_memory.shapes[f.index]) for f in fragments])

    first = read()
    with torch.no_grad():
        for value in values:
            value.add_(1.0)
    assert np.allclose(read(), first + 1.0, atol=0.02)  # one tensor is bfloat16
    for value in values:
        value.data = torch.zeros_like(value)
    assert not read().any()
    for fragment in fragments:
        shape = host_memory.shapes[fragment.index]
        store(np.full(shape.length, 2.0, np.float32), host_memory.read(fragment.index), shape)
        host_memory.write(fragment.index)
    assert all(bool((value == 2.0).all()) for value in values)


def test_a_matrix_that_was_turned_in_place_is_seen():
    model = nn.Linear(6, 6, bias=False)
    values, host_memory, _ = looking_at(model, 1)
    before = load(host_memory.read(0), host_memory.shapes[0])
    values[0].data = values[0].data.t()  # the same memory
    assert np.array_equal(load(host_memory.read(0), host_memory.shapes[0]), before.reshape(6, 6).T.ravel())


def test_read_pages_can_be_freed():
    model = nn.Linear(4, 4)
    values, host_memory, _ = looking_at(model, 1)
    host_memory.read(0)
    old = weakref.ref(model.weight.untyped_storage())
    for value in values:
        value.data = torch.zeros_like(value)
    assert old() is not None, "else this shows nothing"
    host_memory.forget()
    assert old() is None
