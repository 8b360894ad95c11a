"""Exchanges data between the training thread and the agent. Neither holds the lock during computation or IO."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.process.clock import Clock

from atoll.fragments.adoption import Adopting, Fate, PreparedAnchor, PseudoGradient
from atoll.fragments.segments import Coded

log = structlog.get_logger()

# Seconds of one wait of the training thread. Waits are short, because a signal to another thread does not end them.
PIECE_S = 0.5
PER_BOUNDARY = 8  # limit on items of each kind in the work of one step boundary

AnchorName: TypeAlias = tuple[int, int]  # version and checksum of a PreparedAnchor


@dataclass(frozen=True, slots=True)
class DueRound:
    """A round that waits for this learner's answer. since: monotonic seconds when the learner was notified of it."""

    fragment: int
    cycle: int
    since: float


@dataclass(slots=True, eq=False)
class Submission:
    """A pseudo-gradient for the agent. The training thread may submit it several times, but the agent sends it once.

    units: the data units that its steps finished (see `UnitLog.ranges`).
    """

    fragment: int
    cycle: int
    outstanding: PseudoGradient
    units: tuple[tuple[int, int, int], ...] = ()
    received: bool = False  # the agent has received it
    settled: bool = False  # the core has acknowledged or refused it


@dataclass(slots=True)
class BoundaryWork:
    """The work of a step boundary: fragments to release, then anchors to adopt, then rounds to answer.

    The boundary removes each item after handling it. If a signal handler raises, the remaining items are not lost.
    """

    released: deque[int] = field(default_factory=deque)
    prepared: deque[PreparedAnchor] = field(default_factory=deque)
    due: deque[DueRound] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self.released or self.prepared or self.due)


class BoundaryAtWork:
    """Context manager for the work of a step boundary. It is a class, because each idle step uses it.

    now: whether a boundary is at work. since: monotonic seconds when a boundary last ended, or found work.
    """

    __slots__ = ("_clock", "now", "since")

    def __init__(self, clock: Clock) -> None:
        self._clock, self.now, self.since = clock, False, 0.0

    def __enter__(self) -> None:
        self.now = True

    def __exit__(self, *_: object) -> None:
        self.since = self._clock.monotonic()
        self.now = False


class ThreadExchange:
    """Data that the agent and the step boundary pass to each other.

    something: whether a step boundary has new work. It may be read without the lock. A step without work reads only
    `something` and `todo`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._prepared: dict[int, list[PreparedAnchor]] = {}  # by fragment, oldest first
        self._confirmed: OrderedDict[int, AnchorName] = OrderedDict()  # by fragment
        self._chosen: dict[int, AnchorName] = {}  # by fragment: the anchor that rank 0 chose last, as far as known
        self._newest: dict[int, AnchorName] = {}  # by fragment: the newest confirmed anchor
        self._due: OrderedDict[int, DueRound] = OrderedDict()
        self._released: list[int] = []
        self.working = BoundaryAtWork(clock)  # context manager for the work of a boundary
        self._unsettled: set[Submission] = set()
        self.settled = 0  # number of contributions that were acknowledged or refused
        self.todo = BoundaryWork()
        self._ended = False
        self._news = threading.Condition(self._lock)
        self.something = False
        self.paused = ""  # the operator who paused the run, and the reason; "" while the run is not paused
        self.excused = False  # the learner leaves soon, so it ignores pauses; signal handlers set this without the lock
        self.declined: deque[pb.Declined] = deque(maxlen=1024)
        self.adopted: deque[pb.Adopted] = deque(maxlen=1024)

    # ------------------------------------------------------------------------------ the agent's side

    def offer(self, prepared: PreparedAnchor, *, confirmed: bool = True) -> None:
        """Offers an anchor for adoption. confirmed: False if other ranks must prepare their parts of it first."""
        with self._lock:
            waiting = self._prepared.setdefault(prepared.fragment, [])
            waiting.append(prepared)
            if confirmed:
                self._confirm(prepared.fragment, prepared.version, prepared.checksum)

    @property
    def waiting(self) -> int:
        """The number of anchors that wait for a step boundary."""
        with self._lock:
            return sum(map(len, self._prepared.values()))

    def waits(self, fragment: int) -> bool:
        """Returns whether an anchor of this fragment waits for a step boundary."""
        with self._lock:
            return bool(self._prepared.get(fragment))

    def unconfirmed(self, fragment: int) -> int:
        """Returns the number of anchors that are newer than the newest confirmed one."""
        with self._lock:
            waiting = self._prepared.get(fragment, [])
            return len(waiting) - 1 - _place(waiting, self._newest.get(fragment))

    def confirm(self, fragment: int, version: int, checksum: int) -> AnchorName | None:
        """Records that all ranks have prepared an anchor, so that step boundaries may adopt it.

        Returns the anchor that this rank chose last, or None. It no longer chooses anchors that are older than the new
        one, but other ranks may still have to adopt its last choice.
        """
        with self._lock:
            self._confirm(fragment, version, checksum)
            return self._chosen.get(fragment)

    def _confirm(self, fragment: int, version: int, checksum: int) -> None:
        self._confirmed[fragment] = version, checksum
        self._fold(fragment, (version, checksum), self._chosen.get(fragment))
        self.something = True
        self._news.notify_all()

    def supersede(self, fragment: int, newest: AnchorName, chosen: AnchorName | None) -> None:
        """Combines `newest` with the anchors between `chosen` and `newest`, which rank 0 can no longer choose.

        newest: confirmed on rank 0. chosen: rank 0's last choice. This rank may still have to adopt it and older ones.
        """
        with self._lock:
            self._fold(fragment, newest, chosen)

    def _fold(self, fragment: int, newest: AnchorName, chosen: AnchorName | None) -> None:
        """See `supersede`. Otherwise, a long time without a boundary would fill the memory."""
        waiting = self._prepared.get(fragment, [])
        self._newest[fragment] = newest
        begin, end = _place(waiting, chosen) + 1, _place(waiting, newest) + 1
        if begin < end:
            self._prepared[fragment] = [*waiting[:begin], _combined(waiting[begin:end]), *waiting[end:]]

    def ask(self, fragment: int, cycle: int) -> None:
        """Adds a round that a step boundary must answer."""
        with self._lock:
            self._due[fragment] = DueRound(fragment, cycle, self._clock.monotonic())
            self.something = True

    def withdraw(self, longer_than_s: float) -> list[DueRound]:
        """Removes and returns rounds that have waited for more than `longer_than_s` seconds without a step boundary.

        Each boundary restarts this time, because a boundary answers at most PER_BOUNDARY rounds. No round is removed
        during a boundary, because its work may take seconds if the fragments are large.
        """
        with self._lock:
            if self.working.now:
                return []
            before = self._clock.monotonic() - longer_than_s
            late = [due for due in self._due.values() if max(due.since, self.working.since) < before]
            for due in late:
                del self._due[due.fragment]
            return late

    def release(self, fragment: int) -> None:
        """Records that a contribution was refused, so that its work can be sent again."""
        with self._lock:
            self._released.append(fragment)
            self.something = True
            self._news.notify_all()

    def settle(self, taken: Submission) -> None:
        """Records that the core acknowledged or refused a contribution."""
        with self._lock:
            self.settled += not taken.settled
            taken.settled = True
            self._unsettled.discard(taken)
            self._news.notify_all()

    def pause(self, reason: str) -> None:
        """Pauses training for a reason. An empty reason resumes training."""
        with self._lock:
            changed, self.paused = reason != self.paused, reason
            self._news.notify_all()
        if changed:
            log.warning("the run is paused: training waits" if reason else "the run has resumed", reason=reason)

    def end(self) -> None:
        """Ends all waits, because the agent has stopped and receives no more acknowledgements."""
        with self._lock:
            self._ended = True
            self._news.notify_all()

    # ------------------------------------------------------------------------------ the step boundary's side

    def submitted(self, taken: Submission) -> None:
        """Records that the training thread submits a contribution to the agent. Repeated calls are allowed."""
        with self._lock:
            if not taken.settled:
                self._unsettled.add(taken)

    @property
    def unsettled(self) -> int:
        """The number of contributions that are neither acknowledged nor refused."""
        return len(self._unsettled)

    @property
    def confirmed(self) -> int:
        """The number of fragments with a confirmed anchor."""
        return len(self._confirmed)

    def choose_first(self) -> list[Adopting]:
        """Chooses the confirmed anchors. Returns them in order of fragments."""
        with self._lock:
            named = [Adopting(fragment, *self._confirmed[fragment]) for fragment in sorted(self._confirmed)]
            self._chosen = self._chosen | _names(named)
            return [replace(each, restores=self._found(each)[0].fate.restores) for each in named]

    def take_first(self, anchors: Sequence[Adopting]) -> list[PreparedAnchor]:
        """Removes and returns the anchors with which the learner begins. anchors: `choose_first` of rank 0."""
        with self._lock:
            taken = [self._found(each, decided=True) for each in anchors]
            for prepared, left in taken:
                self._prepared[prepared.fragment] = left
            self._confirmed = self._unadopted({each.fragment: each for each, _ in taken})
            self.something = bool(self._confirmed or self._due or self._released)
            return [prepared for prepared, _ in taken]

    def start_over(self) -> None:
        """Drops all anchors, because the run was restored to a checkpoint before this learner began to train."""
        with self._lock:
            self._prepared.clear()
            self._confirmed.clear()

    def wait_settled(self, timeout_s: float, *, fates: bool = False) -> bool:
        """Waits until every contribution is acknowledged or refused. Returns False on timeout or if the agent stopped.

        fates: whether to wait instead until a step boundary has work, because a merge or refusal may allow another
        contribution.
        """
        with self._lock:
            done = (lambda: self.something or bool(self.todo)) if fates else (lambda: not self._unsettled)
            end = self._clock.monotonic() + timeout_s
            while not (self._ended or done()) and (left_s := end - self._clock.monotonic()) > 0:
                self._news.wait(min(left_s, PIECE_S))
            return done()

    @property
    def stands(self) -> bool:
        """Whether step boundaries must wait because the run is paused."""
        return bool(self.paused) and not self.excused

    def wait_resumed(self, timeout_s: float) -> None:
        """Waits until the run resumes, the agent stops, or timeout_s seconds have passed."""
        with self._lock:
            self._news.wait_for(lambda: self._ended or not self.stands, timeout_s)

    def next(self, *, adopted_first: bool = False, most_rounds: int = PER_BOUNDARY) -> BoundaryWork:
        """Returns the unfinished work of the last boundary, or new work of at most PER_BOUNDARY items of each kind.

        adopted_first: whether a fragment's round waits for a boundary after the adoption of its confirmed anchor. If
        False, one boundary may adopt the anchor and then answer the round. most_rounds: limit on the rounds; it may be
        below 1.

        A slow learner may find several rounds at a boundary. If it answered only one, it would be late for the others.
        """
        with self._lock:
            self.working.since = self._clock.monotonic()
            if not self.todo:
                first = list(self._confirmed.items())[:PER_BOUNDARY]
                later = list(self._confirmed)[0 if adopted_first else PER_BOUNDARY :]
                ready = [each for each in self._due.values() if each.fragment not in later]
                due = ready[: max(0, most_rounds)]
                adopted = [Adopting(fragment, *each) for fragment, each in first]
                self._begin(self._released[:PER_BOUNDARY], adopted, due)
            return self.todo

    def follow(self, released: Sequence[int], adopted: Sequence[Adopting], due: Sequence[tuple[int, int]]) -> None:
        """Sets the work of this boundary to rank 0's decision. The other ranks call this."""
        with self._lock:
            now, self._released = self._clock.monotonic(), list(released)
            self.todo = BoundaryWork()
            self._begin(released, adopted, [DueRound(fragment, cycle, now) for fragment, cycle in due], decided=True)

    def _begin(
        self, released: Sequence[int], adopted: Sequence[Adopting], due: Sequence[DueRound], *, decided: bool = False
    ) -> None:
        found = [self._found(each, decided=decided) for each in adopted]
        prepared = {**self._prepared, **{each.fragment: left for each, left in found}}
        confirmed = self._unadopted({each.fragment: each for each, _ in found})
        answered = {each.fragment for each in due}
        left = OrderedDict((number, each) for number, each in self._due.items() if number not in answered)
        still = self._released[len(released) :]
        chosen = self._chosen | _names(adopted)
        more = bool(confirmed or left or still)
        # Only assignments follow, so that no signal handler runs between them.
        self.todo = BoundaryWork(deque(released), deque(each for each, _ in found), deque(due))
        self._released = still
        self._prepared = prepared
        self._chosen = chosen
        self._confirmed = confirmed
        self._due = left
        self.something = more

    def _unadopted(self, adopted: Mapping[int, PreparedAnchor]) -> OrderedDict[int, AnchorName]:
        """Returns the confirmed anchors except those that are now adopted."""
        done = {number: (each.version, each.checksum) for number, each in adopted.items()}
        return OrderedDict((number, each) for number, each in self._confirmed.items() if done.get(number) != each)

    def _found(self, wanted: Adopting, *, decided: bool = False) -> tuple[PreparedAnchor, list[PreparedAnchor]]:
        """Returns the wanted anchor and the prepared anchors that are newer.

        The anchor's fate also includes the fates of all older prepared anchors.
        decided: `wanted` is rank 0's decision, which overrides the fate that this rank knows.
        If this rank owns no frames of the fragment, it has no prepared anchor, and the result is an empty anchor.
        """
        waiting = self._prepared.get(wanted.fragment, [])
        place = _place(waiting, (wanted.version, wanted.checksum))
        if place < 0:
            fate = Fate(Coded.of(()) if wanted.merged else None, wanted.drop, wanted.restores)
            return PreparedAnchor(wanted.fragment, wanted.version, np.empty(0, np.float32), fate), waiting
        found, left = _combined(waiting[: place + 1]), waiting[place + 1 :]
        if decided:
            fate = Fate(found.fate.q if wanted.merged else None, wanted.drop, wanted.restores)
            found = replace(found, fate=fate)
        return found, left


def _names(adopted: Sequence[Adopting]) -> dict[int, AnchorName]:
    return {each.fragment: (each.version, each.checksum) for each in adopted}


def _place(anchors: Sequence[PreparedAnchor], name: AnchorName | None) -> int:
    """Returns the last index of an anchor, or -1 if there is none with this name."""
    return max((number for number, each in enumerate(anchors) if (each.version, each.checksum) == name), default=-1)


def _combined(anchors: Sequence[PreparedAnchor]) -> PreparedAnchor:
    """Returns the newest anchor, with the fates of all. anchors: of one fragment, oldest first."""
    newest, merged = anchors[-1], [each.fate.q for each in anchors if each.fate.q is not None]
    fate = Fate(merged[-1] if merged else None, any(each.fate.drop for each in anchors), newest.fate.restores)
    return replace(newest, fate=fate, change=newest.change if len(anchors) == 1 else None)
