"""A log that cannot be written loses only its lines."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from atoll_wire.process.json_output import FATAL

TALKS = """
import sys, structlog
from atoll_wire.process.logs import configure
configure("info", json=False)
log = structlog.get_logger()
for number in range(3):
    log.info("line", number=number)
print("done", flush=True)
"""


def test_a_process_that_logs_to_a_full_disk_continues():
    with Path("/dev/full").open("w") as full:
        found = subprocess.run([sys.executable, "-c", TALKS], stdout=subprocess.PIPE, stderr=full, timeout=60)
    assert found.stdout == b"done\n"


def test_a_process_that_logs_to_a_closed_pipe_continues():
    process = subprocess.Popen(
        [sys.executable, "-c", "input()" + TALKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    process.stderr.close()
    assert process.communicate(b"\n", timeout=60)[0] == b"done\n"


def test_lost_lines_are_counted_when_there_is_room_again(capsys, monkeypatch):
    import structlog
    from atoll_wire.process import logs

    class Full:
        full = True
        text = ""

        def write(self, text):
            if self.full:
                raise OSError(28, "No space left on device")
            self.text += text

        def flush(self):
            pass

        def isatty(self):
            return False

    file = Full()
    monkeypatch.setattr(sys, "stderr", file)
    old = structlog.get_config()
    try:
        logs.configure("info", json=True)
        structlog.get_logger().info("one")
        structlog.get_logger().info("two")
        file.full = False
        structlog.get_logger().info("three")
    finally:
        structlog.configure(**old)
    lost, three = map(json.loads, file.text.splitlines())
    assert lost["event"].startswith("2 lines of this log were lost")
    assert three["event"] == "three"


FAILS = """
import logging, sys, threading, warnings
from atoll_wire.cli.application import application, run
from atoll_wire.errors import UserError
from atoll_wire.process.settings import Logs

app = application()

@app.command()
def fails(port: int, how: str):
    Logs(log_json=True).begin()
    import grpc
    warnings.warn("an old option")
    logging.getLogger("uvicorn").warning("a slow client")
    logging.getLogger("asyncio").error("a task failed", exc_info=ValueError("inner"))
    print("a", "library", file=sys.stderr)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    try:
        with grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials()) as channel:
            channel.unary_unary("/a/b")(b"", timeout=5)
    except grpc.RpcError as error:
        logging.getLogger("caller").warning(error.details())
    raise RuntimeError("a bug") if how == "bug" else UserError("the disk is full: free space")

run(app)
"""


@pytest.mark.parametrize(("how", "last"), [("user", "the disk is full: free space"), ("bug", FATAL)])
def test_with_json_every_line_on_stderr_is_json(how, last):
    def speak_plain_text(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with listening.accept()[0] as peer:
                    peer.sendall(b"no TLS here\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=speak_plain_text, args=(listening,), daemon=True).start()
        command = [sys.executable, "-c", FAILS, str(listening.getsockname()[1]), how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        listening.shutdown(socket.SHUT_RDWR)
    assert (done.returncode, done.stdout) == (1, "")
    said = [json.loads(line) for line in done.stderr.splitlines()]
    events = [each["event"] for each in said]
    assert "UserWarning: an old option" in events[0]
    assert events[1:4] == ["a slow client", "a task failed", "a library"]
    assert "ValueError: inner" in said[2]["exception"]
    assert (events[4], said[4]["level"]) == (FATAL, "error")
    assert "ZeroDivisionError" in said[4]["exception"]
    assert "handshake" in events[5]
    assert (events[6:], said[6]["level"]) == ([last], "error")
    assert ("RuntimeError: a bug" in said[6].get("exception", "")) == (how == "bug")
