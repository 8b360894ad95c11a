"""A core that opens the rounds of all fragments at the same time, on request.

python -m benchmarks.data_plane.sync_core FOLDER ...

Sync K begins when the file `go.K` exists in FOLDER, and no round closes while a file `hold` exists. The other
arguments are those of `atoll core`. Everything else is the real core.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from atoll import cli
from atoll_server.rounds.liveness import LiveLearners
from atoll_server.rounds.round_state import Phase
from atoll_server.rounds.syncer import Syncer
from atoll_server.rounds.syncer_events import Effect
from atoll_server.shard import shard

folder = Path(sys.argv.pop(1))


class AtOnce(Syncer):
    """A syncer that opens all rounds of a sync at the same time."""

    _syncs = 0
    _held = (-1.0, False)  # time of an event, and whether the benchmark then held all merges
    _wanted: Mapping[int, int] = {}  # by fragment: its version after the sync

    def present(self, now: float) -> LiveLearners:
        """Counts all learners as live, so that rounds wait for all learners even if a busy machine delays reports."""
        return replace(super().present(now), live=frozenset(self.liveness))

    def _next_open_at(self, present: LiveLearners) -> float:
        idle = all(rounds.phase is Phase.IDLE for rounds in self.fragments.values())
        return present.now + (0.005 if idle else 0.1)

    def _open_what_is_due(self, present: LiveLearners) -> list[Effect]:
        if present.fastest_step_s is None:
            return []
        if (folder / f"go.{self._syncs}").exists():
            self._syncs += 1
            self._wanted = {index: rounds.version + 1 for index, rounds in self.fragments.items()}
        behind = [
            index
            for index, wanted in self._wanted.items()
            if self.fragments[index].phase is Phase.IDLE and self.fragments[index].version < wanted
        ]
        return [self._open(index, present.now) for index in behind]

    def _close_if_possible(self, index: int, present: LiveLearners) -> list[Effect]:
        if self._held[0] != present.now:  # once per event, since looking at all fragments would take as long as merging
            self._held = present.now, (folder / "hold").exists()
        return [] if self._held[1] else super()._close_if_possible(index, present)

    def _in_flight(self) -> int:
        return 0

    def _deadline(self, _fragment: int, _missing: Sequence[str], now: float) -> float:
        return now + 60.0


shard.Syncer = AtOnce  # type: ignore[attr-defined]
if __name__ == "__main__":
    cli.main()
