"""Observes a deployment from outside: the core's status, and the recovery times of killed processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.connections.calls import open_stream

OPTIONS = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100)]
ASK_S = 1.0


@dataclass(slots=True)
class KillRecord:
    """A kill and the recovery from it, in seconds. A value is None until its phase has ended.

    A learner recovers in phases: prepared (interpreter, imports, model, data), joining, first step.
    serving_s: from a core's start to its first answer. all_back_s: from that answer until every learner reported again.
    """

    at_s: float
    target: str
    started_at: float = 0.0  # start of the new process, monotonic seconds
    prepared_s: float | None = None
    joining_s: float | None = None
    first_step_s: float | None = None
    serving_s: float | None = None
    all_back_s: float | None = None

    def row(self) -> dict[str, Any]:
        """Returns the known fields, for the JSON object."""
        names = ("at_s", "target", "prepared_s", "joining_s", "first_step_s", "serving_s", "all_back_s")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@contextmanager
def observing(address: str) -> Iterator[Observer]:
    """Context manager for an observer of the core at this address, HOST:PORT."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        yield Observer(channel)


class Observer:
    """Polls one core's status. channel: the connection to the core."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = rpc.OperatorStub(channel)
        self.hits: list[KillRecord] = []
        self._learners_waiting: dict[
            str, tuple[KillRecord, int]
        ] = {}  # name -> last kill and incarnation before the kill
        self._core_waiting: KillRecord | None = None
        self._core_answered_at: float | None = None
        self.status = pb.StatusReply()  # the newest answer

    def learner_killed(self, hit: KillRecord) -> None:
        """Records that a learner was killed and its new process was started."""
        self.hits.append(hit)
        incarnation = next((each.incarnation for each in self.status.learners if each.learner == hit.target), 0)
        self._learners_waiting[hit.target] = (hit, incarnation)

    def core_killed(self, hit: KillRecord) -> None:
        """Records that the core was killed and its new process was started."""
        self.hits.append(hit)
        self._core_waiting = hit
        self._core_answered_at = None

    def look(self) -> bool:
        """Requests the status once. Returns whether the core answered."""
        try:
            self.status = self._stub.Status(pb.StatusRequest(), timeout=ASK_S)
        except grpc.RpcError as error:
            if error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                return False
            raise
        now = time.monotonic()
        for each in self.status.learners:
            hit, before = self._learners_waiting.get(each.learner, (None, 0))
            if hit is not None and each.incarnation > before and each.recovery.first_step_s > 0:
                back = each.recovery
                hit.prepared_s = back.prepared_s
                hit.joining_s = back.joining_s
                hit.first_step_s = back.first_step_s
                del self._learners_waiting[each.learner]
        if self._core_waiting is not None:
            self._core_back(self._core_waiting, now)
        return True

    def _core_back(self, hit: KillRecord, now: float) -> None:
        if self._core_answered_at is None:
            self._core_answered_at = now
            hit.serving_s = now - hit.started_at
        here = [each for each in self.status.learners if each.state not in {"left", "evicted"}]
        if all(each.state not in {"silent", "cut_off"} and each.last_seen_age_s < 1.5 for each in here):
            hit.all_back_s = now - self._core_answered_at
            self._core_waiting = None

    def all_train(self, learners: int) -> bool:
        """Returns whether at least `learners` learners are live."""
        return sum(each.state == "live" for each in self.status.learners) >= learners

    def export(self, path: str) -> None:
        """Writes the published model as a safetensors file."""
        with (
            open_stream("ExportCheckpoint", self._stub.ExportCheckpoint(pb.ExportCheckpointRequest())) as call,
            open(path, "wb") as file,  # noqa: PTH123 - a plain write
        ):
            file.writelines(reply.chunk for reply in call)
