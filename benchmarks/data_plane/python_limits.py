"""Measures two designs that Atoll does not use: gRPC's threads for Push, and a process of its own for the numerics.

A server receives frames over two connections, and checks each frame as the core does. In some cases, it also merges
fragments. All cases move the same bytes and merge the same number of parameters. Each case runs once per pass, so that
the cases see the same machine speed.

python -m benchmarks.data_plane.python_limits [--passes 5] [--json PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import psutil
from atoll_server.merging import merge
from atoll_server.rounds.outer_rule import OuterRule
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.layout.frame_spans import Codec, FrameSpan
from atoll_wire.layout.layout import FragmentLayout, MergeKind, TensorSpec, plan
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import conditions, write_record

FRAMES, CONNECTIONS = 480, 2  # frames in total; two learners send 480 in a sync of 124M parameters
PARAMETERS, MERGES = 5 << 20, 24  # parameters of a fragment; merges in total
THREADS = 2  # for frames, and as many for merges
METHOD = "/benchmark/Push"
SERVERS, NUMERICS = ("asyncio", "threads"), ("none", "threads", "process")


class Given:
    """A contribution whose contents are in memory."""

    codec, learner, scale = Codec.INT4, "a", 1.0

    def __init__(self, fragment: FragmentLayout) -> None:
        values = (np.random.default_rng(0).standard_normal(PARAMETERS) * 1e-3).astype(np.float32)
        self._contents = [frame_codec.quantise_frame(values[s.place], s, Codec.INT4) for s in fragment.frames]
        self.norms_sq = np.ones(len(fragment.pieces), np.float64)

    def content(self, span: FrameSpan) -> frame_codec.Content:
        """Returns the content of a frame."""
        return self._contents[span.index]


def fragment_of_one_tensor() -> FragmentLayout:
    """Returns the layout of the merged fragment."""
    return plan([TensorSpec("w", (PARAMETERS // 1024, 1024), "float32", MergeKind.DIRECTION)], 1).fragments[0]


class Merging:
    """Merges into vectors: theta, its published form, and momentum, float32 (3, PARAMETERS)."""

    def __init__(self, vectors: np.ndarray[Any, Any]) -> None:
        self._vectors = vectors
        self._fragment = fragment_of_one_tensor()
        self._given, self._rule = [Given(self._fragment)], OuterRule(0.7, 0.9, Codec.INT4)
        self.run(1)  # touches all memory

    def run(self, count: int) -> None:
        """Merges `count` times."""
        for _ in range(count):
            state = merge.FragmentState(0, *self._vectors)
            merge.merge(self._fragment, state, self._given, [1.0], self._rule, state.theta_pub)


def merge_in_shared_memory(name: str, ready: Any, begin: Any, done: Any) -> None:  # noqa: ANN401 - events
    """Merges in a process of its own, whose vectors are in shared memory."""
    merge.warm_up()
    memory = SharedMemory(name)
    merging = Merging(np.ndarray((3, PARAMETERS), np.float32, memory.buf))
    ready.release()
    begin.wait()
    merging.run(MERGES)
    done.set()
    del merging
    memory.close()


def check(message: bytes) -> int:
    """Does the work of the core on a frame: its checksum, and its content."""
    return crc32c(message) + len(bytearray(message))


def stream(address: str, frame: bytes) -> None:
    """Sends this connection's share of the frames, and waits for the answer."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        push: Any = channel.stream_unary(METHOD)
        push(iter([frame] * (FRAMES // CONNECTIONS)), wait_for_ready=True)


def client(address: str, size: int, ready: Any, begin: Any, done: Any) -> None:  # noqa: ANN401 - events
    """Sends all frames over several connections."""
    ready.release()
    begin.wait()
    senders = [threading.Thread(target=stream, args=(address, bytes(size))) for _ in range(CONNECTIONS)]
    for each in senders:
        each.start()
    for each in senders:
        each.join()
    done.set()


class Aio:
    """gRPC's asyncio server, which gives each frame to a thread, as the core does."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> int:
        pool = ThreadPoolExecutor(THREADS)

        async def push(requests: AsyncIterator[bytes], _: object) -> bytes:
            async for message in requests:
                await self._loop.run_in_executor(pool, check, message)
            return b""

        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        self._server.add_generic_rpc_handlers((handlers(grpc.stream_unary_rpc_method_handler(push)),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return int(port)

    def stop(self) -> None:
        """Stops the server."""
        asyncio.run_coroutine_threadsafe(self._server.stop(0), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class Threads:
    """gRPC's server with threads, each of which carries out one call."""

    def __init__(self) -> None:
        def push(requests: Iterator[bytes], _: object) -> bytes:
            for message in requests:
                check(message)
            return b""

        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1)])
        self._server.add_generic_rpc_handlers((handlers(grpc.stream_unary_rpc_method_handler(push)),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def stop(self) -> None:
        """Stops the server."""
        self._server.stop(0).wait()


def handlers(push: Any) -> Any:  # noqa: ANN401 - gRPC's
    """Returns the handlers of the server's only method."""
    _, service, method = METHOD.split("/")
    return grpc.method_handlers_generic_handler(service, {method: push})


def used_s(*processes: Any) -> float:  # noqa: ANN401 - of multiprocessing
    """Returns the CPU seconds of this process and of others."""
    every = [psutil.Process(), *(psutil.Process(each.pid) for each in processes)]
    return sum(sum(each.cpu_times()[:2]) for each in every)


def case(kind: str, numerics: str, size: int) -> dict[str, float]:
    """Runs one case. Returns the seconds, and the CPU seconds of the server with its numerics."""
    spawn = multiprocessing.get_context("spawn")
    ready, begin, sent, merged = spawn.Semaphore(0), spawn.Event(), spawn.Event(), spawn.Event()
    memory = SharedMemory(create=True, size=3 * 4 * PARAMETERS)
    vectors = np.ndarray((3, PARAMETERS), np.float32, memory.buf)
    vectors[:] = 0.0
    server: Aio | Threads = Aio() if kind == "asyncio" else Threads()
    sender = spawn.Process(target=client, args=(f"127.0.0.1:{server.port}", size, ready, begin, sent))
    sender.start()
    others = []
    if numerics == "process":
        others.append(spawn.Process(target=merge_in_shared_memory, args=(memory.name, ready, begin, merged)))
        others[0].start()
    pool = ThreadPoolExecutor(THREADS)
    halves = [Merging(vectors.copy()) for _ in range(THREADS)] if numerics == "threads" else []
    for _ in (sender, *others):
        ready.acquire()
    before, began = used_s(*others), time.monotonic()
    begin.set()
    merging = [pool.submit(half.run, MERGES // THREADS) for half in halves]
    sent.wait()
    for half in merging:
        half.result()
    if numerics == "process":
        merged.wait()
    found = {"wall_s": time.monotonic() - began, "cpu_s": used_s(*others) - before}
    server.stop()
    pool.shutdown()
    for each in (sender, *others):
        each.join()
    del vectors
    memory.close()
    memory.unlink()
    return found


def main() -> int:
    """Measures all cases, and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under = parser.parse_args(), conditions()
    merge.warm_up()
    cases = [(kind, numerics, size << 10) for size in (264, 528) for numerics in NUMERICS for kind in SERVERS]
    found: dict[tuple[str, str, int], list[dict[str, float]]] = {each: [] for each in cases}
    for number in range(arguments.passes):
        for each in cases:
            found[each].append(case(*each))
            print(f"pass {number + 1}: {each}: {found[each][-1]}", file=sys.stderr, flush=True)
    rows = [
        {"server": kind, "numerics": numerics, "message_bytes": size}
        | {
            name: round(statistics.median(one[name] for one in found[kind, numerics, size]), 3)
            for name in ("wall_s", "cpu_s")
        }
        for kind, numerics, size in cases
    ]
    table = Table("Push", "numerics", "message", "seconds", "CPU seconds")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    if arguments.json_path is not None:
        write_record(arguments.json_path, {"frames": FRAMES, "merges": MERGES, "rows": rows}, under)
    return 0


if __name__ == "__main__":
    sys.exit(main())
