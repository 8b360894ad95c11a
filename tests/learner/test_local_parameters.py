"""The local parameters at a step boundary, in the model's own type and memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from atoll.boundary.host_memory import HostMemory
from atoll.boundary.local_parameters import LocalParameters
from atoll.boundary.parameters import Parameters
from atoll.fragments.adoption import Fate, PreparedAnchor
from atoll.ranks.division import undivided
from atoll_wire.codec import frame_codec
from atoll_wire.layout.frame_spans import Codec, FrameSpan, Segment
from atoll_wire.layout.layout import plan
from torch import nn


def local(dtype: torch.dtype) -> tuple[nn.Module, LocalParameters, list[np.ndarray]]:
    """Returns a model with two fragments of different length, its local parameters, and its anchors."""
    model = nn.ModuleList([nn.Linear(30, 20, bias=False), nn.Linear(7, 5, bias=False)]).to(dtype)
    parameters = Parameters(model, torch.optim.SGD(model.parameters(), 0.1))
    layout, random = plan(parameters.tensors, 2), np.random.default_rng(0)
    anchors = [random.standard_normal(fragment.length).astype(np.float32) for fragment in layout.fragments]
    assert len({len(anchor) for anchor in anchors}) == 2
    return (
        model,
        LocalParameters(
            parameters.values,
            undivided(layout),
            Codec.INT4,
            [PreparedAnchor(number, 1, each, Fate()) for number, each in enumerate(anchors)],
            keep=True,
        ),
        anchors,
    )


def work(mine: LocalParameters, number: int, tokens: int, steps: int) -> np.ndarray:
    """Takes a fragment's work, and returns its values."""
    contents, shape = mine.take(number, tokens, steps).coded.contents, mine.tracks[number].shape
    out, span = np.zeros(shape.length, np.float32), FrameSpan(0, 0, shape.length, (Segment(0, 0, shape.length),))
    frame_codec.content_add(contents[0], span, Codec.INT4, np.ones(1, np.float32), out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adopted_values_are_not_work(dtype):
    _, mine, anchors = local(dtype)
    for version in (2, 3):
        for fragment, anchor in enumerate(anchors):
            assert mine.adopt(PreparedAnchor(fragment, version, anchor + version, Fate()), 0, 0) == 0
    for fragment in (0, 1):
        assert not work(mine, fragment, 0, 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_the_work_of_its_fragment_alone(dtype):
    model, mine, anchors = local(dtype)
    for fragment, anchor in enumerate(anchors):
        mine.adopt(PreparedAnchor(fragment, 2, anchor + 1, Fate()), 0, 0)
    with torch.no_grad():
        model[1].weight += 2
    taken = [work(mine, fragment, 8, 1) for fragment in (0, 1)]
    small = int(np.argmin([len(vector) for vector in taken]))
    np.testing.assert_allclose(taken[small], -2, atol=0.07)
    assert not taken[1 - small].any()


def test_an_adoption_in_a_copy_leaves_the_model_unchanged():
    model, mine, anchors = local(torch.bfloat16)
    before = [parameter.clone() for parameter in model.parameters()]
    for fragment, anchor in enumerate(anchors):
        mine.adopt_apart(PreparedAnchor(fragment, 2, anchor + 1, Fate()), 0, 0)
    assert all(map(torch.equal, before, model.parameters()))
    for fragment in (0, 1):
        np.testing.assert_allclose(work(mine, fragment, 0, 0), 0, atol=1e-6)


def test_an_adoption_that_was_interrupted_is_known(monkeypatch):
    _, mine, anchors = local(torch.float32)
    with mine.moving():
        mine.adopt(PreparedAnchor(0, 2, anchors[0], Fate()), 0, 0)
    assert not mine.torn

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(HostMemory, "write", fail)
    with pytest.raises(MemoryError), mine.moving():
        mine.adopt(PreparedAnchor(0, 3, anchors[0], Fate()), 0, 0)
    assert mine.torn
