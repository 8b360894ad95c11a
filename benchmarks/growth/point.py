"""One measured point of a curve."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Point:
    """The cost of a sync (medians), or of a joining storm.

    x: the value that grows. kind: of the learners, real or synthetic. wall_s: until the last learner has finished.
    core_cpu_s: CPU seconds of all cores. other_cpu_s: CPU seconds of real learners, or of fronts. core_bytes: peak
    memory of the largest core; in a storm, how much it grew. learner_bytes: growth of a real learner's peak.
    """

    curve: str
    x: float
    kind: str
    learners: int
    parameters: float
    wall_s: float
    core_cpu_s: float
    other_cpu_s: float
    core_bytes: int
    learner_bytes: int = 0

    def at(self, x: float) -> Point:
        """Returns the point with another x."""
        return replace(self, x=x)

    def cells(self) -> list[str]:
        """Returns the point as a row of a table."""
        figures = (self.wall_s, self.core_cpu_s, self.other_cpu_s)
        memory = (self.core_bytes / 1e6, self.learner_bytes / 1e6)
        row = [self.curve, f"{self.x:g}", f"{self.learners} {self.kind}"]
        return [*row, *(f"{each:.2f}" for each in figures), *(f"{each:.0f}" for each in memory)]
