"""Runs a page's fences as a reader would: in order, in one directory, with terminals for lasting commands.

The text before a fence may name its terminal ("Terminal 2 runs a learner"), and may say "press Ctrl-C in terminal 1".
If the last command of a fence serves or trains until Ctrl-C, it keeps the terminal. The page continues when this
command reports that it is running. At the end of the page, each terminal gets Ctrl-C, and no command may fail.

`python -m tests.documents.page_run PAGE COPY` runs a page in a copy of this checkout. It must run in its own network
and mount namespace: the pages' ports are then free, and their host names lead to this machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.documents.fences import ROOT, Fence, fences
from tests.documents.installed import PACKAGES

LASTING = re.compile(r"atoll (core|front|dashboard|learner)\b(?!.*(--help|&))")
THERE = re.compile(r"^atoll \w+ listens on |standby: this core takes over|\bjoined\b", re.MULTILINE)
STOP = re.compile(r"[Pp]ress\s+Ctrl-C\s+in\s+terminals?\s+(\d)(?:\s+(?:to|and)\s+(\d))?")
TERMINAL = re.compile(r"\b[Tt]erminal\s+(\d)\b")
WAIT_S, END_S = 900.0, 120.0  # the demo takes four minutes on two idle CPUs
PLACE = Path("/mnt")  # fixed path of a page's checkout, so that pages share compiled kernels
HOSTS = "127.0.0.1 localhost core.example.com front.eu.example.com\n"
PIP = 'pip() { python3 -m tests.documents.installed "$@"; }\n'  # the installed packages replace the download
PRINTS = {  # a page -> a pattern that its commands must print
    "README.md": r"^[1-9]\d+ contributions merged$",
    "docs/start.md": r" [1-9]\d+ contributions merged$",
}
BEFORE = {  # a page about an existing run -> the page whose first fence starts this run
    "docs/operate/runbooks.md": "docs/operate/monitoring.md",
}


@dataclass(slots=True)
class Terminal:
    """A running fence, and its output so far."""

    fence: Fence
    process: subprocess.Popen[str]
    output: list[str] = field(default_factory=list)
    closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def read(self) -> None:
        """Collects the output until all processes have closed their pipes. Runs in a thread."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.changed:
                self.output.append(line)
                self.changed.notify_all()
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def text(self) -> str:
        return "".join(self.output)

    def reports(self) -> bool:
        """Waits until the command reports that it is running. Returns False if it ends or takes too long."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or THERE.search(self.text()), WAIT_S)
            return THERE.search(self.text()) is not None

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all processes of the terminal, including those in the background."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def interrupt(self) -> None:
        """Presses Ctrl-C. Raises AssertionError if the command exits with an error."""
        background = self.process.poll() is not None  # only processes started with & are left
        self.signal(signal.SIGTERM if background else signal.SIGINT)
        code = self.process.wait(END_S)
        assert code in (0, 130, -signal.SIGINT), f"{self.fence} ended with {code}:\n{self.text()}"


@dataclass(slots=True)
class PageRun:
    """A page that runs in a directory."""

    directory: Path
    environment: Mapping[str, str]
    terminals: list[Terminal] = field(default_factory=list)
    numbered: dict[str, Terminal] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        for terminal in self.terminals:
            print(f"{terminal.fence}:\n{terminal.text()}", file=sys.stderr, flush=True)
            terminal.signal(signal.SIGKILL)
            terminal.process.wait()

    def page(self, page: Sequence[Fence]) -> None:
        """Runs a page's fences, and saves files under their titles. Raises AssertionError if a command fails."""
        for fence in page:
            if fence.title:
                (self.directory / fence.title).write_text(fence.text)
            elif fence.language in {"bash", "python"} and not fence.reason:
                self.run(fence)
        for terminal in reversed(self.terminals):
            terminal.interrupt()

    def run(self, fence: Fence, whole: bool = False) -> str:
        """Runs one fence, in its own terminal if the fence keeps running. Returns the output. Raises AssertionError.

        whole: whether to run commands that not_run.py names, too.
        """
        self._make_room(fence)
        words = fence.text if whole else fence.script
        command = ["bash", "-e", "-c", PIP + words]
        if fence.language == "python":
            script = self.directory / f"fence_{fence.line}.py"
            script.write_text(fence.text)
            command = ["python", str(script)]
        process = subprocess.Popen(
            command, cwd=self.directory, env=dict(self.environment), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        print(f"{fence} runs", file=sys.stderr, flush=True)
        terminal = Terminal(fence, process)
        threading.Thread(target=terminal.read, daemon=True).start()
        self.terminals.append(terminal)
        if fence.language == "bash" and keeps_running(words):
            number = terminal_of(fence)
            if number:
                self.numbered[number] = terminal
            assert terminal.reports(), f"{fence} does not report that it is running:\n{terminal.text()}"
        else:
            code = process.wait(WAIT_S)
            assert code == 0, f"{fence} ended with {code}:\n{fence.text}\n{terminal.text()}"
        return terminal.text()

    def _make_room(self, fence: Fence) -> None:
        """Presses Ctrl-C in the terminals that the text names, and waits until the fence's terminal is free."""
        for found in STOP.finditer(fence.before):
            for number in range(int(found[1]), int(found[2] or found[1]) + 1):
                self.numbered.pop(str(number)).interrupt()
        busy = self.numbered.get(terminal_of(fence))
        if busy is not None:
            code = busy.process.wait(WAIT_S)
            assert code == 0, f"{busy.fence} ended with {code}:\n{busy.text()}"


def keeps_running(script: str) -> bool:
    """Returns whether the script's last command serves or trains until Ctrl-C."""
    lines = script.replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return LASTING.search(commands[-1]) is not None


def terminal_of(fence: Fence) -> str:
    """Returns the number of the terminal that the text before the fence names last, or an empty string."""
    named = TERMINAL.findall(STOP.sub("", fence.before))
    return named[-1] if named else ""


def prepared(directory: Path) -> dict[str, str]:
    """Returns a reader's environment variables in a copy of the checkout, which run the copy's code."""
    code = [str(directory / part) for part in ("learner", "server", "proto", "dashboard", "forecast")]
    path = f"{directory / 'venv/bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    left_out = ("ATOLL_", "PYTHON", "MAKE", "ARGS")  # a `make test-slow ARGS=...` passes the last two on
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    packages = {PACKAGES: sysconfig.get_path("purelib"), "PYTHONPATH": ":".join(code)}
    config = {"XDG_CONFIG_HOME": str(directory / "config")}  # contexts
    kernels = {"NUMBA_CACHE_DIR": str(ROOT / "build/page-kernels")}
    return kept | packages | kernels | config | {"PATH": path, "PYTHONUNBUFFERED": "1"}


def installed(directory: Path, environment: Mapping[str, str]) -> None:
    """Makes the virtual environment that `make` would install, from the packages of the current one."""
    python = directory / ".venv/bin/python"
    subprocess.run(["python3", "-m", "venv", "--without-pip", ".venv"], cwd=directory, env=environment, check=True)
    stand_in = [str(python), "-m", "tests.documents.installed", "install", "."]
    subprocess.run(stand_in, cwd=directory, env=environment, check=True)
    (directory / ".venv/.ready").touch()


def main(page: str, directory: Path) -> None:
    """Runs a page in a copy of the checkout. Raises AssertionError if a command fails."""
    (directory / "hosts").write_text(HOSTS)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["mount", "--bind", directory / "hosts", "/etc/hosts"], check=True)
    subprocess.run(["mount", "--bind", directory, PLACE], check=True)
    environment = prepared(PLACE)
    here = list(fences(ROOT / page))
    if any("make " in fence.text for fence in here if fence.language == "bash" and not fence.reason):
        installed(PLACE, environment)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with PageRun(PLACE, environment) as run:
        if page in BEFORE:
            run.run(next(fence for fence in fences(ROOT / BEFORE[page]) if fence.language == "bash"))
        run.page(here)
        printed = "\n".join(terminal.text() for terminal in run.terminals)
        wanted = PRINTS.get(page, "")
        assert re.search(wanted, printed, re.MULTILINE), f"the commands of {page} printed nothing that matches {wanted}"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
