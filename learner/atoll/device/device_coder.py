"""Encodes and decodes on the device that holds the parameters, on a stream that runs in parallel with training.

The training thread only queues a copy of the local parameters within the device. Worker threads do the rest, while the
model trains. When a round opens, they copy the anchor to the device. Later, they compute and quantise D = A - L there,
and copy the coded bytes to the host. To adopt an update, they copy coded bytes to the device and decode them there.

The parameters are copied on training's own stream. The next optimizer step may then change them immediately. If this
module's stream read the parameters itself, training would have to wait for it, and so for the copy of the anchor.

torch has streams and events for each kind of device, and stand-ins for the CPU that do nothing. The same code therefore
runs on CPU tensors.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from atoll_wire.codec.block_kernels import F32, coded_bytes
from atoll_wire.codec.frame_codec import CodecError
from atoll_wire.layout.frame_spans import BLOCK
from torch import nn

from atoll.device import block_kernels
from atoll.device.block_layout import BlockLayout
from atoll.fragments import segments
from atoll.fragments.segments import Coded, FragmentShape

AHEAD = 2  # limit on anchors that are copied ahead; a learner may decline a round, and then does not need the copy
AT_ONCE = 1 << 13  # blocks per call of a kernel, which limits temporary memory on the device to about 100 MB


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A run's values on the device, which a stream may still have to compute.

    blocks: float32 (blocks, 512): see BlockLayout. The space after each segment has undefined values.
    ready: event after which other streams may read the values.
    """

    blocks: torch.Tensor
    ready: Any


class DeviceCoder:
    """The coder for parameters on a device. Its results are bit-identical to those of `segments`.

    Worker threads call `code` and `change`, which copy memory of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._torch: Any = torch.get_device_module(device)
        self._stream = self._torch.Stream(device)
        self._lock = threading.Lock()
        self._ahead: deque[tuple[F32, torch.Tensor]] = deque(maxlen=AHEAD)  # anchors, and their copies on the device

    def ahead(self, anchor: F32, shape: FragmentShape) -> Callable[[], None]:
        """Returns work that copies an anchor to the device before its pseudo-gradient is taken."""
        return partial(self._copy_ahead, anchor, shape)

    def code(self, anchor: F32, values: OnDevice, shape: FragmentShape) -> Coded:
        """Encodes anchor - values, and waits for the contents. Raises CodecError if a value is not finite."""
        layout = BlockLayout.of(shape)
        with self._torch.stream(self._stream):
            values.ready.wait(self._stream)
            difference = self._copied_ahead(anchor)
            if difference is None:
                difference = self._moved(anchor, shape, layout)
            torch.sub(difference, values.blocks, out=difference)
            if spaces := [space for space in difference.view(-1).split(layout.values)[1::2] if len(space)]:
                torch._foreach_zero_(spaces)
            contents = self._coded(difference, shape.levels, layout)
            there = self._host(len(contents), torch.uint8)
            there.copy_(contents, non_blocking=True)
            self._event().synchronize()
        found = there.numpy()
        if not found[-1]:
            raise CodecError("a value is not finite")
        return Coded.of(_frames(found, shape))

    def change(self, old: F32, new: F32, update: Coded | None, q: Coded | None, shape: FragmentShape) -> OnDevice:
        """Begins to compute what an adoption adds to the parameters. The arguments are those of `segments.change`."""
        layout = BlockLayout.of(shape)
        with self._torch.stream(self._stream):
            if update is None:
                total = self._moved(segments.change(old, new, None, None, shape), shape, layout)
            else:
                total = torch.zeros(layout.blocks, BLOCK, dtype=torch.float32, device=self.device)
                self._add(update, shape, layout, total)
            if q is not None:
                self._add(q, shape, layout, total)
            return OnDevice(total, self._event())

    def whole(self, values: F32, shape: FragmentShape) -> OnDevice:
        """Copies a run's values to the device, and waits for the copy. values: float32 (shape.length,)."""
        with self._torch.stream(self._stream):
            blocks, ready = self._moved(values, shape, BlockLayout.of(shape)), self._event()
            ready.synchronize()  # so that successive fragments use the same pinned memory
            return OnDevice(blocks, ready)

    # ------------------------------------------------------------------------------ on the stream of training

    def queued(self, blocks: torch.Tensor) -> OnDevice:
        """Returns values whose computation is queued on the current stream."""
        ready = self._torch.Event()
        ready.record(self._torch.current_stream(self.device))
        return OnDevice(blocks, ready)

    def await_on_stream(self, values: OnDevice) -> torch.Tensor:
        """Returns the values' blocks. The current stream waits for them; this thread does not."""
        values.ready.wait(self._torch.current_stream(self.device))
        return values.blocks

    def used(self) -> None:
        """Records that the current stream uses values of this class. Their memory is reused only after that."""
        self._stream.wait_stream(self._torch.current_stream(self.device))

    # ------------------------------------------------------------------------------ on this class's stream

    def _event(self) -> Any:  # noqa: ANN401 - the class depends on the kind of device
        event = self._torch.Event()
        event.record(self._stream)
        return event

    def _copy_ahead(self, anchor: F32, shape: FragmentShape) -> None:
        with self._torch.stream(self._stream):
            blocks = self._moved(anchor, shape, BlockLayout.of(shape))
        with self._lock:
            self._ahead.append((anchor, blocks))

    def _copied_ahead(self, anchor: F32) -> torch.Tensor | None:
        """Removes and returns an anchor's copy on the device, or returns None if there is none."""
        with self._lock:
            for place, (known, blocks) in enumerate(self._ahead):
                if known is anchor:
                    del self._ahead[place]
                    return blocks
        return None

    def _moved(self, values: F32, shape: FragmentShape, layout: BlockLayout) -> torch.Tensor:
        """Returns a run's values as blocks on the device."""
        host = self._host(layout.blocks * BLOCK, torch.float32)
        segments.gather(values.ctypes.data + 4 * shape.rows[:, 0], layout.rows, host.numpy())
        return host.to(self.device, non_blocking=True).view(-1, BLOCK)

    def _host(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised vector in host memory, from which or to which copies do not block other streams."""
        # All types and devices are explicit, because a training script may change torch's defaults.
        return torch.empty(length, dtype=dtype, device="cpu", pin_memory=self.device.type != "cpu")

    def _coded(self, blocks: torch.Tensor, levels: int, layout: BlockLayout) -> torch.Tensor:
        """Returns the contents of all frames in one piece, and a last byte: whether all values are finite."""
        codes = torch.empty(layout.blocks, coded_bytes(BLOCK, levels), dtype=torch.uint8, device=self.device)
        scales = torch.empty(layout.blocks, dtype=torch.int16, device=self.device)
        finite = torch.ones((), dtype=torch.bool, device=self.device)
        for some, lengths in self._chunks(layout):
            codes[some], scales[some], sound = block_kernels.quantise(blocks[some], lengths, levels)
            finite &= sound
        out = torch.empty(layout.content_bytes + 1, dtype=torch.uint8, device=self.device)
        torch._foreach_copy_(_content_parts(out[:-1], levels, layout), _matrix_parts(codes, scales, levels, layout))
        out[-1] = finite
        return out

    def _add(self, coded: Coded, shape: FragmentShape, layout: BlockLayout, out: torch.Tensor) -> None:
        """Adds coded values to blocks, each with a single rounding."""
        levels = shape.levels
        host = self._host(layout.content_bytes, torch.uint8)
        for place, content in zip(_frames(host.numpy(), shape), coded.contents, strict=True):
            np.copyto(place, content)
        contents = host.to(self.device, non_blocking=True)
        codes = torch.empty(layout.blocks, coded_bytes(BLOCK, levels), dtype=torch.uint8, device=self.device)
        scales = torch.empty(layout.blocks, dtype=torch.int16, device=self.device)
        torch._foreach_copy_(_matrix_parts(codes, scales, levels, layout), _content_parts(contents, levels, layout))
        for some, lengths in self._chunks(layout):
            out[some] += block_kernels.decode(codes[some], scales[some], lengths, levels)

    def _chunks(self, layout: BlockLayout) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields slices of at most AT_ONCE blocks, and the blocks' lengths on the device."""
        lengths = torch.from_numpy(layout.lengths).to(self.device)
        for start in range(0, layout.blocks, AT_ONCE):
            some = slice(start, start + AT_ONCE)
            yield some, lengths[some]


def coder_for(values: Sequence[nn.Parameter], ranks: int) -> DeviceCoder | None:
    """Returns the coder of a learner, or None if its values are encoded in host memory.

    values: the trainable parameters. ranks: number of ranks of the learner. Several ranks exchange values in host
    memory, so they also encode there. Devices without streams, such as "mps", have no coder either.
    """
    devices = {value.device for value in values}
    if ranks > 1 or len(devices) != 1:
        return None
    [device] = devices
    has_streams = device.type != "cpu" and hasattr(getattr(torch, device.type, None), "Stream")
    return DeviceCoder(device) if has_streams else None


def segment_values(blocks: torch.Tensor, layout: BlockLayout) -> list[torch.Tensor]:
    """Returns flat views of each segment's values in blocks."""
    return list(blocks.view(-1).split(layout.values)[::2])


def _matrix_parts(codes: torch.Tensor, scales: torch.Tensor, levels: int, layout: BlockLayout) -> list[torch.Tensor]:
    """Returns views of each segment's codes and each frame's scales, in bytes."""
    parts = list(codes.view(-1).split(layout.codes)[::2])
    if levels:
        parts += scales.view(torch.uint8).split([2 * blocks for blocks in layout.scales])
    return parts


def _content_parts(contents: torch.Tensor, levels: int, layout: BlockLayout) -> list[torch.Tensor]:
    """Returns views of the same parts in the contents of the frames."""
    parts = contents.split(layout.contents)
    return [parts[number] for number in layout.code_parts + (layout.scale_parts if levels else [])]


def _frames(block: np.ndarray[Any, Any], shape: FragmentShape) -> list[np.ndarray[Any, Any]]:
    """Returns views of the contents of each frame in one block of memory: see `Coded.empty`."""
    return [block[start:end] for start, end in shape.places]
