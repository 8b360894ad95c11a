"""PURE: where one fragment stands between two versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from atoll_server.events import Cause, Key


class Phase(Enum):
    """Of one fragment."""

    IDLE = "idle"
    OPEN = "open"
    MERGING = "merging"


@dataclass(frozen=True, slots=True)
class Pending:
    """An acknowledged contribution that waits for its merge."""

    cycle: int
    base_version: int
    tokens: int
    steps: int


@dataclass(slots=True)
class FragmentRounds:
    """Where one fragment stands."""

    version: int
    cycle: int
    phase: Phase = Phase.IDLE
    opened_at: float = 0.0
    quorum_at: float | None = None
    closed_at: float | None = None
    adopters: set[str] = field(default_factory=set)  # whose work is in the newest version, and who are still to adopt
    declined: dict[str, str] = field(default_factory=dict)
    pending: dict[Key, Pending] = field(default_factory=dict)

    def decline(self, learner: str, cycle: int, reason: str) -> None:
        """A learner has nothing for the round that is open, if it means that one."""
        if self.phase is Phase.OPEN and self.cycle == cycle:
            self.declined[learner] = reason

    def answered(self) -> set[str]:
        """Learners that this round need not wait for."""
        return set(self.declined) | {key.learner for key in self.pending}

    def fresh(self) -> set[str]:
        """Learners with a contribution that answers this very round: these count to the quorum."""
        return {key.learner for key, waiting in self.pending.items() if waiting.cycle == self.cycle}


@dataclass(frozen=True, slots=True)
class Waiting:
    """A round goes on; `until` is when time alone would change that."""

    reason: str
    until: float


@dataclass(frozen=True, slots=True)
class Closing:
    """A round ends now."""

    cause: Cause
    reason: str
