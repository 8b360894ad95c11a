"""The metrics and the status of running processes, as benchmarks and tests read them."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator

import grpc
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

ANSWER_S = 20.0  # limit on the time of one answer
SETTLE_S = 60.0
ASK_EVERY_S = 0.2


class Metrics:
    """The metrics of one process at one moment.

    Example:
        ```python
        metrics(9100).total("atoll_front_wan_bytes_total", direction="down", kind="update")
        ```
    """

    def __init__(self, text: str) -> None:
        """text: what the process serves at `/metrics`."""
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def samples(self, name: str, **labels: str) -> Iterator[Sample]:
        """Yields the samples of this name whose labels include the given ones."""
        for sample in self._samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of the samples of this name whose labels include the given ones: 0 if there are none."""
        return sum(sample.value for sample in self.samples(name, **labels))


def metrics(port: int) -> Metrics:
    """Reads the metrics of a process on this machine. Raises OSError if it does not answer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=ANSWER_S) as answer:
        return Metrics(answer.read().decode())


def settled(address: str) -> pb.StatusReply:
    """Waits until the core at `address` has no pending contribution. Returns its status.

    Raises SystemExit after SETTLE_S seconds.
    """
    deadline = time.monotonic() + SETTLE_S
    with grpc.insecure_channel(address) as channel:
        stub = rpc.OperatorStub(channel)
        while True:
            status: pb.StatusReply = stub.Status(pb.StatusRequest(), timeout=ANSWER_S, wait_for_ready=True)
            if not (pending := status.contributions.pending):
                return status
            if time.monotonic() > deadline:
                raise SystemExit(f"{pending} contributions are still pending after {SETTLE_S:.0f} s")
            time.sleep(ASK_EVERY_S)
