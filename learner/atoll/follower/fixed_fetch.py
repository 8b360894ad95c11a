"""Fetches the fixed values of a run: everything in the model's file that training does not change."""

from __future__ import annotations

import numpy as np
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.frame_transfer import download
from atoll_wire.connections.link import Link
from atoll_wire.messages.frame_messages import WireFrame
from atoll_wire.model_file.fixed_values import FRAME_BYTES, FixedValues, frame_count
from atoll_wire.model_file.model_file import RunId

from atoll.errors import NONSENSE, FollowerError
from atoll.transfers.partial_fetch import UnsoundError


class FixedFetch:
    """A fetch of the fixed values, which keeps the frames that have arrived. size_bytes: the size of all values."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._content = np.empty(size_bytes, np.uint8)
        self._missing = set(range(frame_count(size_bytes)))

    async def fetch(self, link: Link, run: RunId) -> FixedValues:
        """Fetches the missing frames and returns all values. Raises AioRpcError and LinkLost if the link fails, and
        FollowerError if the values are invalid."""
        request = pb.ReadRequest(run=run.run, generation=run.generation, fixed=True)
        try:
            sound = await download(link, request, sorted(self._missing), self._took)
        except UnsoundError:
            sound = False
        if not sound or self._missing:
            raise FollowerError(f"the server sent fixed values that differ from its declaration: {NONSENSE}")
        return FixedValues.read(self._content)

    def _took(self, header: pb.FetchHeader, frame: WireFrame | pb.Frame) -> None:
        start = frame.index * FRAME_BYTES
        stop = min(start + FRAME_BYTES, self.size_bytes)
        if header.size_bytes != self.size_bytes or len(frame.payload) != stop - start:
            raise UnsoundError
        self._content[start:stop] = np.frombuffer(frame.payload, np.uint8)
        self._missing.discard(frame.index)
