"""The local parameters at a step boundary, in the model's own type and memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from atoll.boundary.host_memory import HostMemory
from atoll.boundary.local_parameters import LocalParameters
from atoll.device.device_coder import DeviceCoder
from atoll.fragments import segments
from atoll.fragments.adoption import Change, Fate, PreparedAnchor
from atoll.model.parameters import Parameters
from atoll.ranks.division import undivided
from atoll_wire.codec import frame_codec
from atoll_wire.codec.frame_codec import CodecError
from atoll_wire.layout.frame_spans import Codec, FrameSpan, Segment
from atoll_wire.layout.layout import plan
from torch import nn

ON_CPU_TENSORS = DeviceCoder(torch.device("cpu"))
PLACES = pytest.mark.parametrize("coder", [None, ON_CPU_TENSORS], ids=["host", "device"])


def local(dtype: torch.dtype, coder: DeviceCoder | None = None) -> tuple[nn.Module, LocalParameters, list[np.ndarray]]:
    """Returns a model with two fragments of different lengths, its local parameters and its anchors."""
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
            coder=coder,
        ),
        anchors,
    )


def work(mine: LocalParameters, number: int, tokens: int, steps: int) -> np.ndarray:
    """Takes a fragment's work, and returns its values."""
    contents, shape = mine.take(number, tokens, steps).coded.contents, mine.tracks[number].shape
    out, span = np.zeros(shape.length, np.float32), FrameSpan(0, 0, shape.length, (Segment(0, 0, shape.length),))
    frame_codec.content_add(contents[0], span, Codec.INT4, np.ones(1, np.float32), out)
    return out


@PLACES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adopted_values_are_not_work(dtype, coder):
    _, mine, anchors = local(dtype, coder)
    for version in (2, 3):
        for fragment, anchor in enumerate(anchors):
            assert mine.adopt(PreparedAnchor(fragment, version, anchor + version, Fate()), 0, 0) == 0
    for fragment in (0, 1):
        assert not work(mine, fragment, 0, 0).any()


@PLACES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_the_work_of_its_fragment_alone(dtype, coder):
    model, mine, anchors = local(dtype, coder)
    for fragment, anchor in enumerate(anchors):
        mine.adopt(PreparedAnchor(fragment, 2, anchor + 1, Fate()), 0, 0)
    with torch.no_grad():
        model[1].weight += 2
    taken = [work(mine, fragment, 8, 1) for fragment in (0, 1)]
    small = int(np.argmin([len(vector) for vector in taken]))
    np.testing.assert_allclose(taken[small], -2, atol=0.07)
    assert not taken[1 - small].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_process_encodes_at_once_instead_of_copying(dtype):
    model, mine, _ = local(dtype)
    with torch.no_grad():
        model[1].weight += 2
    small = int(np.argmin([track.shape.length for track in mine.tracks]))
    taken = mine.take(small, 8, 1)
    assert taken.is_coded
    with torch.no_grad():
        model[1].weight += 100  # training continues
    expected = np.zeros(mine.tracks[small].shape.length, np.float32)
    segments.add_coded(
        [taken.coded], mine.tracks[small].shape, expected.ctypes.data + 4 * mine.tracks[small].shape.rows[:, 0]
    )
    np.testing.assert_allclose(expected, -2, atol=0.07)


@PLACES
def test_values_that_are_not_finite_fail_at_the_agent_not_in_the_training_loop(coder):
    model, mine, _ = local(torch.float32, coder)
    with torch.no_grad():
        model[0].weight[3, 4] = torch.nan
    large = int(np.argmax([track.shape.length for track in mine.tracks]))
    taken = mine.take(large, 8, 1)
    for _ in range(2):
        with pytest.raises(CodecError, match="not finite"):
            _ = taken.coded


@PLACES
def test_an_adoption_in_a_copy_leaves_the_model_unchanged(coder):
    model, mine, anchors = local(torch.bfloat16, coder)
    before = [parameter.clone() for parameter in model.parameters()]
    for fragment, anchor in enumerate(anchors):
        mine.adopt_apart(PreparedAnchor(fragment, 2, anchor + 1, Fate()), 0, 0)
    assert all(map(torch.equal, before, model.parameters()))
    for fragment in (0, 1):
        np.testing.assert_allclose(work(mine, fragment, 0, 0), 0, atol=1e-6)


def test_an_interrupted_adoption_is_recorded(monkeypatch):
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


class Odd(nn.Module):
    """Tensors of any size and type, one of them non-contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(70, 50))
        self.narrow = nn.Parameter(torch.randn(33, 21, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(40, 60).t())
        self.small = nn.Parameter(torch.randn(3))


class Trained:
    """A model whose steps, contributions and adoptions depend only on seed and codec."""

    def __init__(self, codec: Codec, *, keep: bool, coder: DeviceCoder | None) -> None:
        torch.manual_seed(0)
        self.model, self.random, self.codec = Odd(), np.random.default_rng(0), codec
        parameters = Parameters(self.model, torch.optim.SGD(self.model.parameters(), 0.1))
        layout = plan(parameters.tensors, 2)
        first = [
            PreparedAnchor(each.index, 1, self.random.standard_normal(each.length).astype(np.float32), Fate())
            for each in layout.fragments
        ]
        self.local = LocalParameters(parameters.values, undivided(layout), codec, first, keep=keep, coder=coder)
        self.coder = coder or segments
        self.sent: list[bytes] = []

    def step(self, number: int) -> None:
        """Trains, takes a fragment's work, trains again, and adopts an update, whose kind depends on the number."""
        fragment = number % 2
        self._train()
        taken = self.local.take(fragment, 8 * number, number).coded
        self.sent.append(b"".join(content.tobytes() for content in taken.contents))
        self._train()
        fate = Fate(taken if number % 3 else None, drop=number % 7 == 0)
        newer = self._newer(fragment, fate, known=number % 5 != 0)
        if not number % 3:
            self.local.tracks[fragment].refused()
        adopt = self.local.adopt_apart if number > 20 else self.local.adopt  # as in a learner that leaves
        adopt(newer, 8 * number, number)

    def _train(self) -> None:
        random = torch.Generator().manual_seed(int(self.random.integers(1 << 30)))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=random).to(parameter.dtype))

    def _newer(self, fragment: int, fate: Fate, *, known: bool) -> PreparedAnchor:
        """Returns the next anchor. known: whether to compute the change from the update in advance."""
        track = self.local.tracks[fragment]
        old, random = track.anchor, self.random.standard_normal(track.shape.length).astype(np.float32)
        update = segments.code(old, old + random * np.float32(0.1), track.shape)
        new = old + segments.change(old, old, update, None, track.shape)
        values = self.coder.change(old, new, update, fate.q, track.shape)
        ahead = Change(old, fate.q, values) if known else None
        return PreparedAnchor(fragment, track.version + 1, new, fate, ahead)


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("keep", [True, False])
def test_contributions_and_parameters_are_bit_identical_on_a_device(codec, keep):
    host, device = Trained(codec, keep=keep, coder=None), Trained(codec, keep=keep, coder=ON_CPU_TENSORS)
    for number in range(1, 30):
        for each in (host, device):
            each.step(number)
        assert device.sent == host.sent
        for mine, theirs in zip(device.model.parameters(), host.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        for mine, theirs in zip(device.local.tracks, host.local.tracks, strict=True):
            assert np.array_equal(mine.anchor, theirs.anchor)
    assert len(set(host.sent)) > 20


def test_a_restore_on_a_device_sets_the_parameters_to_the_anchors():
    model, mine, anchors = local(torch.float32, ON_CPU_TENSORS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for fragment in (0, 1):
        mine.restore(fragment, 8, 1)
    found = sorted((parameter.detach().reshape(-1).tolist() for parameter in model.parameters()), key=len)
    assert found == sorted((anchor.tolist() for anchor in anchors), key=len)
