"""Regions on one machine: the relay has the declared delay and rate, and the demo succeeds."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from atoll.demo.processes import children

from tests.end_to_end.world import eventually

SIZE = 500_000


@pytest.fixture
def echo():
    """Serves a TCP socket that returns received data."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(peer,), daemon=True).start()

    def answer(peer: socket.socket) -> None:
        with peer:
            while data := peer.recv(1 << 16):
                peer.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def test_a_relay_delays_and_limits_bytes_and_can_be_cut(tmp_path, echo):
    counts = tmp_path / "counts"
    command = [sys.executable, "-m", "atoll.demo.relay", "--to", echo, "--mbit", "8", "--delay-ms", "100"]
    with children(tmp_path) as group:
        relay = group.start("relay", [*command, "--counts", str(counts)], piped=True)
        host, _, port = group.serving(relay).rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as it:
            began = time.monotonic()
            it.sendall(b"x")
            assert it.recv(1) == b"x"
            assert 0.2 <= time.monotonic() - began < 2.0, "the delay must apply to both directions"
            began = time.monotonic()
            threading.Thread(target=it.sendall, args=(bytes(SIZE),), daemon=True).start()
            left = SIZE
            while left:
                left -= len(it.recv(1 << 16))
            assert time.monotonic() - began > 0.7 * SIZE * 8 / 8e6, "the rate limit must apply"
            relay.process.send_signal(signal.SIGUSR1)
            eventually(lambda: json.loads(counts.read_text())["up"] == SIZE + 1)
            it.sendall(b"y")
            it.settimeout(1.0)
            with pytest.raises(TimeoutError):
                it.recv(1)
            relay.process.send_signal(signal.SIGUSR2)
            it.settimeout(20.0)
            assert it.recv(1) == b"y", "held bytes must arrive after the repair"


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_short_demo_of_two_regions_survives_all_its_faults(tmp_path):
    arguments = ["--regions", "2", "--steps", "600", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, "-m", "atoll.cli", "demo", *arguments], capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("killed the front of", "cut the link of", "killed learner", "killed the core"):
        assert said in done.stdout
    summary = json.loads((tmp_path / "out.json").read_text())
    assert summary["learners"] == 4
    assert summary["kills"] == {"learner": 1, "core": 1, "front": 1, "link": 1}
    counts = summary["contributions"]
    assert counts["accepted"] == counts["merged"] + counts["refused"]
    for moved in summary["regions"].values():
        assert 0 < moved["update_bytes"] < moved["link_down_bytes"]
        assert 0 < moved["contribution_bytes"] < moved["link_up_bytes"]
