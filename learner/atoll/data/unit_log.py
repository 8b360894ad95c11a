"""PURE: the inner step that finished each leased unit. Contributions name the units that their steps finished."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class LeaseLog:
    """The units of one lease. Training follows the order of their ordinals.

    lag: number of steps between handing out a sample and training on it. handed: number of units whose last sample was
    handed out. recent: the value of `handed` at each of the last `lag` steps. forgotten: number of finished units
    without a step in `steps`. steps: the step that finished each later unit, ascending.
    """

    lag: int
    handed: int = 0
    recent: deque[int] = field(default_factory=deque)
    forgotten: int = 0
    steps: list[int] = field(default_factory=list)

    @property
    def finished(self) -> int:
        """The number of finished units."""
        return self.forgotten + len(self.steps)

    def through(self, step: int) -> int:
        """Returns the number of units that were finished by the end of a step."""
        return self.forgotten + bisect_right(self.steps, step)


class UnitLog:
    """The log of one process. Only its training thread changes it. Steps are counted from the start of the process."""

    def __init__(self) -> None:
        self._leases: dict[int, LeaseLog] = {}
        self._closed: set[int] = set()
        self._step = 0  # the newest step

    def open(self, lease: int, lag: int) -> LeaseLog:
        """Adds a lease and returns its log."""
        log = self._leases[lease] = LeaseLog(lag)
        return log

    def close(self, lease: int) -> None:
        """Records that a lease has ended. `forget` drops the lease when no contribution can contain its units."""
        self._closed.add(lease)

    def stepped(self, step: int) -> None:
        """Records that an inner step has trained on the samples that were handed out `lag` steps earlier.

        step: the number of the step, from 1.
        """
        self._step = step
        for log in self._leases.values():
            log.recent.append(log.handed)
            if len(log.recent) > log.lag:
                log.steps.extend([step] * (log.recent.popleft() - log.finished))

    def settle(self) -> None:
        """Records that all handed-out samples have been trained on, because the training loop has none left."""
        for log in self._leases.values():
            log.steps.extend([self._step] * (log.handed - log.finished))

    def ranges(self, after: int, upto: int) -> tuple[tuple[int, int, int], ...]:
        """Returns the units that steps `after` + 1 to `upto` finished, as (lease, after, upto) for each lease.

        The range of a lease may be empty. It then tells the core that the work on earlier units is merged or dropped.
        """
        return tuple((lease, log.through(after), log.through(upto)) for lease, log in self._leases.items())

    def forget(self, step: int) -> None:
        """Forgets the steps of units finished up to a step, because later contributions begin after that step."""
        for lease, log in list(self._leases.items()):
            if (done := bisect_right(log.steps, step)) > 0:
                del log.steps[:done]
                log.forgotten += done
            if lease in self._closed and not log.steps:
                del self._leases[lease]
                self._closed.discard(lease)
