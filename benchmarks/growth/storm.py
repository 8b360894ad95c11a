"""Learners that join at the same time: python -m benchmarks.growth.storm COUNT PARAMETERS FOLDER ADDRESS.

Each learner fetches the whole of every fragment and checks its frames, as a new learner does. The process creates
`storm.ready`, waits for the file `storm.go`, and writes the learners' seconds to `storm.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
import time
from pathlib import Path

from atoll_wire import outer_pb2 as pb
from atoll_wire.codec.checksums import crc32c
from atoll_wire.connections.calls import open_stream
from atoll_wire.messages import frame_messages
from atoll_wire.messages.frame_messages import FrameStub
from atoll_wire.process.logs import configure

from benchmarks.shards.large_model import tensors_of
from benchmarks.shards.synthetic_learner import SyntheticLearner, dialled

STEP_S = 1.0


class Newcomer(SyntheticLearner):
    """A learner that joins, fetches everything, and leaves."""

    async def fetch_all(self) -> float:
        """Returns the seconds until the learner has the run's parameters."""
        began = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            stub = FrameStub(await stack.enter_async_context(dialled(self._address)))
            reply = await self._join(stub)
            for fragment in range(len(reply.versions)):
                request = pb.FetchRequest(session=self._session, fragment=fragment, whole=True)
                expected, seen = -1, 0
                with open_stream("Fetch", stub.Fetch(request, wait_for_ready=True)) as call:
                    async for told in call:
                        if isinstance(told, pb.FetchReply) and told.HasField("header"):
                            expected = told.header.frames
                            continue
                        for frame in frame_messages.frames_in(told):
                            assert crc32c(frame.payload) == frame.crc32c
                            self.checked_bytes += len(frame.payload)
                            seen += 1
                assert seen == expected, f"{seen} of {expected} frames of fragment {fragment}"
        return time.monotonic() - began


async def storm(count: int, parameters: float, place: Path, address: str) -> None:
    """Runs the learners when the file `storm.go` exists."""
    tensors = tensors_of(parameters)
    newcomers = [Newcomer(f"newcomer-{n}", address, tensors, STEP_S) for n in range(count)]
    (place / "storm.ready").touch()
    while not (place / "storm.go").exists():  # noqa: ASYNC110 - another process makes the file
        await asyncio.sleep(0.01)
    seconds = await asyncio.gather(*(each.fetch_all() for each in newcomers))
    told = {"seconds": seconds, "bytes": sum(each.checked_bytes for each in newcomers)}
    (place / "storm.part").write_text(json.dumps(told))
    (place / "storm.part").rename(place / "storm.json")


if __name__ == "__main__":
    configure("warning", json=False)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(storm(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]))
