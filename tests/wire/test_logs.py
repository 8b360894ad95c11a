"""A log that cannot be written loses only its lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    assert file.text.startswith("2 lines of this log were lost")
    assert "three" in file.text
