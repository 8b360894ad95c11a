"""One core, one front and four learners as processes, with a relay on each connection between them.

A process keeps its address when it restarts. Leaving the block ends all processes, each by its own pid.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.demo.processes import ATOLL, STOP_S, Child, Children, children, free_port

from tests.end_to_end.relay import Relay

STEADY, RESTARTED = ("a", "b"), ("c", "d")  # all learners, and those that restart
LEARNERS = STEADY + RESTARTED
CORE_OPTIONS = ["--fragments", "2", "--inner-steps", "16", "--snapshot-every-s", "10"]
PACE_S = 0.03  # seconds per inner step; with faster steps, no process would ever be idle on a busy machine


class SoakError(Exception):
    """A process died, or training does not continue. The message is one sentence."""


@dataclass(slots=True)
class Actor:
    """A process of the deployment. life: number of the current start, from 1."""

    name: str
    child: Child
    metrics_port: int
    life: int = 1

    @property
    def serves(self) -> bool:
        """Whether the process prints an address when it serves."""
        return self.child.process.stdout is not None

    def check(self) -> None:
        """Raises SoakError if the process has ended by itself."""
        status = self.child.process.poll()
        if status is not None:
            raise SoakError(f"{self.name} died with status {status}: {self.child.tail()}")


class Deployment:
    """All processes and relays. wan: between front and core. links: between learners and the front."""

    def __init__(self, group: Children, directory: Path, *, leaking: str = "") -> None:
        self._group, self._directory, self._leaking = group, directory, leaking
        self.actors: dict[str, Actor] = {}
        self.links: dict[str, Relay] = {}
        self.wan: Relay

    def start(self, relays: contextlib.ExitStack) -> None:
        """Starts all processes, and waits until core and front serve."""
        address = self._serving("core", [*ATOLL, "core", "--dir", str(self._directory / "run"), *CORE_OPTIONS])
        self.wan = self._relay(address, relays)
        address = self._serving("front", [*ATOLL, "front", "--core", self.wan.address])
        for name in LEARNERS:
            self.links[name] = self._relay(address, relays)
            port = free_port()
            arguments = [name, self.links[name].address, str(port), str(PACE_S)] + ["--leak"] * (name == self._leaking)
            command = [sys.executable, "-m", "tests.soak.learner", *arguments]
            self.actors[name] = Actor(name, self._group.start(name, command), port)

    def _serving(self, name: str, command: list[str]) -> str:
        """Starts a core or a front. Returns its address."""
        port, listen = free_port(), f"127.0.0.1:{free_port()}"
        command = [*command, "--listen", listen, "--metrics-listen", f"127.0.0.1:{port}"]
        self.actors[name] = Actor(name, self._group.start(name, command, piped=True), port)
        return self._group.serving(self.actors[name].child)

    def _relay(self, target: str, relays: contextlib.ExitStack) -> Relay:
        made = Relay(target)
        relays.callback(made.end)
        return made

    def restart(self, name: str, number: signal.Signals) -> None:
        """Ends a process with a signal and starts it again. Raises SoakError if SIGTERM does not end it cleanly."""
        actor = self.actors[name]
        process = actor.child.process
        process.send_signal(number)
        try:
            status = process.wait(STOP_S)
        except subprocess.TimeoutExpired as error:
            raise SoakError(f"{name} still runs {STOP_S:.0f} s after {number.name}: {actor.child.tail()}") from error
        if number is signal.SIGTERM and status != 0:
            raise SoakError(f"{name} ended with status {status} after SIGTERM: {actor.child.tail()}")
        if process.stdout is not None:
            process.stdout.close()
        child = self._group.start(name, actor.child.command, piped=actor.serves)
        self.actors[name] = Actor(name, child, actor.metrics_port, actor.life + 1)
        if actor.serves:
            self._group.serving(child)

    def check(self) -> None:
        """Raises SoakError if a process has ended by itself."""
        for actor in self.actors.values():
            actor.check()


@contextlib.contextmanager
def deployment(directory: Path, *, leaking: str = "") -> Iterator[Deployment]:
    """Context manager for a started deployment, which ends with the block.

    leaking: name of the learner that leaks a file at each reconnection; empty for none.
    """
    with contextlib.ExitStack() as relays, children(directory) as group:
        made = Deployment(group, directory, leaking=leaking)
        made.start(relays)
        yield made
