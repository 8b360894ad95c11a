"""Records changes of learners' states and new problems in the journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll_wire.contract import LearnerState

from atoll_server.learners.learner_registry import RegistryEntry
from atoll_server.links.links import LearnerTraffic
from atoll_server.rounds.liveness import LearnerLiveness, learner_state
from atoll_server.run.known_run import KnownRun
from atoll_server.run.registrar import Registrar
from atoll_server.telemetry import entries

UNHEARD = {LearnerState.SILENT, LearnerState.CUT_OFF}
QUIET = UNHEARD | {LearnerState.LEFT, LearnerState.EVICTED}
SURE_S = 2.0  # seconds of silence after which a learner would count as cut off if its front were silent, too


def liveness_of(run: KnownRun, learner: str) -> LearnerLiveness | None:
    """Returns a learner's liveness as observed by this process's syncer, or None if the syncer has not observed it."""
    return None if run.shard is None else run.shard.syncer.liveness.get(learner)


def state_of(run: KnownRun, entry: RegistryEntry, now: float) -> LearnerState:
    """Returns the current state of a learner. now: monotonic seconds."""
    observed = liveness_of(run, entry.name)
    state = learner_state(observed, now, evicted=bool(entry.evicted))
    if state is LearnerState.SILENT and observed is not None and run.links.cut_off(entry.name, observed.heard_at, now):
        return LearnerState.CUT_OFF
    return state


class Watch:
    """Records changes and problems. since: time when each learner's state began, in seconds on the run's clock."""

    def __init__(self, run: Registrar) -> None:
        self.since: dict[str, float] = {}
        self._run = run
        self._last: dict[str, tuple[LearnerState, int]] = {}  # by learner: state and incarnation
        self._silent_at: dict[str, float] = {}  # by learner: when a silence began that is not recorded yet
        self._silenced: set[str] = set()  # learners with a recorded silence but no recorded recovery yet
        self._troubles: Mapping[str, entries.Trouble] = {}

    def look(self, troubles: Iterable[entries.Trouble], now: float) -> dict[str, LearnerState]:
        """Records all changes since the last call, including those of links. Returns each learner's current state.

        A learner's first state does not count as a change. troubles: the current problems. Each problem is recorded
        once, when it begins. now: monotonic seconds.
        """
        states = {name: state_of(self._run, entry, now) for name, entry in self._run.registry.entries.items()}
        for name, state in states.items():
            self._learner(self._run.registry.entries[name], state, now)
            self._silence(self._run.registry.entries[name], now)
        for change in self._run.links.look(self._present(states), self._run.pace(now).outer_steps, now):
            self._run.journal.record(change, now)
        current = {trouble.about: trouble for trouble in troubles}
        for about, trouble in current.items():
            if about not in self._troubles:
                self._run.journal.record(trouble, now)
        self._troubles = current
        return states

    def _present(self, states: Mapping[str, LearnerState]) -> list[LearnerTraffic]:
        """Returns the traffic of the learners that have neither left nor been evicted."""
        run, found = self._run, []
        for name, state in states.items():
            if state not in {LearnerState.LEFT, LearnerState.EVICTED}:
                entry = run.registry.entries[name]
                account = entry.account
                heard_at = account.heard_at - run.clock.at(0.0) if account.heard_at > run.registry.since else None
                down = account.down()[0] + account.whole()
                found.append(LearnerTraffic(name, entry.region, heard_at, account.bytes_up, down))
        return found

    def _learner(self, entry: RegistryEntry, state: LearnerState, now: float) -> None:
        name, seen = entry.name, (state, entry.incarnation)
        last = self._last.get(name)
        if last == seen:
            return
        self._last[name] = seen
        wall = self._run.clock.at(now)
        quiet_since = min(wall, self._stepped_at(entry, state))
        self.since[name] = quiet_since if state in QUIET else wall
        if last is None or last[0] is state:
            return
        self._silent_at.pop(name, None)
        if state is LearnerState.SILENT and name not in self._silenced:
            self._silent_at[name] = now
        elif state is LearnerState.LIVE and name in self._silenced:
            self._silenced.discard(name)
            if last[1] == entry.incarnation:
                self._run.journal.record(entries.Recovered(name), now)

    def _silence(self, entry: RegistryEntry, now: float) -> None:
        """Records a learner's silence, unless it is the learner's front that fell silent."""
        name = entry.name
        began = self._silent_at.get(name)
        if began is None or (now - began < SURE_S and self._run.links.front_of(name) is not None):
            return
        del self._silent_at[name]
        self._silenced.add(name)
        silent_s = self._run.clock.at(now) - self.since[name]
        self._run.journal.record(entries.Silenced(name, silent_s), now)

    def _stepped_at(self, entry: RegistryEntry, state: LearnerState) -> float:
        """Returns the time, on the run's clock, when the learner left or when it last took a step or reported."""
        account, observed = entry.account, liveness_of(self._run, entry.name)
        if state in UNHEARD and observed is not None and observed.stepped_at is not None:
            return self._run.clock.at(observed.stepped_at)  # a learner may report without taking steps
        return account.heard_at if account.left_at is None else account.left_at
