"""The one place where the training thread and the agent meet: short, locked, never held during work or IO."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec.block_kernels import F32
from atoll_wire.process.clock import Clock

from atoll.fragments.adoption import Fate, PseudoGradient

log = structlog.get_logger()

# The training thread waits in pieces: the kernel may give a signal to another thread, which would not wake this one.
PIECE_S = 0.5
AT_ONCE = 8  # fragments that are adopted at one step boundary at most, and rounds that are answered


@dataclass(frozen=True, slots=True)
class PreparedAnchor:
    """A newer anchor, ready to be adopted at a step boundary."""

    fragment: int
    version: int
    anchor: F32
    fate: Fate


@dataclass(frozen=True, slots=True)
class DueRound:
    """A round that waits for this learner's answer."""

    fragment: int
    cycle: int
    since: float


@dataclass(slots=True, eq=False)
class Submission:
    """A pseudo-gradient on its way to the agent. It may be handed over again, and is sent once."""

    fragment: int
    cycle: int
    outstanding: PseudoGradient
    received: bool = False  # by the agent
    settled: bool = False  # acknowledged or refused


@dataclass(slots=True)
class BoundaryWork:
    """What a step boundary has to do: fragments set free, anchors to be adopted, and rounds to be answered after that.

    Whoever has done one of them removes it: an exception in between, say of a signal's handler, loses none.
    """

    released: deque[int] = field(default_factory=deque)
    prepared: deque[PreparedAnchor] = field(default_factory=deque)
    due: deque[DueRound] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self.released or self.prepared or self.due)


class ThreadExchange:
    """What the agent has for the next step boundary, and what the step boundary has for the agent.

    `something` may be read without the lock: a step with nothing due costs one look at it, and one at `todo`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._prepared: OrderedDict[int, PreparedAnchor] = OrderedDict()
        self._due: OrderedDict[int, DueRound] = OrderedDict()
        self._released: list[int] = []
        self._boundary_at = 0.0  # the newest with something to do
        self._unsettled: set[Submission] = set()
        self.settled = 0  # contributions that were acknowledged or refused
        self.todo = BoundaryWork()
        self._ended = False
        self._news = threading.Condition(self._lock)
        self.something = False
        self.paused = ""  # by whom and why: the training loop stands
        self.excused = False  # ... but for one that is to leave; set by a signal's handler, which takes no lock
        self.declined: deque[pb.Declined] = deque(maxlen=1024)
        self.adopted: deque[pb.Adopted] = deque(maxlen=1024)

    # ------------------------------------------------------------------------------ the agent's side

    def offer(self, prepared: PreparedAnchor) -> None:
        """Puts an anchor up for adoption; one of the same fragment that still waits is replaced, its fate kept."""
        with self._lock:
            waiting = self._prepared.get(prepared.fragment)
            if waiting is not None:
                q = prepared.fate.q if prepared.fate.q is not None else waiting.fate.q
                fate = Fate(q, prepared.fate.drop or waiting.fate.drop, prepared.fate.restores)
                prepared = PreparedAnchor(prepared.fragment, prepared.version, prepared.anchor, fate)
            self._prepared[prepared.fragment] = prepared
            self.something = True
            self._news.notify_all()

    def ask(self, fragment: int, cycle: int) -> None:
        """A round opened."""
        with self._lock:
            self._due[fragment] = DueRound(fragment, cycle, self._clock.monotonic())
            self.something = True

    def withdraw(self, longer_than_s: float) -> list[DueRound]:
        """Takes back rounds, when there was no step boundary for so long: each takes AT_ONCE, in turn."""
        with self._lock:
            before = self._clock.monotonic() - longer_than_s
            late = [due for due in self._due.values() if max(due.since, self._boundary_at) < before]
            for due in late:
                del self._due[due.fragment]
            return late

    def release(self, fragment: int) -> None:
        """The contribution in flight was refused: its work is free to be sent again."""
        with self._lock:
            self._released.append(fragment)
            self.something = True
            self._news.notify_all()

    def settle(self, taken: Submission) -> None:
        """A contribution was acknowledged or refused."""
        with self._lock:
            self.settled += not taken.settled
            taken.settled = True
            self._unsettled.discard(taken)
            self._news.notify_all()

    def pause(self, reason: str) -> None:
        """The run stands, or goes on (no reason)."""
        with self._lock:
            changed, self.paused = reason != self.paused, reason
            self._news.notify_all()
        if changed:
            log.warning("the run is paused: training stands" if reason else "the run goes on", reason=reason)

    def end(self) -> None:
        """The agent stopped: nothing more is acknowledged."""
        with self._lock:
            self._ended = True
            self._news.notify_all()

    # ------------------------------------------------------------------------------ the step boundary's side

    def submitted(self, taken: Submission) -> None:
        """A contribution is handed to the agent, perhaps once more."""
        with self._lock:
            if not taken.settled:
                self._unsettled.add(taken)

    @property
    def unsettled(self) -> int:
        """Contributions that were neither acknowledged nor refused."""
        return len(self._unsettled)

    def clear(self) -> None:
        """Forgets what was offered."""
        with self._lock:
            self._prepared.clear()
            self.something = bool(self._due or self._released)

    def wait_settled(self, timeout_s: float, *, fates: bool = False) -> bool:
        """Waits until every contribution is acknowledged or refused; False when time is up or the agent stopped.

        fates: more is to be sent when a fate is known, so waits for something to adopt or released instead.
        """
        with self._lock:
            done = (lambda: self.something or bool(self.todo)) if fates else (lambda: not self._unsettled)
            end = self._clock.monotonic() + timeout_s
            while not (self._ended or done()) and (left_s := end - self._clock.monotonic()) > 0:
                self._news.wait(min(left_s, PIECE_S))
            return done()

    @property
    def stands(self) -> bool:
        """Whether a step boundary waits."""
        return bool(self.paused) and not self.excused

    def wait_resumed(self, timeout_s: float) -> None:
        """Returns when the run goes on, the agent stopped, or time is up."""
        with self._lock:
            self._news.wait_for(lambda: self._ended or not self.stands, timeout_s)

    def next(self) -> BoundaryWork:
        """What there is to do, AT_ONCE of each at most; what is left of the last boundary comes first.

        Whoever steps slowly finds several rounds at a boundary: answering one of them only, it would be late for all.
        """
        with self._lock:
            self._boundary_at = self._clock.monotonic()
            if not self.todo:
                prepared = list(self._prepared.items())
                waiting = OrderedDict(prepared[AT_ONCE:])
                due = [each for each in self._due.values() if each.fragment not in waiting][:AT_ONCE]
                todo = BoundaryWork(deque(self._released), deque(each for _, each in prepared[:AT_ONCE]), deque(due))
                answered = {each.fragment for each in due}
                left = OrderedDict((number, each) for number, each in self._due.items() if number not in answered)
                more = bool(waiting or left)
                # Nothing but stores: no signal's handler runs between them.
                self.todo = todo
                self._released = []
                self._prepared = waiting
                self._due = left
                self.something = more
            return self.todo
