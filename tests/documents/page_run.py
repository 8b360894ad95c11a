"""Runs a page's bash fences as a reader would: in order, in one directory, with terminals for those that keep running.

A fence whose last command serves or trains until Ctrl-C keeps its terminal. The page continues when this command
reports that it runs. At the end of the page, each terminal gets Ctrl-C, and each command must exit without an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.documents.fences import Fence

LASTING = re.compile(r"atoll (core|front|dashboard|learner)\b(?!.*(--help|&))")
THERE = re.compile(r"\bserves\b|\bjoined\b|\bis at http|\bmerged\b")
WAIT_S, END_S = 300.0, 90.0


@dataclass(slots=True)
class PageRun:
    """One page being run in a directory."""

    directory: Path
    environment: Mapping[str, str]
    terminals: list[tuple[Fence, subprocess.Popen[bytes], Path]] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        for _, process, _ in self.terminals:
            signalled(process, signal.SIGKILL)
            process.wait()

    def run(self, fence: Fence) -> str:
        """Runs one fence, in its own terminal if it keeps running. Returns its output. Raises AssertionError."""
        log = self.directory / f"fence-{fence.line}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-e", "-o", "pipefail", "-c", fence.text],
                cwd=self.directory, env=dict(self.environment), stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.terminals.append((fence, process, log))
        calls = [line for line in fence.text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        if LASTING.search(calls[-1]):
            self._there(fence, process, log)
        else:
            code = process.wait(WAIT_S)
            assert code == 0, f"{fence} ended with {code}:\n{fence.text}\n{log.read_text()}"
        return log.read_text()

    def interrupt(self) -> None:
        """Sends Ctrl-C to every terminal, the newest first. Raises AssertionError if one exits with an error."""
        for fence, process, log in reversed(self.terminals):
            background = process.poll() is not None  # processes started with &, which Ctrl-C does not reach
            signalled(process, signal.SIGTERM if background else signal.SIGINT)
            code = process.wait(END_S)
            assert code in (0, 130, -signal.SIGINT), f"{fence} ended with {code}:\n{log.read_text()}"

    def _there(self, fence: Fence, process: subprocess.Popen[bytes], log: Path) -> None:
        end = time.monotonic() + WAIT_S
        while not THERE.search(log.read_text()):
            assert process.poll() in (None, 0), f"{fence} ended with {process.returncode}:\n{log.read_text()}"
            assert time.monotonic() < end, f"{fence} does not report that it runs:\n{log.read_text()}"
            time.sleep(0.1)


def signalled(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Sends a signal to all processes of a terminal, including those in the background."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
