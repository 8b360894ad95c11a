"""Follows a run's published model in a test, and compares every version with the core's export."""

from __future__ import annotations

import contextlib
import io
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import safetensors
from atoll.follower.cuts import Cut, FragmentValues
from atoll.follower.follow_session import Source
from atoll.follower.follow_thread import FollowThread
from atoll_wire import outer_pb2 as pb
from atoll_wire.model_file.metadata_keys import GENERATION, VERSIONS
from atoll_wire.model_file.model_file import write_model
from atoll_wire.process.clock import SYSTEM
from atoll_wire.security.transport import TransportSecurity

from tests.end_to_end.world import Core, Trainee, eventually

KEPT = 64


class Recorder:
    """Records the values of every fragment version that a follower receives."""

    def __init__(self, *addresses: str, tls: Path | None = None) -> None:
        self.follow = FollowThread(Source(addresses, 60.0, TransportSecurity(tls)), SYSTEM)
        self.seen: dict[tuple[int, int, int], FragmentValues] = {}  # by (generation, fragment, version)
        self.compared = set[tuple[int, int, int]]()
        self.cuts: list[Cut] = []
        self._exports: deque[bytes] = deque(maxlen=KEPT)  # not compared yet
        self.error: BaseException | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._record, daemon=True)

    def _record(self) -> None:
        newest: Cut | None = None
        try:
            while not self._ending.is_set():
                cut = self.follow.exchange.wait(newest, 0.2)
                if cut is not None:
                    newest = cut
                    self.cuts.append(cut)
                    for index, values in cut.fragments.items():
                        self.seen[cut.run.generation, index, values.version] = values
        except BaseException as error:
            self.error = error

    def start(self) -> Recorder:
        self.follow.start()
        self._thread.start()
        return self

    def end(self) -> None:
        self._ending.set()
        self._thread.join(20)
        self.follow.end()

    def compare(self, core: Core) -> None:
        """Exports the model. Compares each export byte by byte once the follower has received its versions."""
        assert self.error is None, self.error
        if not self.cuts:
            return
        self._exports.append(exported(core))
        for content in list(self._exports):
            metadata = read_metadata(content)
            generation, versions = int(metadata[GENERATION]), list(map(int, metadata[VERSIONS].split(",")))
            keys = [(generation, index, version) for index, version in enumerate(versions)]
            if all(key in self.seen for key in keys):
                self._exports.remove(content)
                cut, parts = self.cuts[-1], {key[1]: self.seen[key] for key in keys}
                out = io.BytesIO()
                write_model(out, cut.layout, cut.fixed, parts, cut.run._replace(generation=generation))
                assert out.getvalue() == content, f"bytes differ at generation {generation}, {versions}"
                self.compared.update(keys)

    def compare_newest(self, core: Core) -> bool:
        """Returns whether the newest cut has the export's versions. If so, it must have the same bytes."""
        content, cut = exported(core), self.cuts[-1]
        if read_metadata(content)[VERSIONS] != ",".join(map(str, cut.versions)):
            return False
        out = io.BytesIO()
        write_model(out, cut.layout, cut.fixed, cut.fragments, cut.run)
        assert out.getvalue() == content, f"the export and the follower differ at versions {cut.versions}"
        return True

    def compare_until(self, core: Core, count: int, timeout_s: float = 40.0) -> None:
        """Compares until this number of further fragment versions are equal."""
        target = len(self.compared) + count

        def enough() -> bool:
            self.compare(core)
            return len(self.compared) >= target

        eventually(enough, timeout_s)


def exported(core: Core) -> bytes:
    """Returns the bytes of the core's export."""
    with core.operator() as stub:
        replies = stub.ExportCheckpoint(pb.ExportCheckpointRequest(), timeout=20, wait_for_ready=True)
        return b"".join(reply.chunk for reply in replies)


def read_metadata(content: bytes) -> dict[str, str]:
    import json

    length = int.from_bytes(content[:8], "little")
    assert safetensors.deserialize(content)
    metadata: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return metadata


@contextlib.contextmanager
def recorder(*addresses: str, tls: Path | None = None) -> Iterator[Recorder]:
    """Context manager for a follower that records every cut."""
    made = Recorder(*addresses, tls=tls).start()
    try:
        yield made
    finally:
        made.end()


@contextlib.contextmanager
def training(address: str, name: str = "a", **options: object) -> Iterator[Trainee]:
    """Context manager for a learner that trains until the block ends."""
    over = threading.Event()
    trainee = Trainee(address, name, lambda _: over.is_set(), **options)
    trainee.start()
    try:
        yield trainee
    finally:
        over.set()
        trainee.join(40)
    trainee.done()
