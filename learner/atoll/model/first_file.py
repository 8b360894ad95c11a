"""Writes a run's initial parameters to a file. The training threads of all ranks do this together.

Rank 0's agent requests the file while the training threads wait for the first anchors. The ranks collect and write one
tensor at a time, so that no rank needs the whole model in memory.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from pathlib import Path

from atoll.errors import LearnerError
from atoll.model.parameters import Parameters
from atoll.ranks.rank_group import RankGroup

PIECE_S = 0.5  # seconds between checks of whether the learner has stopped


class FirstFile:
    """Passes the request for the file from the agent to the training threads."""

    def __init__(self, parameters: Parameters, ranks: RankGroup, *, frozen: bool = False) -> None:
        """frozen: whether the file also holds the frozen parameters."""
        self._parameters = parameters
        self._ranks = ranks
        self._frozen = frozen
        self._asked: tuple[Path, Future[None]] | None = None
        self._ended = False

    def write(self, path: Path) -> None:
        """Waits until the training threads have written the file. Rank 0's agent calls this on a worker thread.

        Raises OSError if the file cannot be written, and LearnerError if the learner stops.
        """
        done: Future[None] = Future()
        self._asked = path, done
        while not self._ended and not done.done():
            wait((done,), PIECE_S)
        if not done.done():
            raise LearnerError("the learner stopped while it was joining: restart it")
        done.result()

    @property
    def wanted(self) -> bool:
        """Whether this rank's agent is waiting for the file."""
        return self._asked is not None

    def write_together(self) -> None:
        """Writes the file on the rank whose agent requested it. All ranks call this together."""
        asked, self._asked = self._asked, None
        if asked is None:
            self._parameters.save(None, frozen=self._frozen)
            return
        path, done = asked
        try:
            self._parameters.save(path, frozen=self._frozen)
        except OSError as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def end(self) -> None:
        """Makes `write` raise LearnerError, because the training threads will not write the file."""
        self._ended = True
