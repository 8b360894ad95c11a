"""Encodes and decodes on the device that holds the parameters, on a stream that runs in parallel with training.

The training thread only queues a copy of the local parameters on the device. Worker threads do the rest while the
model trains. When a round opens, they copy the anchor to the device. Later, they compute and quantise D = A - L there
and copy the coded bytes to the host. To adopt an update, they copy coded bytes to the device and decode them there.

The parameters are copied on the training stream. The next optimizer step may then change them immediately. If this
module's stream read the parameters itself, training would have to wait for it, and therefore for the copy of the
anchor.

Several ranks exchange values on the device. Each rank encodes its own frames, as a single-process learner does.

torch provides streams and events for each kind of device. On the CPU, they do nothing. The same code therefore runs on
CPU tensors.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
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

AHEAD = 2  # limit on anchors that are copied ahead; a learner that declines a round does not need the copy
BLOCKS_PER_CALL = 1 << 15  # blocks per call of a kernel, which limits temporary memory on the device to about 200 MB


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A run's values on the device, which a stream may still have to compute.

    vector: float32 (run.length,). ready: event after which other streams may read the values.
    sources: memory that other streams may read until then, so it must not be freed earlier.
    """

    vector: torch.Tensor
    ready: Any
    sources: tuple[torch.Tensor, ...] = ()


class DeviceCoder:
    """The coder for parameters on a device. Its results are bit-identical to those of `segments`.

    Worker threads call `code` and `change`, which copy to and from host memory.
    """

    max_changes_ahead = 4  # each takes four bytes per value on the device

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._torch: Any = torch.get_device_module(device)
        self._stream = self._torch.Stream(device)
        self._lock = threading.Lock()
        self._ahead: deque[tuple[F32, torch.Tensor]] = deque(maxlen=AHEAD)  # anchors and their copies on the device
        self._last = self._torch.Event()  # after the last copy of `whole`

    def ahead(self, anchor: F32, shape: FragmentShape) -> Callable[[], None]:  # noqa: ARG002 - see Coder
        """Returns work that copies an anchor to the device before its pseudo-gradient is taken."""
        return partial(self._copy_ahead, anchor)

    def code(self, anchor: F32, values: OnDevice, shape: FragmentShape) -> Coded:
        """Encodes `anchor - values` and waits for the contents. Raises CodecError if a value is not finite."""
        layout = BlockLayout.of(shape)
        with self.beside():
            vector, copy = self.await_on_stream(values), self._copied_ahead(anchor)
            copy = self._moved(anchor) if copy is None else copy
            difference = _as_blocks(copy.sub_(vector), layout)
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
        with self.beside():
            if update is None:
                total = _as_blocks(self._moved(segments.change(old, new, None, None, shape)), layout)
            else:
                total = torch.zeros(layout.blocks, BLOCK, dtype=torch.float32, device=self.device)
                self._add(update, shape, layout, total)
            if q is not None:
                self._add(q, shape, layout, total)
            return self.queued(_as_vector(total, layout))

    def whole(self, values: F32) -> OnDevice:
        """Begins to copy a run's values to the device."""
        with self.beside():
            self._last.synchronize()  # so that successive fragments use the same pinned memory
            found = self.queued(self._moved(values))
            self._last = found.ready
            return found

    # ------------------------------------------------------------------------------ on the current stream

    def queued(self, vector: torch.Tensor, *sources: torch.Tensor) -> OnDevice:
        """Returns values whose computation is queued on the current stream. sources: see OnDevice."""
        return OnDevice(vector, self._event(), sources)

    def await_on_stream(self, values: OnDevice) -> torch.Tensor:
        """Returns the values. The current stream waits for them; this thread does not."""
        values.ready.wait(self._torch.current_stream(self.device))
        return values.vector

    def used(self) -> None:
        """Makes this class's stream wait for the current stream, which still uses memory of this class's stream."""
        self._stream.wait_stream(self._torch.current_stream(self.device))

    def beside(self) -> AbstractContextManager[object]:
        """Context manager that queues work on this class's stream, in parallel with training."""
        stream: AbstractContextManager[object] = self._torch.stream(self._stream)
        return stream

    def _event(self) -> Any:  # noqa: ANN401 - the class depends on the kind of device
        event = self._torch.Event()
        event.record(self._torch.current_stream(self.device))
        return event

    # ------------------------------------------------------------------------------ on this class's stream

    def _copy_ahead(self, anchor: F32) -> None:
        with self.beside():
            copy = self._moved(anchor)
        with self._lock:
            self._ahead.append((anchor, copy))

    def _copied_ahead(self, anchor: F32) -> torch.Tensor | None:
        """Removes and returns an anchor's copy on the device, or returns None if there is none."""
        with self._lock:
            for place, (known, copy) in enumerate(self._ahead):
                if known is anchor:
                    del self._ahead[place]
                    return copy
        return None

    def _moved(self, values: F32) -> torch.Tensor:
        """Returns a copy of values on the device."""
        host = self._host(len(values), torch.float32)
        np.copyto(host.numpy(), values)
        return host.to(self.device, non_blocking=True)

    def _host(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised vector in host memory. Copies from and to it do not block other streams."""
        # All types and devices are explicit, because a training script may change torch's defaults.
        return torch.empty(length, dtype=dtype, device="cpu", pin_memory=self.device.type != "cpu")

    def _coded(self, blocks: torch.Tensor, levels: int, layout: BlockLayout) -> torch.Tensor:
        """Returns the contents of all frames in one piece, followed by a byte that says whether all values are
        finite."""
        codes = torch.empty(layout.blocks, coded_bytes(BLOCK, levels), dtype=torch.uint8, device=self.device)
        scales = torch.empty(layout.blocks, dtype=torch.int16, device=self.device)
        finite = torch.ones((), dtype=torch.bool, device=self.device)
        for some, lengths in self._chunks(layout):
            codes[some], scales[some], sound = block_kernels.quantise(blocks[some], lengths, levels)
            finite &= sound
        out = torch.empty(layout.content_bytes + 1, dtype=torch.uint8, device=self.device)
        copy_all(_content_parts(out[:-1], levels, layout), _matrix_parts(codes, scales, levels, layout))
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
        copy_all(_matrix_parts(codes, scales, levels, layout), _content_parts(contents, levels, layout))
        for some, lengths in self._chunks(layout):
            out[some] += block_kernels.decode(codes[some], scales[some], lengths, levels)

    def _chunks(self, layout: BlockLayout) -> Iterator[tuple[slice, torch.Tensor | None]]:
        """Yields slices of up to BLOCKS_PER_CALL blocks, and their lengths on the device, or None if all are whole."""
        for start in range(0, layout.blocks, BLOCKS_PER_CALL):
            some = slice(start, start + BLOCKS_PER_CALL)
            lengths = layout.lengths[some]
            yield some, None if (lengths == BLOCK).all() else torch.from_numpy(lengths).to(self.device)


def coding_device(values: Sequence[nn.Parameter]) -> torch.device | None:
    """Returns the device on which a learner can encode these trainable parameters, or None for host memory.

    Parameters on several devices, and devices without streams, such as "mps", need host memory.
    """
    devices = {value.device for value in values}
    if len(devices) != 1:
        return None
    [device] = devices
    has_streams = device.type != "cpu" and hasattr(getattr(torch, device.type, None), "Stream")
    return device if has_streams else None


def copy_all(to: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copies tensors to others of the same shapes, with few calls of the device. Both lists may be empty."""
    if to:
        torch._foreach_copy_(list(to), list(values))


def _as_blocks(vector: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Returns a run's values as blocks, with zeros after each segment."""
    if layout.is_vector:
        return vector.view(layout.blocks, BLOCK)
    blocks = torch.zeros(layout.blocks, BLOCK, dtype=torch.float32, device=vector.device)
    copy_all(_segment_values(blocks, layout), vector.split(layout.segments))
    return blocks


def _as_vector(blocks: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Returns the values of blocks as a run's vector."""
    if layout.is_vector:
        return blocks.view(-1)
    vector = torch.empty(sum(layout.segments), dtype=torch.float32, device=blocks.device)
    copy_all(vector.split(layout.segments), _segment_values(blocks, layout))
    return vector


def _segment_values(blocks: torch.Tensor, layout: BlockLayout) -> list[torch.Tensor]:
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
