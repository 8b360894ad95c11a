"""Connections that are cut or become silent: a learner notices, and continues over other connections."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from atoll.demo.processes import free_port
from atoll_wire import outer_pb2 as pb
from torch import nn

from tests.end_to_end.relay import relay
from tests.end_to_end.test_uploads import Large, Push, prepared
from tests.end_to_end.world import Trainee, core, eventually, front, small_model


def test_a_learner_whose_first_address_is_cut_continues_through_the_second(tmp_path):
    second = f"127.0.0.1:{free_port()}"
    with core(tmp_path, "--listen", second) as running, relay(running.address) as link:
        stop: list[bool] = []
        trainee = Trainee((link.address, second), "a", lambda _: bool(stop))
        trainee.start()
        eventually(lambda: len(trainee.losses) > 20 and trainee.learner.stats().merged > 2)
        link.cut()
        merged = trainee.learner.stats().merged
        eventually(lambda: trainee.learner.stats().merged > merged + 5)
        stop.append(True)
        trainee.done()
        (status,) = running.status().learners
        assert (status.incarnation, trainee.learner.stats().reconnects) == (1, 1)


@pytest.mark.ci
def test_an_island_on_the_other_side_of_the_world_joins_and_trains(tmp_path):
    with core(tmp_path) as running, relay(running.address, delay_s=0.15) as link:
        trainee = Trainee(link.address, "a", lambda t: t.learner.stats().merged > 3)
        trainee.start()
        trainee.done()
        assert trainee.longest_step_s < 0.5


def test_a_cut_upload_continues_through_another_listener(tmp_path):
    second = f"127.0.0.1:{free_port()}"
    with core(tmp_path, "--fragments", "1", "--listen", second) as running:
        first = Trainee(running.address, "first", lambda _: True, model=Large())
        first.start()
        first.done()
        with running.outer() as stub:
            header, frames = prepared(stub, "cut")
            begun = Push(stub, header, frames[0], frames[2])
            assert list(next(begun.call).received.frames) == []
            running.address, one = second, running.address
            with running.outer() as other:
                received: list[int] = []

                def resumed() -> bool:
                    probe = Push(other, header)
                    received[:] = next(probe.call).received.frames
                    probe.cut()
                    return received == [0, 2]

                eventually(resumed)
                begun.cut()
                rest = Push(other, header)
                assert list(next(rest.call).received.frames) == [0, 2]
                rest.send(frames[1])
                assert rest.receipt().fate == pb.FATE_PENDING
            running.address = one


@pytest.mark.ci
def test_a_connection_that_dies_in_silence_is_detected_and_training_never_waits(tmp_path):
    with core(tmp_path) as running, relay(running.address) as link:
        stop: list[bool] = []
        trainee = Trainee(link.address, "a", lambda _: bool(stop))
        trainee.start()
        eventually(lambda: len(trainee.losses) > 100 and trainee.learner.stats().merged > 5)
        merged, steps, before = trainee.learner.stats().merged, len(trainee.losses), link.accepted
        link.stall()
        began = time.monotonic()
        eventually(lambda: link.accepted > before)
        assert time.monotonic() - began < 15.0, "the shortest timeout is 4 s; gRPC's own would be 50 s"
        assert len(trainee.losses) > steps + 100
        eventually(lambda: trainee.learner.stats().merged > merged + 2, timeout_s=90.0)
        stop.append(True)
        trainee.done()
        assert trainee.longest_step_s < 0.5


class Heavy(nn.Module):
    """Trains the small model with 5.2 MB of additional parameters, so that a fragment has three frames."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.weight = small_model(), nn.Parameter(torch.randn(1310, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.small(x) + self.weight[0, 0]
        return found


@pytest.mark.parametrize("where", ["at the learner", "before a front"])
def test_a_learner_joins_over_connections_that_die_within_a_fragment(tmp_path: Path, where: str):
    with core(tmp_path, "--fragments", "1") as running, relay(running.address, most_down=3_000_000) as link:
        # It has left when the other joins: otherwise, a merge could replace the version that is being fetched.
        first = Trainee(running.address, "first", lambda t: t.learner.stats().merged > 1, model=Heavy())
        first.start()
        first.done()
        with front(tmp_path / "front", link.address) as gateway:
            address = gateway.address if where == "before a front" else link.address
            late = Trainee(address, "late", lambda t: t.learner.stats().merged > 0, model=Heavy(), drain_s=0.5)
            late.start()
            late.done()
            whole = late.learner.stats().bytes_whole
        assert link.spent > 1, "no connection may carry the whole fragment"
        # The parameters take 5.25 MB, and a frame 1.75 MB.
        assert whole < 6_000_000, "received frames must not be fetched again after a lost connection"
