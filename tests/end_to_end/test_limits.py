"""A core and a front apply the limits that an operator sets."""

from __future__ import annotations

import grpc
import pytest
from atoll_server.access.quotas import FRONT_FACTOR
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc

from tests.end_to_end.world import Trainee, core, front, train


def test_a_core_limits_names_and_message_sizes_as_configured(tmp_path):
    import atoll

    with core(tmp_path, "--limit-learners", "1", "--limit-message-bytes", "1MiB") as running:
        train(running.address, "a", steps=10)
        second = Trainee(running.address, "b", lambda _: True, connect_timeout_s=3.0)
        second.start()
        with pytest.raises(atoll.LearnerError, match=r"the run has 1 learner names.*--limit-learners"):
            second.done()
        with grpc.insecure_channel(running.address) as channel:
            probe = rpc.DoctorStub(channel).Probe(iter([pb.ProbeRequest(padding=bytes(1 << 19))]))
            assert next(iter(probe)).message_bytes == 1 << 20


def test_a_core_and_a_front_limit_calls_as_configured(tmp_path):
    given = ["--quota-calls-per-s", "0.001", "--quota-calls-burst", "1", "--quota-max-wait-s", "0"]
    with core(tmp_path / "home", *given) as running, front(tmp_path / "eu", "127.0.0.1:1", *given) as gateway:
        for address in (running.address, gateway.address):
            codes = [_status(address) for _ in range(FRONT_FACTOR + 2)]
            assert codes[0] is not grpc.StatusCode.RESOURCE_EXHAUSTED
            assert codes[-1] is grpc.StatusCode.RESOURCE_EXHAUSTED


def _status(address: str) -> grpc.StatusCode:
    with grpc.insecure_channel(address) as channel:
        try:
            rpc.OperatorStub(channel).Status(pb.StatusRequest(), timeout=10)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK
