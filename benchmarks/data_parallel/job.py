"""The parent of a synchronous job: starts its ranks, kills one when a failure is due, and restarts all of them.

The parent always ends its children by pid before it exits. It does not import torch, so that all CPUs serve the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from atoll_wire.errors import UserError
from rich.console import Console

from benchmarks.data_parallel.time_accounts import History, Kill, Life, balance, decode

POLL_S = 0.02
SAY_EVERY_S = 10.0
SILENCE_S = 180.0  # if no rank has written a record for this long, the job is stuck
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class JobError(UserError):
    """A rank ended by itself, or no rank makes progress. The message is one line, with the last line of a log."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The options of the command line; see `python -m benchmarks.data_parallel --help`.

    seconds, tokens: None for no limit.
    """

    ranks: int
    seconds: float | None
    tokens: int | None
    seed: int
    checkpoint_steps: int
    preset: str


@dataclass(slots=True)
class Rank:
    """A rank's process, with its record file, its log, the number of record bytes that were read, and its account."""

    number: int
    process: subprocess.Popen[bytes]
    records: Path
    log: Path
    life: Life
    read_bytes: int = 0

    def catch_up(self) -> None:
        """Reads new records. Leaves an incomplete line for the next call."""
        with contextlib.suppress(FileNotFoundError), self.records.open("rb") as file:
            file.seek(self.read_bytes)
            for line in file:
                if line.endswith(b"\n"):
                    self.read_bytes += len(line)
                    self.life.take(decode(line))

    def end(self) -> None:
        """Kills the process, unless it has already ended."""
        self.process.kill()
        self.process.wait()
        self.life.died_s = self.life.died_s or time.monotonic()
        if self.process.stdin is not None:
            self.process.stdin.close()


class Job:
    """Starts all ranks, and restarts them after each failure, until the limit on seconds or tokens."""

    def __init__(self, settings: JobSettings, directory: Path, kills: Iterator[Kill], console: Console) -> None:
        self._settings = settings
        self._directory = directory
        self._kills = kills
        self._console = console
        self._asked = directory / "stop-asked"
        self._ranks: list[Rank] = []
        self._next_kill = next(kills, None)
        self._said_s = 0.0
        self.history = History(settings.ranks)

    def run(self) -> float:
        """Runs the job, and ends all ranks. Returns the time when the last step ended, in monotonic seconds."""
        with interruptible():
            try:
                while (end_s := self._one_start()) is None:
                    pass
                return end_s
            finally:
                self._end_all()

    def _one_start(self) -> float | None:
        """Runs all ranks until a failure or the end of the job. Returns None after a failure, even during a restart."""
        self._start_all()
        while True:
            time.sleep(POLL_S)
            for rank in self._ranks:
                rank.catch_up()
            self._begin_clock()
            self._say()
            codes = [rank.process.poll() for rank in self._ranks]
            if all(code == 0 for code in codes):
                self._end_all()
                return max(rank.life.last_work_s for rank in self._ranks)
            self._check(codes)
            if self.history.began_s is None:
                continue
            now = time.monotonic()
            passed_s, due = now - self.history.began_s, self._next_kill
            if self._settings.seconds is not None and passed_s >= self._settings.seconds:
                if not self._ask_to_stop():
                    return now  # the ranks have taken no step since this start, so the result is the last checkpoint
            elif due is not None and passed_s >= due.at_s and 0 not in codes:  # 0: a rank ended after the last step
                self._fail(due)
                return None

    def _start_all(self) -> None:
        start, settings = len(self.history.lives), self._settings
        self._ranks = []
        self.history.lives.append([])
        environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=LOOPBACK)
        for number in range(settings.ranks):
            records, log = (self._directory / f"{start:04}-{number}.{kind}" for kind in ("records", "log"))
            command = [
                *(sys.executable, "-m", "benchmarks.data_parallel.rank", "--dir", str(self._directory)),
                *("--stop-asked", str(self._asked), "--records", str(records)),
                *("--meeting", str(self._directory / f"{start:04}.meeting"), "--rank", str(number)),
                *("--ranks", str(settings.ranks), "--preset", settings.preset, "--seed", str(settings.seed)),
                *("--tokens", str(settings.tokens or 0), "--checkpoint-steps", str(settings.checkpoint_steps)),
            ]
            life = Life(time.monotonic())
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
            self._ranks.append(Rank(number, process, records, log, life))
            self.history.lives[-1].append(life)

    def _begin_clock(self) -> None:
        prepared = [rank.life.prepared_s for rank in self._ranks]
        if self.history.began_s is None and None not in prepared:
            self.history.began_s = self._said_s = max(at_s for at_s in prepared if at_s is not None)

    def _check(self, codes: list[int | None]) -> None:
        """Raises JobError for a rank that ended by itself, which is a defect and not a measured failure."""
        for rank, code in zip(self._ranks, codes, strict=True):
            if code not in {None, 0}:
                lines = rank.log.read_text(errors="replace").strip().splitlines()
                raise JobError(f"rank {rank.number} ended with status {code}: {lines[-1] if lines else 'empty log'}")
        heard = max(rank.life.last_seen_age_s for rank in self._ranks)
        if time.monotonic() - heard > SILENCE_S:
            raise JobError(f"no rank has reported progress for {SILENCE_S:.0f} s: use a smaller --preset")

    def _ask_to_stop(self) -> bool:
        """Asks the ranks to end after the current step.

        Returns False if there is no step, because the ranks have not met yet.
        """
        if any(rank.life.joined_s is None for rank in self._ranks):
            return False
        self._asked.touch()
        return True

    def _fail(self, kill: Kill) -> None:
        at_s = self._passed_s()
        self._ranks[kill.rank].end()
        self._end_all()
        self.history.kills.append(Kill(at_s, kill.rank))
        self._note(f"SIGKILL to rank {kill.rank}: all {len(self._ranks)} ranks restart")
        self._next_kill = next(self._kills, None)

    def _end_all(self) -> None:
        """Kills all ranks, then waits until they have ended. A surviving rank would only wait for the other ranks."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.end()
            rank.catch_up()

    def _say(self) -> None:
        now = time.monotonic()
        if self.history.began_s is None or now - self._said_s < SAY_EVERY_S:
            return
        self._said_s = now
        steps = [life.steps[-1] for life in self.history.lives[-1] if life.steps]
        if not steps:
            self._note("all ranks are starting")
            return
        last = max(steps, key=lambda step: step.step)
        so_far = balance(self.history, now, last.step + 1)
        self._note(
            f"step {last.step + 1:,}  loss {last.loss:.3f}  {so_far.tokens_kept / 1e6:.2f}M tokens in the model  "
            f"{len(self.history.kills)} kills  goodput {so_far.goodput:.3f}"
        )

    def _note(self, text: str) -> None:
        line = f"[{self._passed_s():5.0f} s] {text}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _passed_s(self) -> float:
        assert self.history.began_s is not None, "the clock runs"
        return time.monotonic() - self.history.began_s


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context manager in which SIGTERM raises KeyboardInterrupt. A second signal cannot interrupt the cleanup.

    The handler of SIGINT is set, too, because a process that a script starts in the background ignores SIGINT.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)
