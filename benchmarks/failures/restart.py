"""Kills the core of a 25M-parameter model repeatedly, and measures how soon it serves again.

Synthetic learners speak the protocol but do not train: they send random values for every round that opens.

python -m benchmarks.failures.restart --kills 20 --history 100000 --json PATH
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import random
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import safetensors.numpy
from atoll.demo.processes import children
from atoll_server.ledger import database, shard_ledger, totals
from atoll_server.ledger.rows import ContributionRow, FateRow
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.contract import PROTOCOL, Fate, tensor_message
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import Layout, MergeKind, TensorSpec, plan
from rich.console import Console

from benchmarks.conditions import conditions, write_record

LARGEST_START_S = 3.0  # the promised limit
STEP_S, TOKENS = 0.15, 4096  # duration and tokens of a synthetic inner step
MESSAGES = [
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.use_local_subchannel_pool", 1),
]


def tensors(parameters: int) -> tuple[TensorSpec, ...]:
    """Returns tensors roughly like a transformer's: an embedding, and matrices of equal size.

    parameters: their approximate number.
    """
    width = 512
    count = (parameters - 4096 * width) // (width * width)
    blocks = (TensorSpec(f"block.{n}", (width, width), "float32", MergeKind.DIRECTION) for n in range(count))
    return (TensorSpec("embedding", (4096, width), "float32", MergeKind.AVERAGE), *blocks)


class Synthetic(threading.Thread):
    """A learner without training, in a thread."""

    def __init__(self, address: str, name: str, specs: tuple[TensorSpec, ...]) -> None:
        super().__init__(name=name, daemon=True)
        self._address = address
        self._specs = specs
        self._nonce = secrets.randbits(63) | 1
        self.ending = threading.Event()
        self.acknowledged = 0
        self._seq: dict[int, int] = {}
        self._began = time.monotonic()
        self._incarnation = 0
        self._coded: dict[int, list[bytes]] = {}

    def run(self) -> None:
        """Joins, follows and pushes until `ending` is set. After an outage of the core, joins again."""
        with grpc.insecure_channel(self._address, options=MESSAGES) as channel:
            stub = rpc.OuterStub(channel)
            while not self.ending.is_set():
                try:
                    self._stay(stub)
                except grpc.RpcError as error:
                    if error.code() not in {
                        grpc.StatusCode.UNAVAILABLE,
                        grpc.StatusCode.UNAUTHENTICATED,
                        grpc.StatusCode.CANCELLED,
                    }:
                        raise
                    self.ending.wait(0.1)

    def _stay(self, stub: rpc.OuterStub) -> None:
        reply = stub.Join(
            pb.JoinRequest(
                protocol=PROTOCOL,
                learner=self.name,
                nonce=self._nonce,
                incarnation=self._incarnation,
                tensors=[tensor_message(t) for t in self._specs],
            )
        )
        self._incarnation = reply.incarnation
        session = pb.Session(
            run=reply.run,
            learner=self.name,
            incarnation=reply.incarnation,
            generation=reply.generation,
            token=reply.token,
        )
        layout, versions = plan(self._specs, reply.settings.fragments), dict(reply.versions)
        over = threading.Event()
        reporting = threading.Thread(target=self._report, args=(stub, session, over), daemon=True)
        reporting.start()
        try:
            for notification in stub.Follow(pb.FollowRequest(session=session)):
                match notification.WhichOneof("what"):
                    case "published":
                        versions[notification.published.fragment] = notification.published.version
                    case "opened":
                        self._push(stub, session, layout, notification.opened, versions)
                if self.ending.is_set():
                    return
        finally:
            over.set()
            reporting.join()

    def _report(self, stub: rpc.OuterStub, session: pb.Session, over: threading.Event) -> None:
        def progress() -> Iterator[pb.Progress]:
            while not over.wait(0.25) and not self.ending.is_set():
                steps = int((time.monotonic() - self._began) / STEP_S)
                yield pb.Progress(session=session, steps=steps, tokens=TOKENS * steps, stepping_s=steps * STEP_S)

        try:
            stub.Report(progress())
        except grpc.RpcError:
            return  # the core does not answer, so `Follow` ends, too

    def _push(
        self, stub: rpc.OuterStub, session: pb.Session, layout: Layout, opened: pb.RoundOpened, versions: dict[int, int]
    ) -> None:
        fragment = layout.fragments[opened.fragment]
        payloads = self._payloads(layout, opened.fragment)
        table = [(len(p), crc32c(p)) for p in payloads]
        self._seq[opened.fragment] = self._seq.get(opened.fragment, 0) + 1
        header = pb.PushHeader(
            session=session,
            fragment=opened.fragment,
            seq=self._seq[opened.fragment],
            cycle=opened.cycle,
            base_version=versions[opened.fragment],
            tokens=TOKENS,
            steps=24,
            codec=pb.CODEC_INT4,
            frames=len(payloads),
            size_bytes=sum(map(len, payloads)),
            digest=frame_codec.frames_digest(table),
        )
        frames = (pb.Frame(index=n, crc32c=table[n][1], payload=p) for n, p in enumerate(payloads))
        messages = [pb.PushRequest(header=header), *(pb.PushRequest(frames=[frame]) for frame in frames)]
        try:
            receipt = list(stub.Push(iter(messages)))[-1].receipt
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return  # an earlier contribution still waits for its merge
            raise
        self.acknowledged += receipt.fate in {pb.FATE_PENDING, pb.FATE_MERGED}
        assert fragment.length > 0, "a fragment is never empty"

    def _payloads(self, layout: Layout, index: int) -> list[bytes]:
        if index not in self._coded:
            fragment, rng = layout.fragments[index], np.random.default_rng(hash((self.name, index)) & 0xFFFF)
            vector = rng.standard_normal(fragment.length, np.float32) * np.float32(1e-3)
            self._coded[index] = [frame_codec.encode_frame(vector, span, Codec.INT4) for span in fragment.frames]
        return self._coded[index]


def main() -> int:
    """Measures and prints each start. Returns 1 if a start took longer than LARGEST_START_S."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--between", type=float, default=8.0, help="mean seconds between a start and the next kill")
    parser.add_argument("--history", type=int, default=0, help="number of earlier contributions in the ledger")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under = parser.parse_args(), conditions()
    found = measure(arguments)
    times = [each["serving_s"] for each in found]
    print(f"{len(times)} starts: {statistics.median(times):.2f} s median, {max(times):.2f} s at most")
    if arguments.json_path is not None:
        write_record(arguments.json_path, {"starts": found}, under)
    return 0 if max(times) <= LARGEST_START_S else 1


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Kills and starts a core repeatedly. Returns one row per start."""
    specs, console, rng = tensors(arguments.parameters), Console(), random.Random(arguments.seed)  # noqa: S311 - dice
    found: list[dict[str, Any]] = []
    problems: queue.Queue[str] = queue.Queue()
    threading.excepthook = lambda args: problems.put(repr(args.exc_value))
    with tempfile.TemporaryDirectory() as place, children(Path(place)) as group:
        directory = Path(place)
        values = {t.name: np.zeros(t.shape, np.float32) for t in specs}
        safetensors.numpy.save_file(values, directory / "init.safetensors")
        options = ["--init", str(directory / "init.safetensors")]
        core, address = group.start_core(directory / "run", "127.0.0.1:0", options)
        learners = [Synthetic(address, f"synthetic-{n}", specs) for n in range(arguments.learners)]
        for learner in learners:
            learner.start()
        with grpc.insecure_channel(address, options=MESSAGES) as channel:
            stub = rpc.OperatorStub(channel)
            for number in range(arguments.kills):
                before = stub.Status(pb.StatusRequest(), wait_for_ready=True, timeout=30).merges
                time.sleep(min(4 * arguments.between, rng.expovariate(1 / arguments.between)))
                status = stub.Status(pb.StatusRequest(), wait_for_ready=True, timeout=30)
                core.kill()
                if number == 0:
                    grow(directory / "run" / "ledger.sqlite", arguments.history)
                began = time.monotonic()
                core, _ = group.start_core(directory / "run", address, options)
                serving_s = time.monotonic() - began
                found.append({"serving_s": serving_s, "merges": status.merges})
                console.print(
                    f"start {number + 1}: {serving_s:.2f} s; {status.merges - before} merges since the last start, "
                    f"{status.merges} in all",
                    highlight=False,
                )
                if not problems.empty():
                    raise RuntimeError(f"a synthetic learner failed: {problems.get()}")
        for learner in learners:
            learner.ending.set()
        group.stop(core)
        for learner in learners:
            learner.join(10)
    return found


def grow(path: Path, count: int) -> None:
    """Adds `count` decided contributions, with their totals, to the ledger of a stopped run, as a long run would."""
    with contextlib.closing(database.open_ledger(path)) as db:
        db.execute("BEGIN")
        for number in range(1, count + 1):
            key = ContributionKey("synthetic-0", 0, number % 8, number)
            row = ContributionRow(key, 1, 0, TOKENS, 24, 3, 4, 1_500_000, bytes(32), (1.0,) * 12, 1.0, time.time())
            shard_ledger.add_contribution(db, 1, row, FateRow(key, Fate.MERGED, 0, 0.25))
        while totals.add_up(db, 1):
            pass
        db.execute("COMMIT")


if __name__ == "__main__":
    sys.exit(main())
