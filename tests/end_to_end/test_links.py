"""Links that are cut, or die in silence: a learner finds out by itself, and goes on through whatever is left."""

from __future__ import annotations

import time

from atoll.demo.processes import free_port
from atoll_wire import outer_pb2 as pb

from tests.end_to_end.relay import relay
from tests.end_to_end.test_uploads import Large, Push, prepared
from tests.end_to_end.world import Trainee, core, eventually


def test_a_learner_whose_first_address_is_cut_goes_on_through_the_second(tmp_path):
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


def test_an_island_on_the_other_side_of_the_world_joins_and_trains(tmp_path):
    with core(tmp_path) as running, relay(running.address, delay_s=0.15) as link:
        trainee = Trainee(link.address, "a", lambda t: t.learner.stats().merged > 3)
        trainee.start()
        trainee.done()
        assert trainee.longest_step_s < 0.5


def test_an_upload_that_was_cut_goes_on_through_another_listener(tmp_path):
    second = f"127.0.0.1:{free_port()}"
    with core(tmp_path, "--fragments", "1", "--listen", second) as running:
        first = Trainee(running.address, "first", lambda _: True, model=Large())
        first.start()
        first.done()
        with running.outer() as stub:
            header, frames = prepared(stub, "cut")
            begun = Push(stub, header, frames[0], frames[2])
            assert list(next(begun.call).have.frames) == []
            running.address, one = second, running.address
            with running.outer() as other:
                have: list[int] = []

                def resumed() -> bool:
                    probe = Push(other, header)
                    have[:] = next(probe.call).have.frames
                    probe.cut()
                    return have == [0, 2]

                eventually(resumed)
                begun.cut()
                rest = Push(other, header)
                assert list(next(rest.call).have.frames) == [0, 2]
                rest.send(frames[1])
                assert rest.receipt().fate == pb.FATE_PENDING
            running.address = one


def test_a_connection_that_dies_in_silence_is_found_out_by_the_silence_and_training_never_waits(tmp_path):
    with core(tmp_path) as running, relay(running.address) as link:
        stop: list[bool] = []
        trainee = Trainee(link.address, "a", lambda _: bool(stop))
        trainee.start()
        eventually(lambda: len(trainee.losses) > 100 and trainee.learner.stats().merged > 5)
        merged, steps, before = trainee.learner.stats().merged, len(trainee.losses), link.accepted
        link.stall()
        began = time.monotonic()
        eventually(lambda: link.accepted > before)
        assert time.monotonic() - began < 15.0, "the least patience is 4 s, gRPC's own 50 s"
        assert len(trainee.losses) > steps + 100
        eventually(lambda: trainee.learner.stats().merged > merged + 2, timeout_s=90.0)
        stop.append(True)
        trainee.done()
        assert trainee.longest_step_s < 0.5
