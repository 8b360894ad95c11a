"""What `atoll demo` kills or cuts, when, and how often it has done so."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

from atoll.demo.cores import Cores, LocalFront
from atoll.demo.display import Progress
from atoll.demo.processes import Child, Children
from atoll.demo.regions import Regions
from atoll.demo.settings import DemoSettings

CUT_S = 10.0


class Victim(Enum):
    """Something to kill or cut. The value is its name in the summary."""

    FRONT = "front"
    LEARNER = "learner"
    LINK = "link"
    SHARD = "shard"
    CORE = "core"
    REGISTRAR = "registrar"


KILL_AT = {  # fraction of the run's tokens, in ascending order
    Victim.FRONT: 0.2,
    Victim.LEARNER: 0.3,
    Victim.LINK: 0.4,
    Victim.SHARD: 0.45,
    Victim.CORE: 0.6,
    Victim.REGISTRAR: 0.6,
}


def victims(settings: DemoSettings) -> list[Victim]:
    """Returns the victims that exist in this demo, in the order of KILL_AT."""
    here = {Victim.LEARNER}
    here |= {Victim.SHARD, Victim.REGISTRAR, Victim.FRONT} if settings.sharded else {Victim.CORE}
    here |= {Victim.FRONT, Victim.LINK} if settings.regions else set()
    return [victim for victim in KILL_AT if victim in here]


class Kills:
    """Kills each victim once and starts it again. learners: a list that is changed in place. front: the front of
    several shards, or None."""

    def __init__(
        self,
        settings: DemoSettings,
        group: Children,
        progress: Progress,
        cores: Cores,
        regions: Regions,
        front: LocalFront | None,
        learners: list[Child],
    ) -> None:
        self._settings = settings
        self._group = group
        self._progress = progress
        self._cores = cores
        self._regions = regions
        self._front = front
        self._learners = learners
        self._left = victims(settings) if settings.kills else []
        self._done: list[Victim] = []
        self._restore_at = 0.0
        self._acts: dict[Victim, Callable[[], str]] = {
            Victim.FRONT: self._kill_front,
            Victim.LEARNER: self._kill_learner,
            Victim.LINK: self._cut_link,
            Victim.SHARD: lambda: self._kill_core(self._settings.shards - 1, f"shard {self._settings.shards - 1}"),
            Victim.CORE: lambda: self._kill_core(0, "the core"),
            Victim.REGISTRAR: lambda: self._kill_core(0, "the registrar, which has shard 0,"),
        }

    def look(self, done: float) -> None:
        """Kills or cuts the next victim if it is due. done: fraction of the run's tokens."""
        if self._restore_at and time.monotonic() >= self._restore_at:
            self._regions.restore(self._regions.all[-1])
            self._restore_at = 0.0
        if self._left and done >= KILL_AT[self._left[0]]:
            victim = self._left.pop(0)
            self._progress.note(self._acts[victim]())
            self._done.append(victim)

    def counts(self) -> dict[str, int]:
        """Returns the number of kills and cuts by name. "core" includes the processes of shards and the registrar."""
        found = {victim.value: self._done.count(victim) for victim in (Victim.LEARNER, Victim.CORE)}
        found |= {victim.value: self._done.count(victim) for victim in victims(self._settings)}
        if self._settings.sharded:
            found["core"] = found["shard"] + found["registrar"]
        return found

    def _kill_front(self) -> str:
        if self._front is not None:
            self._front.restart()
            return "killed the front with SIGKILL; restarted it"
        region = self._regions.all[0]
        self._regions.kill_front(region)
        return f"killed the front of {region.name} with SIGKILL; restarted it"

    def _kill_learner(self) -> str:
        number = min(1, self._settings.count - 1)
        child = self._learners[number]
        child.kill()
        self._learners[number] = self._group.start(child.name, child.command)
        return f"killed learner {child.name} with SIGKILL; restarting it"

    def _cut_link(self) -> str:
        region = self._regions.all[-1]
        self._regions.cut(region)
        self._restore_at = time.monotonic() + CUT_S
        return f"cut the link of {region.name} for {CUT_S:.0f} s; its learners keep training"

    def _kill_core(self, number: int, what: str) -> str:
        self._cores.restart(number)
        return f"killed {what} with SIGKILL; restarted it while the learners kept training"
