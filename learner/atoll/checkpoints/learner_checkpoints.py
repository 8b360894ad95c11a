"""When a learner saves checkpoints, and which one it restores. All ranks save and restore the same."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
from atoll_wire.process.clock import Clock

from atoll.boundary.parameters import Parameters
from atoll.boundary.ranks import SAVE, SAVING
from atoll.checkpoints.directory import CheckpointDirectory, Facts, RunFacts
from atoll.checkpoints.learner_state import HasState, LearnerState
from atoll.checkpoints.staging import Staged
from atoll.errors import LearnerError
from atoll.stats import Counters

log = structlog.get_logger()

NO_DIRECTORY = "this learner saves no checkpoints: pass checkpoint_dir= to the Learner"


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Where and when a learner saves. every_s: None saves only on request. extra: see Learner's `extra_state`.

    Raises LearnerError for values that cannot work.
    """

    directory: Path | None
    every_s: float | None
    extra: Mapping[str, HasState]

    def __post_init__(self) -> None:
        if self.every_s is not None and not self.every_s > 0:
            raise LearnerError(f"checkpoint_every_s={self.every_s} is not positive: use None to save only on request")
        if self.extra and self.directory is None:
            raise LearnerError("extra_state is saved only in checkpoints: pass checkpoint_dir= too")
        for name, each in self.extra.items():
            if not callable(getattr(each, "state_dict", None)) or not callable(getattr(each, "load_state_dict", None)):
                raise LearnerError(
                    f'extra_state["{name}"] is a {type(each).__name__} without state_dict() and load_state_dict(): '
                    "wrap it in an object with both methods"
                )


class LearnerCheckpoints:
    """The checkpoints of one learner. Every rank calls `begin`, `save` and `end` together with the others."""

    def __init__(self, settings: CheckpointSettings, learner: str, counters: Counters, clock: Clock) -> None:
        assert settings.directory is not None, "settings for a learner that saves"
        self._settings, self._root = settings, settings.directory
        self._learner = learner
        self._counters = counters
        self._clock = clock
        self._group: dist.ProcessGroup | None = None
        self._is_leader = True
        self._directory = CheckpointDirectory(self._root, learner)
        self._state: LearnerState
        self._next = 1  # number of the next checkpoint, equal on all ranks
        self._steps = 0  # steps of this learner before its last restart
        self._requested = False
        self._last_at = 0.0
        self._running: Future[Any] | None = None
        self._began = 0.0
        self._version = version("atoll")

    def begin(self, parameters: Parameters, run: RunFacts | None) -> None:
        """Restores the newest checkpoint of this run that can be read. Call after the parameters are the run's.

        run: None except on rank 0, which decides. Raises LearnerError if a user's object cannot load its state.
        """
        from atoll.checkpoints import storage  # noqa: F401, PLC0415 - slow to import, so not at the first save

        rank, ranks = 0, 1
        if dist.is_available() and dist.is_initialized():
            rank, ranks = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo")  # collectives of saves run in another thread
        self._is_leader = rank == 0
        self._state = LearnerState(parameters, self._settings.extra, rank, ranks)
        told = [(self._learner, *self._look(run))]
        if self._group is not None:
            dist.broadcast_object_list(told, src=0, group=self._group)
        name, problem, last, found = told[0]
        if problem:
            raise LearnerError(problem)
        self._directory, self._next = CheckpointDirectory(self._root, name), last + 1
        if not any(self._restored(number, facts) for number, facts in found) and self._is_leader:
            log.info(
                "no checkpoint was restored: the optimizer starts as it was passed",
                learner=self._learner,
                directory=str(self._directory.path),
            )
        self._last_at = self._clock.monotonic()

    def _look(self, run: RunFacts | None) -> tuple[str, int, list[tuple[int, Facts]]]:
        """Returns (problem, number of the last folder, checkpoints to try). Only rank 0 looks."""
        if run is None:
            return "", 0, []
        try:
            self._directory.path.mkdir(parents=True, exist_ok=True)
            return "", self._directory.last_number(), self._directory.candidates(run)
        except OSError as error:
            place = self._directory.path
            return f"checkpoint_dir: {place} cannot be used ({error.strerror}): give a directory that can", 0, []

    def _restored(self, number: int, facts: Facts) -> bool:
        """Restores a checkpoint on all ranks. Returns whether all could read it."""
        from atoll.checkpoints import storage  # noqa: PLC0415 - slow to import

        folder = self._directory.folder(number)

        def agree(problem: str) -> bool:
            if problem:
                self._directory.ignore(folder, problem)
            return self._all(not problem)

        if not agree(self._directory.damage(number, facts) if self._is_leader else ""):
            return False
        tensors = storage.read(folder, self._group, agree)
        if tensors is None or not agree(self._state.fits(tensors)):
            return False
        self._state.apply(tensors, facts)
        self._steps = facts.steps
        if self._is_leader:
            log.info(
                "restored a checkpoint: the optimizer continues",
                learner=self._learner,
                folder=str(folder),
                steps=facts.steps,
                generation=facts.run.generation,
            )
        return True

    def _all(self, mine: bool) -> bool:
        """Returns whether all ranks pass True."""
        if self._group is None:
            return mine
        votes = torch.tensor([int(not mine)])
        dist.all_reduce(votes, group=self._group)
        return not int(votes)

    def request(self) -> None:
        """Asks for a checkpoint at the next step."""
        self._requested = True

    def vote(self) -> int:
        """Returns this rank's vote on saving at this step: SAVE, SAVING while an earlier save runs, or 0."""
        if self._running is not None:
            if not self._running.done():
                return SAVING
            self._ended(self._running)
        every_s = self._settings.every_s if self._is_leader else None
        is_due = every_s is not None and self._clock.monotonic() - self._last_at >= every_s
        return SAVE if self._requested or is_due else 0

    def save(self, run: RunFacts | None, run_tokens: int) -> None:
        """Copies the state, and begins to write it in a background thread. run: None except on rank 0."""
        from atoll.checkpoints import storage  # noqa: PLC0415 - slow to import

        self._began = self._last_at = self._clock.monotonic()
        self._next += 1
        staged: Staged | Exception
        try:
            staged = self._state.stage()
        except Exception as error:
            staged = error
        facts = None if run is None else self._facts(run, run_tokens)
        try:
            self._running = storage.start_save(staged, self._directory, self._next - 1, facts, self._group)
        except Exception as error:
            self._running = Future()
            self._running.set_exception(error)
        self._requested = False

    def _facts(self, run: RunFacts, run_tokens: int) -> Facts:
        ranks = dist.get_world_size(self._group) if self._group is not None else 1
        steps = self._steps + self._counters.steps
        copies, saved_at = self._state.copies(), self._clock.wall()
        return Facts(run, self._learner, ranks, run_tokens, steps, saved_at, copies, self._version, torch.__version__)

    def end(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` seconds for a running save. A longer save continues until the process exits."""
        if self._running is None:
            return
        wait((self._running,), timeout_s)
        if self._running.done():
            self._ended(self._running)
        elif self._is_leader:
            log.warning("a checkpoint is still being written after the learner left", learner=self._learner)

    def _ended(self, save: Future[Any]) -> None:
        """Counts a save that has ended, and logs it on rank 0."""
        from atoll.checkpoints import storage  # noqa: PLC0415 - slow to import

        number, self._running = self._next - 1, None
        error = save.exception()
        if error is None:
            self._counters.checkpoints += 1
        else:
            self._counters.checkpoints_failed += 1
        if not self._is_leader:
            return
        if error is None:
            took_s = round(self._clock.monotonic() - self._began, 3)
            folder = str(self._directory.folder(number))
            log.info("saved a checkpoint", learner=self._learner, folder=folder, took_s=took_s)
            return
        self._directory.discard(number)
        log.warning(
            "could not save a checkpoint: training continues",
            learner=self._learner,
            directory=str(self._directory.path),
            error=storage.cause(error),
        )
