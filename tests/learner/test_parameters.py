"""From somebody's model to tensors: tied once, frozen never, wrappers without a trace."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from atoll.errors import LearnerError
from atoll.parameters import Parameters
from atoll_wire.layout import MergeKind, plan
from safetensors.torch import load_file
from torch import nn


class Odd(nn.Module):
    """Tied head, a frozen part, a buffer, a narrow type, a tensor that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.middle = nn.Linear(8, 8).to(torch.bfloat16)
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("seen", torch.arange(3))


def parameters(model: nn.Module) -> Parameters:
    return Parameters(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))


def test_trainable_tensors_come_once_in_the_models_order_with_their_tied_names():
    found = {t.name: t for t in parameters(Odd()).tensors}
    assert list(found) == ["turned", "table.weight", "middle.weight", "middle.bias"]
    assert found["table.weight"].tied_names == ("head.weight",)
    assert found["table.weight"].kind is MergeKind.AVERAGE
    assert found["middle.weight"].dtype == "bfloat16"
    assert found["middle.weight"].kind is MergeKind.DIRECTION


def test_an_untied_output_head_is_merged_like_its_embedding():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50))
    assert [t.kind.value for t in parameters(model).tensors] == [
        "average",
        "direction",
        "direction",
        "average",
        "direction",
    ]


def test_wrappers_leave_no_trace_in_names():
    plain = nn.Sequential(nn.Linear(3, 3))
    wrapped = nn.Module()
    wrapped.add_module("module", nn.Module())
    wrapped.module.add_module("_orig_mod", plain)
    assert [t.name for t in parameters(wrapped).tensors] == [t.name for t in parameters(plain).tensors]


def test_reading_and_writing_a_fragment_are_inverse_on_any_layout_of_memory():
    model = Odd()
    mine = parameters(model)
    for fragment in plan(mine.tensors, 3).fragments:
        values = np.random.default_rng(fragment.index).integers(-8, 8, fragment.length).astype(np.float32)
        mine.stage(fragment, 0)[:] = values
        mine.write(fragment, 0)
        assert np.array_equal(mine.read(fragment, 1), values)
        flat = [mine.values[p.tensor].detach().float().reshape(-1)[p.start :][: p.length] for p in fragment.pieces]
        assert np.array_equal(torch.cat(flat).numpy(), values)  # in the order of elements, not of memory
    assert model.head.weight is model.table.weight


def test_what_happens_to_the_model_between_two_readings_is_seen():
    """Views on it are kept, but not across `p.data = ...`, as `Module.to` does."""
    model = Odd()
    mine = parameters(model)
    fragments = plan(mine.tensors, 3).fragments

    def read() -> np.ndarray:
        return np.concatenate([mine.read(f, 0).copy() for f in fragments])

    first = read()
    with torch.no_grad():
        for value in mine.values:
            value.add_(1.0)
    assert np.allclose(read(), first + 1.0, atol=0.02)  # one tensor is bfloat16
    for value in mine.values:
        value.data = torch.zeros_like(value)
    assert not read().any()
    for fragment in fragments:
        mine.stage(fragment, 1).fill(2.0)
        mine.write(fragment, 1)
    assert all(bool((value == 2.0).all()) for value in mine.values)


def test_the_frozen_digest_follows_frozen_values_only():
    torch.manual_seed(0)
    model = Odd()
    before = parameters(model).frozen_digest()
    with torch.no_grad():
        model.table.weight += 1
    assert parameters(model).frozen_digest() == before
    with torch.no_grad():
        model.frozen.weight += 1
    assert parameters(model).frozen_digest() != before


def test_first_parameters_hold_the_whole_state_dict_with_tied_tensors_once(tmp_path):
    model = Odd()
    parameters(model).save(tmp_path / "first.safetensors")
    stored = load_file(tmp_path / "first.safetensors")
    assert set(stored) == set(model.state_dict()) - {"head.weight"}
    for name, tensor in stored.items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(LearnerError, match="the model does not have"):
        Parameters(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))


def test_two_parameters_in_one_memory_are_refused_in_one_line():
    model = Odd()
    model.head.weight = nn.Parameter(model.table.weight.detach())
    with pytest.raises(LearnerError, match=r'"table.weight" and "head.weight" are two parameters in one memory'):
        parameters(model)


def test_what_was_looked_at_can_be_freed():
    model = nn.Linear(4, 4)
    mine = parameters(model)
    fragment = plan(mine.tensors, 1).fragments[0]
    mine.read(fragment, 0)
    old = weakref.ref(model.weight.untyped_storage())
    for value in mine.values:
        value.data = torch.zeros_like(value)
    mine.forget()
    assert old() is None


def test_sharded_parameters_are_refused_in_one_line():
    model = nn.Linear(2, 2)
    model.weight.placements = ()  # what marks a DTensor
    with pytest.raises(LearnerError, match=r'"weight" is sharded \(DTensor\)'):
        parameters(model)
