"""Coding with torch operations is bit-identical to the host's kernels, on CPU tensors and on any GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from atoll.agent.fetching import Fetcher
from atoll.boundary.local_parameters import LocalParameters
from atoll.device import block_kernels, device_coder
from atoll.device.device_coder import DeviceCoder, OnDevice, coding_device
from atoll.fragments import in_place, segments
from atoll.fragments.adoption import Change, Fate, PreparedAnchor
from atoll.fragments.exchange import ThreadExchange
from atoll.fragments.segments import Coded, FragmentShape
from atoll.model.parameters import Parameters
from atoll.ranks.division import divide, undivided
from atoll.ranks.rank_group import SingleRank
from atoll.ranks.tensor_part import TensorPart, chunk
from atoll.stats import Counters
from atoll.transfers.partial_fetch import Decoded
from atoll_wire.codec.frame_codec import LEVELS, CodecError
from atoll_wire.codec.quantising import SMALLEST
from atoll_wire.layout.frame_spans import BLOCK, Codec
from atoll_wire.layout.layout import FRAME_PARAMETERS, FragmentLayout, MergeKind, TensorSpec, plan
from atoll_wire.process.clock import SYSTEM
from torch import nn

from tests.devices import CPU, DEVICES, GPU

LARGEST = float(np.finfo(np.float32).max)


def fragment(*sizes: int) -> FragmentLayout:
    tensors = [TensorSpec(f"t{n}", (size,), "float32", MergeKind.DIRECTION) for n, size in enumerate(sizes)]
    return plan(tensors, 1).fragments[0]


LENGTHS = fragment(*range(1, 18), *range(BLOCK - 3, BLOCK + 4), 2 * BLOCK, 5 * BLOCK + 77)
WHOLE = fragment(BLOCK, 4 * BLOCK)  # no block is short
FRAMES = fragment(FRAME_PARAMETERS + 3 * BLOCK + 5, 1, BLOCK, 300)


def same(one: Coded, other: Coded) -> None:
    for mine, theirs in zip(one.contents, other.contents, strict=True):
        assert np.array_equal(mine, theirs)


def same_bits(coder: DeviceCoder, one: OnDevice, other: np.ndarray) -> None:
    assert np.array_equal(coder.await_on_stream(one).cpu().numpy().view(np.uint32), other.view(np.uint32))


@pytest.fixture(params=DEVICES, ids=str)
def coder(request):
    return DeviceCoder(request.param)


def difficult(random: np.random.Generator, length: int) -> np.ndarray:
    """Returns finite values in runs of one kind: normal at any scale, heavy-tailed, ties, extreme, subnormal, zero."""
    out, at = np.empty(length, np.float32), 0
    while at < length:
        some = out[at : at + int(random.integers(1, 2 * BLOCK))]
        exponent = float(random.uniform(-45, 38))
        match int(random.integers(10)):
            case 0:
                found = random.standard_normal(len(some)) * 10.0**exponent
            case 1:
                found = random.standard_normal(len(some)) * 10.0 ** random.uniform(-45, 38, len(some))
            case 2:  # halfway between two codes
                found = random.integers(-255, 256, len(some)) * 2.0 ** int(random.integers(-149, 118)) / 2
            case 3:
                found = random.choice([-LARGEST, LARGEST, LARGEST / 7, LARGEST / 127, 1.0], len(some))
            case 4:
                found = random.choice([float(SMALLEST), 2.0**-126, 2.0**-149, -(2.0**-130), 0.0], len(some))
            case 5:
                found = random.choice([0.0, -0.0], len(some))
            case 6:  # one large value per run
                found = random.standard_normal(len(some)) * 1e-3
                found[0] = 2.0 ** float(random.uniform(-8, 8))
            case 7:  # the largest value / 127 is a bfloat16, so that a rounding error rounds it up
                found = (
                    random.choice([-127.0, 127.0], len(some)) * int(random.integers(128, 256)) * 2.0 ** int(exponent)
                )
            case 8:  # times 1 / 127 instead, they would be bfloat16
                found = np.nextafter(np.float32(127 * random.choice([128, 129], len(some))), np.float32(LARGEST))
            case _:  # equal magnitudes, whose scale is near a rounding boundary
                found = random.choice([-1.0, 1.0], len(some)) * random.uniform(1, 2) * 2.0 ** int(exponent)
        some[:] = np.clip(found, -LARGEST, LARGEST)
        at += len(some)
    return out


@pytest.mark.parametrize("kind", Codec)
@pytest.mark.parametrize("seed", range(40))
def test_any_finite_values_are_coded_bit_for_bit_as_on_the_host(kind, seed, coder):
    random = np.random.default_rng(seed)
    sizes = [int(size) for size in random.integers(1, 6 * BLOCK, 20)]
    layout = fragment(*sizes) if seed else LENGTHS
    shape, values = FragmentShape.of(layout.whole, kind), difficult(random, layout.length)
    nothing = np.zeros_like(values)
    host, device = segments.code(values, nothing, shape), coder.code(values, coder.whole(nothing), shape)
    same(device, host)
    added = segments.change(nothing, nothing, host, host, shape)
    same_bits(coder, coder.change(nothing, nothing, device, device, shape), added)


@pytest.mark.parametrize("layout", [FRAMES, WHOLE, LENGTHS])
@pytest.mark.parametrize("kind", Codec)
def test_work_and_changes_equal_those_on_the_host(kind, layout, monkeypatch, coder):
    monkeypatch.setattr(device_coder, "BLOCKS_PER_CALL", 100)
    random, shape = np.random.default_rng(1), FragmentShape.of(layout.whole, kind)
    anchor, values, newer = (random.standard_normal(layout.length).astype(np.float32) for _ in range(3))
    host, device = segments.code(anchor, values, shape), coder.code(anchor, coder.whole(values), shape)
    same(device, host)
    for update in (None, segments.code(newer, anchor, shape)):
        for q in (None, host):
            found = coder.change(anchor, newer, update, q, shape)
            same_bits(coder, found, segments.change(anchor, newer, update, q, shape))


@pytest.mark.parametrize("kind", Codec)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 20, -1])
def test_work_that_is_not_finite_is_not_coded(kind, value, place, coder):
    shape, values = FragmentShape.of(LENGTHS.whole, kind), np.ones(LENGTHS.length, np.float32)
    values[place] = value
    with pytest.raises(CodecError, match="not finite"):
        coder.code(np.zeros_like(values), coder.whole(values), shape)


@pytest.mark.parametrize("kind", [Codec.INT4, Codec.INT8])
def test_a_block_on_the_device_does_not_depend_on_the_blocks_beside_it(kind, coder):
    random, lengths = np.random.default_rng(2), torch.full((50,), BLOCK, device=coder.device)
    blocks = torch.from_numpy(difficult(random, 50 * BLOCK)).view(50, BLOCK).to(coder.device)
    codes, scales, finite = block_kernels.quantise(blocks, lengths, LEVELS[kind])
    assert finite
    for row in (0, 7, 49):
        one = slice(row, row + 1)
        alone = block_kernels.quantise(blocks[one], lengths[one] if row else None, LEVELS[kind])
        assert torch.equal(alone[0], codes[one])
        assert torch.equal(alone[1], scales[one])


def test_torch_defaults_of_a_training_script_have_no_effect(coder):
    shape, values = FragmentShape.of(LENGTHS.whole, Codec.INT4), difficult(np.random.default_rng(3), LENGTHS.length)
    nothing = np.zeros_like(values)
    host = segments.code(values, nothing, shape)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            same(coder.code(values, coder.whole(nothing), shape), host)
            for update in (None, host):
                found = coder.change(nothing, values, update, host, shape)
                same_bits(coder, found, segments.change(nothing, values, update, host, shape))
    finally:
        torch.set_default_dtype(torch.float32)


def test_parameters_on_one_gpu_are_coded_there():
    class Placed(torch.Tensor):
        device = GPU

    class Elsewhere(Placed):
        device = torch.device("cuda", 1)

    host, without_streams = torch.zeros(2), torch.zeros(2, device="meta")
    one, other = torch.zeros(2).as_subclass(Placed), torch.zeros(2).as_subclass(Elsewhere)
    assert coding_device([one, one]) == GPU
    for values in ([host], [without_streams], [one, other], [one, host], []):
        assert coding_device(values) is None


class Moving(DeviceCoder):
    """A coder that counts the vectors that it copies to the device."""

    moved = 0

    def _moved(self, values):
        self.moved += 1
        return super()._moved(values)


def test_an_anchor_is_copied_once_if_it_was_copied_ahead():
    shape, coder = FragmentShape.of(LENGTHS.whole, Codec.INT4), Moving(CPU)
    anchors = [difficult(np.random.default_rng(seed), LENGTHS.length) for seed in range(3)]
    nothing = np.zeros(LENGTHS.length, np.float32)
    values = coder.whole(nothing)
    for anchor in anchors:
        coder.ahead(anchor, shape)()
    for anchor, copies in zip(anchors, (1, 0, 0), strict=True):  # only two copies are kept
        coder.moved = 0
        same(coder.code(anchor, values, shape), segments.code(anchor, nothing, shape))
        assert coder.moved == copies
    coder.ahead(anchors[0], shape)()
    same(coder.code(anchors[1], values, shape), segments.code(anchors[1], nothing, shape))
    assert segments.ahead(anchors[0], shape) is None


@pytest.mark.parametrize(("coder", "ahead"), [(DeviceCoder(CPU), 4), (segments, 8), (in_place, 24)])
def test_during_a_long_evaluation_changes_for_a_few_fragments_wait_on_the_device(coder, ahead):
    exchange, shape = ThreadExchange(SYSTEM), FragmentShape.of(LENGTHS.whole, Codec.INT4)
    nothing, changes = np.zeros(LENGTHS.length, np.float32), []
    update = segments.code(nothing, nothing, shape)
    fetcher = Fetcher(SimpleNamespace(), exchange, Counters(), print, SimpleNamespace(), SimpleNamespace(), coder)
    incoming = SimpleNamespace(version=1, decoded=lambda old: Decoded(old.copy(), 0, update))
    for fragment in range(24):
        fetcher._shapes[fragment] = shape
        decoded, change = fetcher._decoded(SimpleNamespace(fragment=fragment, anchor=nothing), incoming, None)
        exchange.offer(PreparedAnchor(fragment, 2, decoded.values, Fate(), change))
        changes.append(change is not None)
    assert changes == [True] * ahead + [False] * (24 - ahead)


class Module:
    """Replaces `torch.cuda`. Records the operations queued on streams, and a watched value at that time."""

    def __init__(self) -> None:
        self.said: list[tuple[object, ...]] = []
        self.watched = torch.zeros(1)
        module = self

        class Stream:
            def __init__(self, *_: object) -> None:
                self.name = "coder" if _ else "training"

            def wait_stream(self, other: Stream) -> None:
                module.say(self.name, "waits for", other.name)

        class Event:
            of = ""

            def record(self, stream: Stream) -> None:
                self.of = stream.name
                module.say(stream.name, "records")

            def wait(self, stream: Stream) -> None:
                if stream.name != self.of:
                    module.say(stream.name, "waits for", self.of)

            def synchronize(self) -> None:
                if self.of:
                    module.said.append(("this thread", "waits for", self.of))

        self.Stream, self.Event, self.current = Stream, Event, Stream()

    def say(self, *words: str) -> None:
        self.said.append((*words, self.watched.item()))

    def current_stream(self, _: torch.device) -> object:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Recorded(SingleRank):
    """The first of two ranks, which records the streams of exchanges, and receives ones."""

    size = 2

    def __init__(self, module: Module) -> None:
        self._module = module

    def exchange(self, given: Any, sent: Sequence[int], received: Sequence[int]) -> Any:
        self._module.say(self._module.current.name, "begins an exchange")

        def wait() -> torch.Tensor:
            self._module.say(self._module.current.name, "waits for an exchange")
            return torch.ones(sum(received))

        return wait


@pytest.fixture
def module(monkeypatch):
    found = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda _: found)
    return found


def test_streams_wait_for_each_other_and_the_training_thread_for_no_stream(module):
    coder, model = DeviceCoder(CPU), nn.Linear(1, 1, bias=False)
    parameters = Parameters(model, torch.optim.SGD(model.parameters(), 0.1))
    layout = plan(parameters.tensors, 1)
    anchor, module.watched = np.ones(1, np.float32), model.weight
    first = PreparedAnchor(0, 1, anchor, Fate())
    local = LocalParameters(parameters.values, undivided(layout), Codec.FLOAT32, [first], keep=True, coder=coder)
    with torch.no_grad():
        model.weight.fill_(3)
    module.said.clear()
    taken = local.take(0, 1, 1)
    assert module.said == [("training", "records", 3.0)]
    with torch.no_grad():
        model.weight.fill_(4)
    q, shape = taken.coded, local.tracks[0].shape
    assert module.said[1:] == [
        ("coder", "waits for", "training", 4.0),
        ("coder", "records", 4.0),
        ("coder", "records", 4.0),
        ("this thread", "waits for", "coder"),
    ]
    change = Change(anchor, q, coder.change(anchor, anchor - 2, q, q, shape))
    module.said.clear()
    local.adopt(PreparedAnchor(0, 2, anchor - 2, Fate(q), change), 1, 1)
    assert module.said == [
        ("coder", "records", 4.0),
        ("training", "waits for", "coder", 4.0),
        ("coder", "waits for", "training", 0.0),
    ]


def test_ranks_exchange_values_once_per_take_and_once_per_adoption_beside_training(module):
    coder, weight = DeviceCoder(CPU), nn.Parameter(torch.ones(1))
    layout = plan([TensorSpec("weight", (2,), "float32", MergeKind.DIRECTION)], 1)
    division = divide(layout.fragments[0], [[TensorPart((2,), (chunk([(0, 2)], rank, 2),))] for rank in (0, 1)], 0)
    owned = np.ones(division.run.length, np.float32)
    first, module.watched = PreparedAnchor(0, 1, owned, Fate()), weight
    local = LocalParameters([weight], [division], Codec.INT4, [first], keep=True, coder=coder, ranks=Recorded(module))
    module.said.clear()
    taken = local.take(0, 1, 1)
    assert module.said == [("training", "records", 1.0), ("training", "begins an exchange", 1.0)]
    with torch.no_grad():
        weight.fill_(4)
    q, shape = taken.coded, local.tracks[0].shape
    assert module.said[2:5] == [
        ("coder", "waits for", "training", 4.0),
        ("coder", "waits for an exchange", 4.0),
        ("coder", "records", 4.0),
    ]
    change = Change(owned, q, coder.change(owned, owned + 1, q, q, shape))
    module.said.clear()
    local.begin(PreparedAnchor(0, 2, owned + 1, Fate(q), change))
    assert module.said == [("coder", "records", 4.0), ("coder", "begins an exchange", 4.0)]
    module.said.clear()
    local.finish(0, 1, 1)
    assert module.said == [
        ("training", "waits for", "coder", 4.0),
        ("training", "waits for an exchange", 4.0),
        ("coder", "waits for", "training", 5.0),
    ]


def test_an_overwrite_waits_only_for_an_earlier_copy(module):
    coder = DeviceCoder(CPU)
    coder.whole(np.ones(3, np.float32))
    assert module.said == [("coder", "records", 0.0)]
    coder.whole(np.ones(3, np.float32))
    assert module.said[1:] == [("this thread", "waits for", "coder"), ("coder", "records", 0.0)]
