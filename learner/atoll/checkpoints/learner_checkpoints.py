"""Decides when a learner saves checkpoints and which one it restores. All ranks save and restore the same
checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import structlog
import torch
import torch.distributed as dist
from atoll_wire.process.clock import Clock

from atoll.checkpoints.directory import FOUND_JSON, CheckpointDirectory, Facts, RunFacts
from atoll.checkpoints.directory_lock import DirectoryLock, unusable
from atoll.checkpoints.learner_state import LearnerState
from atoll.checkpoints.nested_state import StateError, first_line
from atoll.checkpoints.settings import CheckpointSettings
from atoll.checkpoints.staging import Staged
from atoll.errors import LearnerError
from atoll.model.parameters import Parameters
from atoll.ranks.rank_group import ALONE, SAVE, SAVING, WAIT, RankGroup
from atoll.stats import Counters

log = structlog.get_logger()

NO_DIRECTORY = "this learner saves no checkpoints: pass checkpoint_dir= to the Learner"
Run: TypeAlias = Callable[[], RunFacts]


@dataclass(slots=True)
class RunningSave:
    """A checkpoint that is being written. staged: the copied state, or the error that prevented the copy.

    ended: a future that is done when the save has succeeded or failed. staged_s: duration of the copy in seconds.
    """

    number: int
    staged: Staged | Exception
    ended: Future[Any]
    began: float
    staged_s: float


class LearnerCheckpoints:
    """The checkpoints of one learner. Rank 0 calls `lock` first, and every rank calls `release` last.

    Every rank calls `begin`, `save` and `finish` together with the others.
    """

    def __init__(self, settings: CheckpointSettings, learner: str, counters: Counters, clock: Clock) -> None:
        self._settings = settings
        self._learner = learner
        self._counters = counters
        self._clock = clock
        self._ranks: RankGroup = ALONE
        self._run: Run
        self._group: dist.ProcessGroup | None = None
        self._directory = CheckpointDirectory(settings.directory, learner)
        self._lock = DirectoryLock(self._directory.path, clock)
        self._state: LearnerState
        self._next = 1  # number of the next checkpoint, equal on all ranks
        self._steps = 0  # steps of this learner before its last restart
        self._requested = False
        self._last_at = math.inf  # time at which the last checkpoint, or training, began
        self._running: RunningSave | None = None
        self._version = version("atoll")

    def lock(self) -> None:
        """Makes the folder and takes its lock, after a short wait if another learner uses it. Only rank 0 calls this.

        Call it before the learner joins, because joining fences off another process of this name. Raises LearnerError.
        """
        self._lock.take()

    def begin(self, parameters: Parameters, ranks: RankGroup, run: Run) -> None:
        """Restores the newest readable checkpoint of this run. Call this once the parameters have the run's values.

        run: a function that returns the current run, called only on rank 0. Raises LearnerError if a user's object
        cannot load its state.
        """
        from atoll.checkpoints import storage  # noqa: F401, PLC0415 - slow to import, so not at the first save

        self._ranks, self._run = ranks, run
        if dist.is_available() and dist.is_initialized():
            # Only the background thread of a save uses this group, so its calls do not mix with those of training.
            self._group = dist.new_group(backend="gloo", timeout=WAIT)
        self._state = LearnerState(parameters, self._settings.extra, ranks.rank, ranks.size)
        told = json.loads(ranks.gathered(json.dumps(self._look() if ranks.is_leader else []).encode())[0])
        name, problem, last, found, has_locks = told
        if problem:
            raise LearnerError(problem)
        self._directory, self._next = CheckpointDirectory(self._settings.directory, name), last + 1
        if has_locks and ranks.size > 1:
            self._share_lock()
        candidates = FOUND_JSON.validate_python(found)
        if not any(self._restored(number, facts) for number, facts in candidates) and ranks.is_leader:
            log.info(
                "no checkpoint was restored: the optimizer starts as you passed it",
                learner=self._learner,
                directory=str(self._directory.path),
            )
        self._last_at = self._clock.monotonic()

    def _look(self) -> list[Any]:
        """Returns the learner's name, a problem or "", the number of the last folder, the checkpoints to try, and
        whether the folder is locked."""
        problem, last, found = "", 0, list[Any]()
        try:
            last = self._directory.last_number()  # includes incomplete folders, so that no number is used twice
            if self._lock.is_held:
                self._directory.remove_unfinished()
            found = FOUND_JSON.dump_python(self._directory.candidates(self._run()), mode="json")
            if self._lock.is_held and self._ranks.size > 1:
                self._lock.share()
        except OSError as error:
            problem = str(unusable(self._directory.path, error))
        except LearnerError as error:
            problem = str(error)
        return [self._learner, problem, last, found, self._lock.is_held]

    def _share_lock(self) -> None:
        """Takes the lock on the other ranks too, because all ranks write to the folder. Raises LearnerError on all
        ranks."""
        problem = ""
        if not self._ranks.is_leader:
            self._lock = DirectoryLock(self._directory.path, self._clock)
            try:
                self._lock.share()
            except LearnerError as error:
                problem = str(error)
        for rank, said in enumerate(self._ranks.gathered(json.dumps(problem).encode())):
            if found := json.loads(said):
                raise LearnerError(f"rank {rank}: {found}")

    def _restored(self, number: int, facts: Facts) -> bool:
        """Restores a checkpoint on all ranks. Returns whether all ranks could read it."""
        from atoll.checkpoints import storage  # noqa: PLC0415 - slow to import

        folder = self._directory.folder(number)
        problem = self._directory.damage(number, facts, self._ranks.rank, self._ranks.size)
        if self._is_a_problem(folder, problem):
            return False
        restored = None
        try:
            restored = self._state.read(storage.SavedTensors(folder), facts)
        except StateError as error:
            problem = str(error)
        except Exception as error:  # all ranks must learn of the error, or they would wait for this rank
            problem = f"it cannot be read ({type(error).__name__}: {first_line(error)})"
        if self._is_a_problem(folder, problem) or restored is None:
            return False
        self._state.apply(restored, facts)
        self._steps = facts.steps
        if self._ranks.is_leader:
            said = {"folder": str(folder), "steps": facts.steps, "generation": facts.run.generation}
            if facts.learner == self._learner:
                log.info(
                    "restored a checkpoint: the optimizer continues from its saved state",
                    learner=self._learner,
                    **said,
                )
            else:
                log.warning(
                    "restored a checkpoint of another learner: the optimizer continues from its saved state",
                    learner=self._learner,
                    saved_by=facts.learner,
                    **said,
                )
        return True

    def _is_a_problem(self, folder: Path, mine: str) -> bool:
        """Returns whether any rank has a problem with a checkpoint. Rank 0 then logs the first problem."""
        said = [json.loads(each) for each in self._ranks.gathered(json.dumps(mine).encode())]
        problems = [f"rank {rank}: {each}" if rank else each for rank, each in enumerate(said) if each]
        if problems and self._ranks.is_leader:
            self._directory.ignore(folder, problems[0])
        return bool(problems)

    def request(self) -> None:
        """Asks for a checkpoint at the next step."""
        self._requested = True

    def flags(self) -> int:
        """Returns SAVE if this rank asks for a checkpoint, SAVING while it writes one, else 0."""
        if self._running is not None:
            if not self._running.ended.done():
                return SAVING
            self._ended(self._running)
        every_s = self._settings.every_s if self._ranks.is_leader else None
        is_due = every_s is not None and self._clock.monotonic() - self._last_at >= every_s
        return SAVE if self._requested or is_due else 0

    def save(self, run_tokens: int) -> None:
        """Copies the state and begins to write it in a background thread."""
        from atoll.checkpoints import storage  # noqa: PLC0415 - slow to import

        began = self._clock.monotonic()
        number, self._next = self._next, self._next + 1
        staged: Staged | Exception
        try:
            staged = self._state.stage()
        except Exception as error:
            staged = error
        staged_s = self._clock.monotonic() - began
        ended: Future[Any]
        try:
            facts = self._facts(run_tokens) if self._ranks.is_leader else None
            ended = storage.start_save(staged, self._directory, number, facts, self._ranks.rank, self._group)
        except Exception as error:
            ended = Future()
            ended.set_exception(error)
        self._running = RunningSave(number, staged, ended, began, staged_s)
        self._last_at, self._requested = began, False

    def _facts(self, run_tokens: int) -> Facts:
        steps = self._steps + self._counters.steps
        held, saved_at = (self._state.kinds(), self._state.copies()), self._clock.wall()
        made_by = self._version, torch.__version__
        return Facts(self._run(), self._learner, self._ranks.size, run_tokens, steps, saved_at, *held, *made_by)

    def finish(self, run_tokens: int, timeout_s: float) -> None:
        """Waits up to `timeout_s` seconds for a running save and for one that was requested in the meantime."""
        end = self._clock.monotonic() + timeout_s
        self._wait(timeout_s)
        flags = [int(each) for each in self._ranks.gathered(str(self.flags()).encode())]
        if any(each & SAVE for each in flags) and not any(each & SAVING for each in flags):
            self.save(run_tokens)
            self._wait(end - self._clock.monotonic())

    def _wait(self, timeout_s: float) -> None:
        if self._running is not None:
            wait((self._running.ended,), max(0.0, timeout_s))
            if self._running.ended.done():
                self._ended(self._running)

    def end(self) -> None:
        """Warns about saves that leaving does not wait for. A running save continues until the process exits."""
        if self._running is not None and self._ranks.is_leader:
            log.warning(
                "the learner left while a checkpoint was being written: keep the process running until the write ends",
                learner=self._learner,
            )
        if self._requested:
            log.warning("the learner left before it saved the requested checkpoint", learner=self._learner)

    def close(self) -> None:
        """Destroys the saves' process group, unless a save is running. Call this after `finish` on all ranks."""
        if self._group is not None and self._running is None:
            dist.destroy_process_group(self._group)
            self._group = None

    def release(self) -> None:
        """Ends this process's use of the folder, after a running save. Repeated calls are allowed."""
        if self._running is None:
            self._lock.release()
        else:
            self._running.ended.add_done_callback(lambda _: self._lock.release())

    def _ended(self, save: RunningSave) -> None:
        """Counts a save that has ended. Rank 0 also logs it."""
        from atoll.checkpoints import storage  # noqa: PLC0415 - slow to import

        self._running = None
        if isinstance(save.staged, Staged):
            self._state.staging.returned(save.staged.tensors)
        error = save.ended.exception()
        if error is None:
            self._counters.checkpoints += 1
        else:
            self._counters.checkpoints_failed += 1
        if not self._ranks.is_leader:
            return
        if error is None:
            log.info(
                "saved a checkpoint",
                learner=self._learner,
                folder=str(self._directory.folder(save.number)),
                staged_s=round(save.staged_s, 3),
                took_s=round(self._clock.monotonic() - save.began, 3),
            )
            return
        self._directory.discard(save.number)
        log.warning(
            "could not save a checkpoint: training continues",
            learner=self._learner,
            directory=str(self._directory.path),
            error=storage.cause(error),
        )
