"""Many synthetic learners in one process: python -m benchmarks.growth.crowd COUNT PARAMETERS SYNCS FOLDER ADDRESS...

The learners divide the addresses among them. They send the same random work, which is coded once, so that the process
uses little of the machine. The process creates `crowd.ready` when all learners have joined, and `crowd.K` when every
learner has the updates of sync K.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path
from typing import ClassVar

from atoll_wire.layout.frame_spans import Codec
from atoll_wire.process.logs import configure

from benchmarks.shards.large_model import tensors_of
from benchmarks.shards.synthetic_learner import SyntheticLearner

STEP_S = 0.05
POLL_S = 0.01


class Member(SyntheticLearner):
    """A learner that sends the same work as all others."""

    _coded: ClassVar[dict[int, tuple[list[bytes], tuple[tuple[int, int], ...]]]] = {}  # by fragment

    def _frames(self, index: int, codec: Codec) -> tuple[list[bytes], tuple[tuple[int, int], ...]]:
        if index not in self._coded:
            self._coded[index] = super()._frames(index, codec)
        return self._coded[index]

    def code_all(self) -> None:
        """Codes the work on all fragments. The learner must have joined."""
        for fragment in self._layout.fragments:
            self._frames(fragment.index, Codec(self._settings.codec))

    def has(self, version: int) -> bool:
        """Returns whether the learner follows the run and has this version, or a newer one, of every fragment."""
        return bool(self.versions) and min(self.versions.values()) >= version


async def live(count: int, parameters: float, syncs: int, place: Path, addresses: list[str]) -> None:
    """Runs the learners until every learner has the updates of the last sync."""
    tensors = tensors_of(parameters)
    members = [Member(f"learner-{n}", addresses[n % len(addresses)], tensors, STEP_S) for n in range(count)]
    tasks = [asyncio.create_task(each.live()) for each in members]

    async def until_all(version: int, name: str) -> None:
        while not all(each.has(version) for each in members):
            for each, task in zip(members, tasks, strict=True):
                if each.error is not None or task.done():
                    raise SystemExit(f"{each.name} failed: {each.error!r}") from (each.error or task.exception())
            await asyncio.sleep(POLL_S)
        (place / name).touch()

    await until_all(0, "crowd.joined")
    await asyncio.to_thread(members[0].code_all)
    (place / "crowd.ready").touch()
    for number in range(syncs):
        await until_all(number + 1, f"crowd.{number}")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    configure("warning", json=False)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(live(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:]))
