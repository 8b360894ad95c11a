"""Child processes of `atoll demo` and `atoll chaos`: starts them, writes their logs to files, and ends them."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll_wire.errors import UserError

ATOLL = [sys.executable, "-m", "atoll.cli"]
SERVING = re.compile(r"atoll (?:core|front|relay|dashboard) listens on (\S+)")
START_S, STOP_S = 120.0, 40.0


class DemoError(UserError):
    """A child process failed. The message is one line with the last line of the process's log, or with the log's
    path."""


@dataclass(slots=True)
class Child:
    """A child process and the command with which to restart it."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Sends SIGKILL and waits until the process has ended. The process neither leaves the run nor flushes files."""
        self.process.kill()
        self.process.wait()

    def tail(self) -> str:
        """Returns the last line of the process's log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"


class Children:
    """All child processes, by name. directory: where the processes' logs are written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._all: dict[str, Child] = {}
        self._starting = False
        self._interrupted = False  # a signal arrived while a child was being started
        self._ending = False

    def start(self, name: str, command: list[str], *, piped: bool = False) -> Child:
        """Starts a command. A name can be reused after its process has ended. piped: whether stdout is a pipe, which is
        not logged."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{name}.log"
        environment = dict(os.environ, PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1")
        self._starting = True
        try:
            with path.open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if piped else log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            child = self._all[name] = Child(name, command, path, process)
        except OSError as error:
            raise DemoError(f"{name} cannot be started ({command[0]}: {error.strerror}): check the command") from error
        finally:
            self._starting = False
            if self._interrupted:
                signal.raise_signal(signal.SIGINT)
        return child

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt.

        While a child is being started, the exception is delayed. Otherwise, the child would outlive this process. For
        the same reason, only the first signal raises the exception.
        """
        if self._starting:
            self._interrupted = True
        elif not self._ending:
            self._ending = True
            raise KeyboardInterrupt

    def start_core(self, directory: Path, listen: str, options: list[str]) -> tuple[Child, str]:
        """Starts a core and waits until it serves. Returns the process and its address."""
        child = self.launch_core("core", directory, listen, options)
        return child, self.serving(child)

    def start_front(self, name: str, listen: str, core: str, options: Sequence[str] = ()) -> tuple[Child, str]:
        """Starts a front and waits until it serves. Returns the process and its address."""
        child = self.start(name, [*ATOLL, "front", "--listen", listen, "--core", core, *options], piped=True)
        return child, self.serving(child)

    def start_dashboard(self, listen: str, server: str, options: Sequence[str] = ()) -> tuple[Child, str]:
        """Starts a dashboard and waits until it serves. Returns the process and its URL."""
        command = [*ATOLL, "dashboard", "--listen", listen, "--server", server, *options]
        child = self.start("dashboard", command, piped=True)
        return child, self.serving(child)

    def launch_core(self, name: str, directory: Path, listen: str, options: list[str]) -> Child:
        """Starts a core without waiting until it serves."""
        return self.start(name, [*ATOLL, "core", "--dir", str(directory), "--listen", listen, *options], piped=True)

    def serving(self, child: Child) -> str:
        """Waits until a core, front, relay or dashboard serves. Returns its address. Raises DemoError if it fails."""
        stream, deadline = child.process.stdout, time.monotonic() + START_S
        assert stream is not None, "the child was started with piped=True"
        while time.monotonic() < deadline:
            ready, _, _ = select.select([stream], [], [], 0.2)
            line = stream.readline().decode() if ready else ""
            if found := SERVING.match(line):
                return found[1]
            if child.process.poll() is not None:
                raise DemoError(f"{child.name} exited with status {child.process.returncode}: {child.tail()}")
        raise DemoError(f"{child.name} did not start within {START_S:.0f} s: {child.tail()}")

    def stop(self, child: Child) -> None:
        """Sends SIGTERM and waits. Sends SIGKILL after STOP_S seconds."""
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)
            try:
                child.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
        if child.process.stdout is not None:
            child.process.stdout.close()

    def end(self) -> None:
        """Kills every child that still runs."""
        self._ending = True
        for child in self._all.values():
            if child.process.poll() is None:
                child.kill()
            if child.process.stdout is not None:
                child.process.stdout.close()


@contextlib.contextmanager
def children(directory: Path) -> Iterator[Children]:
    """Context manager for a group of child processes, which are killed when the block ends.

    SIGTERM ends the block as Ctrl-C does.

    The context sets the handlers of SIGTERM and SIGINT, because a process that a script starts in the background
    ignores SIGINT.
    """
    group = Children(directory)
    before = {number: signal.signal(number, lambda *_: group.interrupt()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield group
    finally:
        group.end()
        for number, action in before.items():
            signal.signal(number, action)


def free_port() -> int:
    """Returns a port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
