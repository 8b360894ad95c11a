"""A fragment's parameters as float32 on the host, for any memory layout and type of the model."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from atoll.boundary.host_memory import HostMemory
from atoll.fragments import segments
from atoll.ranks.division import Division, undivided
from atoll_wire.layout.layout import plan
from torch import nn

from tests.learner.odd import Odd, parameters


def looking_at(model: nn.Module, fragments: int) -> tuple[list[nn.Parameter], HostMemory, list[Division]]:
    mine = parameters(model)
    divisions = undivided(plan(mine.tensors, fragments))
    return mine.values, HostMemory(mine.values, [division.pieces for division in divisions]), divisions


def load(memory: HostMemory, division: Division) -> np.ndarray:
    out = np.empty(division.local_length, np.float32)
    segments.gather(memory.read(division.fragment.index), rows(division), out)
    return out


def store(vector: np.ndarray, memory: HostMemory, division: Division) -> None:
    segments.store(vector, memory.read(division.fragment.index), rows(division))
    memory.write(division.fragment.index)


def rows(division: Division) -> np.ndarray:
    return np.array([(piece.offset, piece.length) for piece in division.pieces], np.int64)


def test_reading_and_writing_a_fragment_are_inverse_on_any_layout_of_memory():
    model = Odd()
    values, host_memory, fragments = looking_at(model, 3)
    for number, division in enumerate(fragments):
        vector = np.random.default_rng(number).integers(-8, 8, division.local_length).astype(np.float32)
        store(vector, host_memory, division)
        assert np.array_equal(load(host_memory, division), vector)
        flat = [values[p.tensor].detach().float().reshape(-1)[p.start :][: p.length] for p in division.pieces]
        assert np.array_equal(torch.cat(flat).numpy(), vector)  # in order of elements, not of memory
    assert model.head.weight is model.table.weight


def test_rounding_to_a_narrow_type_loses_no_values():
    values, host_memory, [division] = looking_at(nn.Linear(40, 30).to(torch.bfloat16), 1)
    vector = np.random.default_rng(0).standard_normal(division.local_length).astype(np.float32)
    store(vector, host_memory, division)
    np.testing.assert_allclose(load(host_memory, division), vector, atol=1e-7)
    stored = torch.cat([values[piece.tensor].detach().reshape(-1) for piece in division.pieces])
    assert torch.equal(stored, torch.from_numpy(vector).to(torch.bfloat16))
    for _ in range(20):  # each too small for bfloat16
        store(load(host_memory, division) + np.float32(1e-6), host_memory, division)
    np.testing.assert_allclose(load(host_memory, division), vector + np.float32(2e-5), atol=1e-6)


def test_changes_of_the_model_between_two_reads_are_seen():
    """Views are kept, but not across `p.data = ...`, which `Module.to` uses."""
    values, host_memory, fragments = looking_at(Odd(), 3)

    def read() -> np.ndarray:
        return np.concatenate([load(host_memory, division) for division in fragments])

    first = read()
    with torch.no_grad():
        for value in values:
            value.add_(1.0)
    assert np.allclose(read(), first + 1.0, atol=0.02)  # one tensor is bfloat16
    for value in values:
        value.data = torch.zeros_like(value)
    assert not read().any()
    for division in fragments:
        store(np.full(division.local_length, 2.0, np.float32), host_memory, division)
    assert all(bool((value == 2.0).all()) for value in values)


def test_a_matrix_that_was_transposed_in_place_is_seen():
    model = nn.Linear(6, 6, bias=False)
    values, host_memory, [division] = looking_at(model, 1)
    before = load(host_memory, division)
    values[0].data = values[0].data.t()  # the same memory
    assert np.array_equal(load(host_memory, division), before.reshape(6, 6).T.ravel())


def test_read_pages_can_be_freed():
    model = nn.Linear(4, 4)
    values, host_memory, _ = looking_at(model, 1)
    host_memory.read(0)
    old = weakref.ref(model.weight.untyped_storage())
    for value in values:
        value.data = torch.zeros_like(value)
    assert old() is not None, "without a kept view, this shows nothing"
    host_memory.forget()
    assert old() is None
