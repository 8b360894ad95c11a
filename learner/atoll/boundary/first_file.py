"""The initial parameters of a run as a file, written by the training threads of all ranks together.

The agent of rank 0 asks for the file while the training threads wait to enter. No rank needs the whole model in memory:
tensors are collected and written one after another.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from pathlib import Path

from atoll.boundary.parameters import Parameters
from atoll.errors import LearnerError
from atoll.ranks.rank_group import RankGroup

PIECE_S = 0.5


class FirstFile:
    """Writes the file on rank 0 when the agent asks for it."""

    def __init__(self, parameters: Parameters, ranks: RankGroup) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._asked: tuple[Path, Future[None]] | None = None
        self._ended = False

    def write(self, path: Path) -> None:
        """Waits until the training threads have written the file. Called by rank 0's agent, on a worker thread."""
        done: Future[None] = Future()
        self._asked = path, done
        while not self._ended and not done.done():
            wait((done,), PIECE_S)
        if not done.done():
            raise LearnerError("the learner stopped while it joined")
        done.result()

    @property
    def wanted(self) -> bool:
        """Whether the agent of this rank waits for the file."""
        return self._asked is not None

    def write_together(self) -> None:
        """Writes the file. All ranks call this together."""
        asked, self._asked = self._asked, None
        if asked is None:
            self._parameters.save(None)
            return
        path, done = asked
        try:
            self._parameters.save(path)
        except OSError as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def end(self) -> None:
        """Ends `write`, because the training threads no longer wait."""
        self._ended = True
