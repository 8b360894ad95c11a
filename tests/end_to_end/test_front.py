"""Learners behind fronts: they train as if they called the core, and each update crosses the WAN once."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from atoll_server.upstream.core_connection import AGAIN_S

from tests.end_to_end.relay import Relay
from tests.end_to_end.world import Front, Trainee, core, eventually, front, train

STEPS = 150


def refused(front: Front) -> float:
    """Returns the number of calls that the front refused because the core did not answer."""
    return front.metrics().total("atoll_front_refused_total", status="unavailable")


def test_learners_behind_a_front_train_and_updates_cross_the_wan_once(tmp_path):
    with core(tmp_path / "home") as it, front(tmp_path / "eu", it.address, "--region", "eu") as eu:
        trainees = train(eu.address, "a", "b", "c", steps=STEPS)
        eventually(lambda: it.status().contributions.pending == 0)  # the last merge may run as the last learner leaves
        status = it.status()
        updates = eu.metrics().total("atoll_front_wan_bytes_total", direction="down", kind="update", region="eu")
    assert status.contributions.merged > 10
    assert status.contributions.pending == status.contributions.refused == 0
    for trainee in trainees:
        assert trainee.losses[-1] < 0.7 * trainee.losses[0]
        assert trainee.learner.stats().mismatches == 0
    assert status.wire.down == updates, "core and front must count the same bytes"
    once = sum(each.version * each.parameters for each in status.fragments)
    assert status.wire.down_parameters <= once, "each update must cross the WAN at most once"
    assert sum(trainee.learner.stats().bytes_down for trainee in trainees) > 1.8 * updates, "all must use them"


@pytest.mark.ci
def test_a_stranger_on_the_cores_port_ends_no_learner_behind_a_front(tmp_path):
    with core(tmp_path / "home") as it, front(tmp_path / "eu", it.address) as eu:
        over: list[bool] = []
        trainee = Trainee(eu.address, "a", lambda _: bool(over))
        trainee.start()
        eventually(lambda: hasattr(trainee, "learner") and trainee.learner.stats().merged > 2)
        it.kill()
        stranger = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        stranger.add_insecure_port(it.address)
        stranger.start()
        eventually(lambda: "not found" in trainee.learner.stats().last_error or not trainee.is_alive())
        stranger.stop(0).wait()
        it.start()
        before = trainee.learner.stats().merged
        eventually(lambda: trainee.learner.stats().merged > before + 2)
        over.append(True)
        trainee.done()


@pytest.mark.ci
def test_a_front_keeps_a_working_connection_after_failed_attempts(tmp_path):
    with core(tmp_path / "home") as it, front(tmp_path / "eu", it.address, "--region", "eu") as eu:
        over: list[bool] = []
        trainee = Trainee(eu.address, "a", lambda _: bool(over))
        trainee.start()
        eventually(lambda: hasattr(trainee, "learner") and trainee.learner.stats().merged > 2)
        learner = trainee.learner
        it.kill()
        eventually(lambda: refused(eu) >= 3)  # the broken call, and attempts over later connections
        it.start()
        eventually(lambda: learner.stats().connected)
        dialled, reconnects = eu.child.log.read_text().count("reconnecting"), learner.stats().reconnects
        merged, long_enough = learner.stats().merged, time.monotonic() + AGAIN_S + 1.0
        eventually(lambda: time.monotonic() > long_enough and learner.stats().merged > merged)
        over.append(True)
        trainee.done()
        assert eu.child.log.read_text().count("reconnecting") == dialled
        assert learner.stats().reconnects == reconnects


def test_a_front_that_is_killed_costs_its_learners_a_reconnect(tmp_path):
    with (
        core(tmp_path / "home") as it,
        front(tmp_path / "one", it.address, name="one") as one,
        front(tmp_path / "two", it.address, name="two") as two,
    ):
        trainee = Trainee(
            [one.address, two.address], "a", lambda t: len(t.losses) > 2000 or t.learner.stats().merged > 30
        )
        other = Trainee(two.address, "b", lambda _: not trainee.is_alive())
        trainee.start(), other.start()
        eventually(lambda: hasattr(trainee, "learner") and trainee.learner.stats().merged > 2)
        one.kill()
        eventually(lambda: trainee.learner.stats().reconnects > 0 and trainee.learner.stats().connected)
        before = trainee.learner.stats().merged
        eventually(lambda: trainee.learner.stats().merged > before + 2)
        trainee.done(), other.done()
        eventually(lambda: it.status().contributions.pending == 0)
        status = it.status()
    assert trainee.longest_step_s < 1.0
    assert status.contributions.accepted == status.contributions.merged + status.contributions.refused
    assert [each.incarnation for each in status.learners] == [1, 1], "no learner may restart"


@pytest.mark.ci
def test_learners_continue_while_their_front_cannot_reach_the_core(tmp_path):
    with core(tmp_path / "home") as it:
        relay = Relay(it.address)
        with front(tmp_path / "eu", relay.address) as eu:
            trainee = Trainee(eu.address, "a", lambda t: len(t.losses) > 6000 or t.learner.stats().merged > 30)
            trainee.start()
            eventually(lambda: it.status().contributions.merged > 2)
            relay.stall()
            eventually(lambda: trainee.learner.stats().reconnects > 0, timeout_s=40)
            steps, merged = len(trainee.losses), trainee.learner.stats().merged
            eventually(lambda: trainee.learner.stats().connected, timeout_s=40)
            eventually(lambda: trainee.learner.stats().merged > merged + 2, timeout_s=40)
            assert len(trainee.losses) > steps
            trainee.done()


def test_new_learners_behind_a_front_fetch_the_model_over_the_wan_once(tmp_path):
    with core(tmp_path / "home") as it, front(tmp_path / "eu", it.address, "--region", "eu") as eu:
        train(it.address, "first", steps=60)
        train(eu.address, "a", "b", "c", steps=20)
        status, whole = it.status(), eu.wan_bytes("down", "whole")
    assert whole <= 4 * status.parameters * 1.5, (
        "the model must cross the WAN once, except fragments that changed meanwhile"
    )


def test_a_front_needs_neither_numpy_nor_numba_nor_torch():
    script = """
import sys
for name in ("numpy", "numba", "torch", "zstandard", "safetensors", "atoll"):
    sys.modules[name] = None
import atoll_server.front.server, atoll_server.front.commands
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("bad", [["--core", "nowhere.invalid:1"], ["--core", "10.0.0.1:7070"]])
def test_a_front_with_an_invalid_core_address_ends_with_one_line(bad, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "atoll.cli", "front", "--listen", "127.0.0.1:0", *bad],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
