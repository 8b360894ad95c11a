"""A standby core waits with compiled kernels, and takes over the run when the active core dies."""

from __future__ import annotations

import signal
import socket
import time

from benchmarks.process_state import metrics
from tests.end_to_end.world import Trainee, core, eventually, train

STANDING = "standby: this core takes over"


def test_a_standby_takes_over_from_a_killed_core_without_loss(tmp_path):
    with core(tmp_path) as running:
        options = ["--standby", "--fragments", "2", "--inner-steps", "4"]
        standby = running.group.launch_core("standby", running.directory, running.address, options)
        eventually(lambda: STANDING in standby.log.read_text())
        stop: list[bool] = []
        trainee = Trainee(running.address, "a", lambda _: bool(stop))
        trainee.start()
        eventually(lambda: len(trainee.losses) > 20 and trainee.learner.stats().merged > 2)
        assert standby.process.poll() is None
        versions = [fragment.version for fragment in running.status().fragments]
        running.kill()
        began = time.monotonic()
        assert running.group.serving(standby) == running.address
        assert time.monotonic() - began < 3.0
        merged = trainee.learner.stats().merged
        eventually(lambda: trainee.learner.stats().merged > merged + 3)
        stop.append(True)
        trainee.done()
        status = running.status()
        assert (status.epoch, status.learners[0].incarnation) == (2, 1)
        assert all(fragment.version >= old for fragment, old in zip(status.fragments, versions, strict=True))
        # The new core merges contributions that were pending when the last learner left.
        eventually(lambda: (now := running.status().contributions).accepted == now.merged)


def test_a_standby_takes_over_the_metrics_port_when_a_core_is_stopped(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    options = ["--metrics-listen", f"127.0.0.1:{port}"]
    with core(tmp_path, *options) as running:
        train(running.address, "a", steps=10)
        standby = running.group.launch_core("standby", running.directory, running.address, [*options, "--standby"])
        eventually(lambda: STANDING in standby.log.read_text())
        running.stop()
        running.group.serving(standby)
        assert list(metrics(port).samples("atoll_goodput_ratio"))


def test_a_standby_that_is_not_needed_ends_on_request(tmp_path):
    with core(tmp_path) as running:
        standby = running.group.launch_core("standby", running.directory, running.address, ["--standby"])
        eventually(lambda: STANDING in standby.log.read_text())
        standby.process.send_signal(signal.SIGTERM)
        assert standby.process.wait(10) == 0
        assert running.status().epoch == 1


def test_a_standby_without_an_active_core_serves(tmp_path):
    with core(tmp_path, "--standby") as running:
        assert running.status().epoch == 1
