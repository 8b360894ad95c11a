"""A learner's work on a busy GPU is bit-identical to the same work in host memory.

Slow kernels delay the training stream, so that work runs long after the training thread has queued it. Without a wait
between streams, the coder would read old or half-written values.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from atoll.boundary.local_parameters import LocalParameters
from atoll.device.device_coder import DeviceCoder
from atoll.fragments import segments
from atoll.fragments.adoption import Change, Fate, PreparedAnchor
from atoll.fragments.segments import Coder
from atoll.model.parameters import Parameters
from atoll.ranks.division import undivided
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import plan
from torch import nn

from tests.devices import CPU, GPU

pytestmark = pytest.mark.gpu

STEPS, FRAGMENTS, CHANGES, BUSY_CYCLES = 24, 3, 7, 100_000_000  # cycles, about 50 ms
SIZES = ((512, 1000), (1000,), (700, 512), (3, 3), (1024, 1024))


class Loop:
    """Trains a model on a device, takes work, and adopts updates. The CPU never waits for training."""

    def __init__(self, device: torch.device, dtype: torch.dtype, codec: Codec) -> None:
        self._device = device
        self._model = nn.ParameterList(torch.zeros(size, dtype=dtype, device=device) for size in SIZES)
        parameters = Parameters(self._model, torch.optim.SGD(self._model.parameters(), 0.1))
        self._layout = plan(parameters.tensors, FRAGMENTS)
        self._random = np.random.default_rng(0)
        self._changes = [
            [torch.from_numpy(self._noise(value.numel())).view(value.shape).to(value) for value in self._model]
            for _ in range(CHANGES)
        ]
        coder = DeviceCoder(device) if device == GPU else None
        self._coder: Coder = coder or segments
        first = [PreparedAnchor(f.index, 1, self._noise(f.length), Fate()) for f in self._layout.fragments]
        self._local = LocalParameters(parameters.values, undivided(self._layout), codec, first, keep=True, coder=coder)
        self._worker = ThreadPoolExecutor(1)  # codes during training, like the agent's threads

    def run(self) -> tuple[list[torch.Tensor], list[bytes]]:
        """Returns the parameters after each step, and the contents of all contributions."""
        held, sent = list[torch.Tensor](), list[bytes]()
        for number in range(STEPS):
            sent += self._step(number)
            held += [value.detach().clone() for value in self._model]
        return [value.cpu() for value in held], sent

    def _step(self, number: int) -> list[bytes]:
        local, fragment = self._local, number % FRAGMENTS
        track = local.tracks[fragment]
        if (work := self._coder.ahead(track.anchor, track.shape)) is not None:
            self._worker.submit(work).result()
        self._train(number)
        taken = local.take(fragment, 8 * number + 8, number + 1)
        self._still_busy()
        coding = self._worker.submit(lambda: taken.coded)
        self._train(number + STEPS)
        coded = coding.result()
        newer = self._worker.submit(self._newer, fragment, Fate(coded if number % 4 else None)).result()
        self._train(number + 2 * STEPS)
        if not number % 4:
            track.refused()
        local.adopt(newer, 8 * number + 8, number + 1)
        self._still_busy()
        return [content.tobytes() for content in coded.contents]

    def _newer(self, fragment: int, fate: Fate) -> PreparedAnchor:
        track = self._local.tracks[fragment]
        update = segments.code(track.anchor, track.anchor + self._noise(track.shape.length), track.shape)
        new = track.anchor + segments.change(track.anchor, track.anchor, update, None, track.shape)
        values = self._coder.change(track.anchor, new, update, fate.q, track.shape)
        return PreparedAnchor(fragment, track.version + 1, new, fate, Change(track.anchor, fate.q, values))

    def _train(self, seed: int) -> None:
        """Queues slow work, and then a change of all parameters, with one rounding per value."""
        if self._device == GPU:
            torch.cuda._sleep(BUSY_CYCLES)
        with torch.no_grad():
            torch._foreach_add_(list(self._model), self._changes[seed % CHANGES])

    def _still_busy(self) -> None:
        """Checks that the device has not finished the queued work."""
        if self._device == GPU:
            assert not torch.cuda.current_stream().query()

    def _noise(self, length: int) -> np.ndarray:
        return 0.1 * self._random.standard_normal(length, np.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", Codec)
def test_work_on_a_busy_gpu_has_the_bits_of_work_in_host_memory(codec, dtype):
    held, sent = Loop(CPU, dtype, codec).run()
    held_there, sent_there = Loop(GPU, dtype, codec).run()
    assert sent_there == sent
    for step, (mine, theirs) in enumerate(zip(held, held_there, strict=True)):
        assert torch.equal(mine, theirs), f"step {step // len(SIZES)} differs"
