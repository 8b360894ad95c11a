"""PURE: the registry of a run's learners, with their names, current processes, sessions and time accounts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from atoll_wire.connections.arrival_estimator import ArrivalEstimator
from atoll_wire.security.certificate import NAME

from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.goodput import TimeAccount
from atoll_server.learners.learner_counters import IncarnationCounters
from atoll_server.learners.plausibility import Rate, Rates

LARGEST_REGION = 64
MAX_REGIONS = 256  # limit on the regions of present learners, since each region adds metric series
MAX_TOKENS = (1 << 63) - 1  # the largest int64, since messages and the ledger cannot store larger numbers
SHORTEST_WAIT_S, LONGEST_WAIT_S = 4.0, 60.0  # bounds on the time without a report after which a process counts as dead
CALLS_COME_S = 5.0  # seconds after a Join within which a process opens its Follow and Report calls
LATENCY_S = 0.5  # assumed latency of a Join, which is also the error of a process's start time
RATES_KEPT = 8  # while fewer rates than this are known, each call of `rates` computes them again
COMPARED_S = 3600.0  # seconds after which `rates` ignores learners that are silent or have no rate
RATES_S = 1.0  # seconds until the rates are computed again
REMEMBERED = 64  # number of nonces kept per name to recognise fenced processes


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds in each phase before the first inner step of a learner's current process."""

    down_s: float = 0.0
    prepared_s: float = 0.0
    joining_s: float = 0.0
    first_step_s: float = 0.0


@dataclass(slots=True)
class RegistryEntry:
    """A learner name and its current process. nonces: random numbers of the name's processes, newest last."""

    name: str
    region: str
    incarnation: int
    nonces: list[int]
    account: TimeAccount
    session: int = 0  # number of the valid session; 0 if the learner left or has not joined since this core started
    newest_session: int = 0  # in a copy of the registry: the highest number of a session that was valid
    # Nonce of a process that may take over the name, and the proof that the next Join of this process must contain.
    challenge: tuple[int, bytes] | None = None
    # Functions that end the open Follow and Report calls.
    streams: dict[Callable[[Refused], None], None] = field(default_factory=dict)
    due_since: float | None = (
        None  # time of a connected process's new Join, in monotonic seconds; the process must reopen its calls
    )
    reports: ArrivalEstimator = field(default_factory=lambda: ArrivalEstimator(SHORTEST_WAIT_S, LONGEST_WAIT_S))
    recovery: Recovery = Recovery()
    evicted: str = ""  # reason for the eviction; empty if not evicted
    declined: dict[int, int] = field(default_factory=dict)  # by fragment: cycle of the newest declined round
    adopted: dict[int, int] = field(default_factory=dict)  # by fragment: newest adopted version
    announced: int = 0  # the newest incarnation whose Join is in the journal
    capped: bool = False  # whether a warning about implausible reports was logged
    unsaved: bool = False  # whether the account changed since the last write to the ledger

    @property
    def nonce(self) -> int:
        """The nonce of the current process with this name."""
        return self.nonces[-1]

    @contextmanager
    def stream(self, end: Callable[[Refused], None]) -> Iterator[None]:
        """Returns a context manager for an open Follow or Report call. end: function that ends the call.

        The learner counts as connected while the block runs.
        """
        self.streams[end], self.due_since = None, None
        try:
            yield
        finally:
            self.streams.pop(end, None)

    @property
    def connected(self) -> bool:
        """Whether the current process has open calls, or is expected to open calls after a Join."""
        return self.due_since is not None or bool(self.streams)

    def occupied(self, now: float) -> bool:
        """Returns whether a living process uses the name. now: monotonic seconds.

        A living process opens its calls soon after its Join. A dead process's delayed Join is not followed by other
        calls.
        """
        coming = self.due_since is not None and now - self.due_since <= CALLS_COME_S
        return (coming or bool(self.streams)) and not self.reports.overdue(now)

    def start_session(self, session: int, why: Refused) -> None:
        """Replaces the current session and ends its calls with `why`. session: the new number; 0 for no session."""
        self.session = session
        old = self.streams
        self.streams = {}
        self.due_since = None
        for end in old:
            end(why)


@dataclass(frozen=True, slots=True, eq=False)
class LearnerProcess:
    """The learner process that made a call. The call must run `check_current` after every wait."""

    entry: RegistryEntry
    incarnation: int

    def check_current(self) -> None:
        """Raises Refused if another process has taken over the name or the learner was evicted."""
        if self.entry.evicted:
            raise evicted(self.entry)
        if self.entry.incarnation != self.incarnation:
            raise fenced(self.entry.name)


class LearnerRegistry:
    """The learner names of a run. limit: maximum number of names. Times in accounts are wall-clock seconds."""

    def __init__(self, limit: int) -> None:
        self.entries: dict[str, RegistryEntry] = {}
        self._limit = limit
        self._trained = 0  # tokens of all accounts, including voided and discarded tokens
        self._uncounted = 0  # tokens of all accounts that operators voided or restores discarded
        self._sessions = 0  # number of sessions started
        self._rates = Rates({})
        self._rates_at = -RATES_S
        self.since = 0.0  # time when this core began to listen, before which it could receive no reports

    def join(
        self,
        name: str,
        region: str,
        nonce: int,
        incarnation: int,
        age_s: float,
        proof: bytes,
        challenge: bytes,
        wall: float,
        now: float,
    ) -> RegistryEntry:
        """Lets a process use a name and returns the entry of the name.

        A retry by the same process keeps the incarnation. A new process gets the next incarnation, but must call twice.
        The first call only stores `challenge` in the entry, and the second call must contain this value as `proof`. A
        delayed Join of a dead process cannot contain the proof. nonce: random number of the process. incarnation: the
        process's incarnation, or 0 before its first Join.
        age_s: seconds since the process started. wall: wall-clock seconds. now: monotonic seconds.
        Raises Refused if the name is malformed, was evicted, is used by a living process or would exceed the limit.
        """
        if not NAME.fullmatch(name):
            raise Refused(
                Status.INVALID_ARGUMENT,
                f'learner name "{name[:80]}" is not allowed: use 1 to 64 letters, digits, ".", "_" or "-"',
            )
        if len(region) > LARGEST_REGION or not region.isprintable():
            raise Refused(Status.INVALID_ARGUMENT, "the region is invalid: use at most 64 printable characters")
        if not nonce:
            text = f'learner "{name}" sent the invalid nonce 0: draw a random nonce for each process'
            raise Refused(Status.INVALID_ARGUMENT, text)
        entry = self.entries.get(name)
        if entry is not None and entry.evicted:
            raise evicted(entry)
        self._check_region(name, region, nonce)
        if entry is None:
            return self._add(name, region, nonce, age_s, wall)
        over = Refused(
            Status.UNAUTHENTICATED, f'learner "{name}" joined again, which ended this session: use the new session'
        )
        was_here = entry.connected
        if entry.nonce != nonce:
            self._may_take_over(entry, nonce, incarnation, age_s, wall, now)
            if entry.challenge != (nonce, proof):
                entry.challenge = (nonce, challenge)
                return entry
            over, was_here = fenced(name), False
            entry.nonces = [*entry.nonces[1 - REMEMBERED :], nonce]
            entry.incarnation += 1
            down_s = entry.account.down_s
            entry.account.joined(wall, age_s, returning=True)
            entry.recovery = Recovery(down_s=entry.account.down_s - down_s)
        entry.start_session(self._next_session(), over)
        entry.due_since = now if was_here else None
        entry.region = region
        entry.unsaved = True
        entry.account.left_at = None
        return entry

    def _may_take_over(
        self, entry: RegistryEntry, nonce: int, incarnation: int, age_s: float, wall: float, now: float
    ) -> None:
        """Raises Refused if an old process tries to take over the name or the current process may be alive."""
        name = entry.name
        if nonce in entry.nonces or 0 < incarnation <= entry.incarnation:  # may be a dead process's delayed Join
            raise fenced(name)
        if entry.occupied(now):
            raise Refused(
                Status.ALREADY_EXISTS,
                f'a learner named "{name}" is already connected: give each learner its own name, '
                "or stop the other learner first",
            )
        if self._older(entry, age_s, wall):  # if the other Join was delayed, this process may be the newer one
            text = f'a newer process joined as "{name}" and may come back: try again in {LONGEST_WAIT_S:.0f} s'
            raise Refused(Status.UNAVAILABLE, text)

    def _check_region(self, name: str, region: str, nonce: int) -> None:
        """Raises Refused if a process changes its region or a new region would exceed the limit."""
        entry = self.entries.get(name)
        if entry is not None and entry.nonce == nonce and entry.region != region:
            text = (
                f'learner "{name}" is in region "{entry.region}", which its process cannot change: start a new process'
            )
            raise Refused(Status.INVALID_ARGUMENT, text)
        if entry is not None and entry.region == region and entry.account.left_at is None:
            return
        used = self.regions(but=entry)
        if region not in used and len(used) >= MAX_REGIONS:
            text = f"the run's learners are in {MAX_REGIONS} regions (the limit): use one of these regions"
            raise Refused(Status.RESOURCE_EXHAUSTED, text)

    def _older(self, entry: RegistryEntry, age_s: float, wall: float) -> bool:
        """Returns whether a joining process started before the current process, which may still come back."""
        account = entry.account
        waited = wall - max(account.heard_at, self.since)
        older = wall - age_s < account.began_at - LATENCY_S
        return older and account.left_at is None and waited < LONGEST_WAIT_S

    def _next_session(self) -> int:
        """Returns the number of a new session.

        Session numbers are unique over all names in this process, so a process never reuses an ended session's number.
        """
        self._sessions += 1
        return self._sessions

    def _add(self, name: str, region: str, nonce: int, age_s: float, wall: float) -> RegistryEntry:
        if len(self.entries) >= self._limit:
            text = f"the run has {self._limit} learner names (the limit): use one of them, or raise --limit-learners"
            raise Refused(Status.RESOURCE_EXHAUSTED, text)
        twin = next((known for known in self.entries if known.lower() == name.lower()), None)
        if twin is not None:  # payload files contain these names, and some file systems ignore case
            text = f'learner name "{name}" differs from "{twin}" only in case: use "{twin}" or another name'
            raise Refused(Status.INVALID_ARGUMENT, text)
        account = TimeAccount(first_joined_at=wall, heard_at=wall)
        account.joined(wall, age_s, returning=False)
        entry = RegistryEntry(name, region, 1, [nonce], account, self._next_session(), unsaved=True)
        self.entries[name] = entry
        return entry

    def let_in(self, name: str, incarnation: int, session: int, wall: float) -> RegistryEntry | None:
        """Applies the registrar's decision to let a process in. Used in a shard process's copy of the registry.

        Returns the entry if this is a newer process or a newer session of the same process; otherwise, returns None.
        session: the number of the session. wall: wall-clock seconds.
        """
        entry = self.entries.get(name)
        if entry is None:
            account = TimeAccount(first_joined_at=wall, heard_at=wall)
            account.joined(wall, 0.0, returning=False)
            entry = self.entries[name] = RegistryEntry(name, "", incarnation, [], account)
        elif incarnation > entry.incarnation:
            entry.start_session(0, fenced(name))
            entry.incarnation = incarnation
            entry.account.joined(wall, 0.0, returning=True)
        elif incarnation < entry.incarnation or session <= entry.newest_session:
            return None
        if session:
            text = f'learner "{name}" joined again, which ended this session: use the new session'
            entry.start_session(session, Refused(Status.UNAUTHENTICATED, text))
            entry.account.left_at = None
        entry.newest_session = session
        entry.unsaved = True
        return entry

    def forget_sessions(self) -> None:
        """Makes all sessions unknown, since a new registrar process counts them from 1. Open calls continue."""
        for entry in self.entries.values():
            entry.session = entry.newest_session = 0

    def check(self, name: str, incarnation: int, session: int) -> RegistryEntry:
        """Returns the entry of the learner that made a call.

        session: the number that the call's token proves; 0 if the token is invalid.
        Raises Refused if the learner must join again, was evicted, or was replaced by a newer process.
        """
        entry = self.entries.get(name)
        if entry is not None and entry.evicted:
            raise evicted(entry)
        if entry is None or not entry.session:
            raise Refused(Status.UNAUTHENTICATED, f'learner "{name[:80]}" has not joined this core: join first')
        if incarnation < entry.incarnation:
            raise fenced(name)
        if incarnation != entry.incarnation or session != entry.session:
            raise Refused(
                Status.UNAUTHENTICATED, f'the session of learner "{name}" is unknown to this core: join again'
            )
        return entry

    def regions(self, but: RegistryEntry | None = None) -> set[str]:
        """Returns the regions of all learners that have neither left nor been evicted. but: an entry to exclude."""
        entries = (each for each in self.entries.values() if each is not but and not each.evicted)
        return {each.region for each in entries if each.account.left_at is None}

    def evict(self, entry: RegistryEntry, reason: str, wall: float) -> None:
        """Evicts a learner. If the reason is empty, lets the learner join again. wall: wall-clock seconds."""
        entry.evicted = reason
        entry.unsaved = True
        if reason:
            entry.start_session(0, evicted(entry))
            entry.account.left(wall, itself=False)

    def rates(self, wall: float) -> Rates:
        """Returns the learners' training rates, which can be up to RATES_S seconds old.

        The rates exclude evicted learners and learners that have not reported to this core for COMPARED_S seconds.
        """
        # With few learners, an old result could be empty. An empty result would make all reports plausible.
        if self._rates.known < RATES_KEPT or not self._rates_at <= wall < self._rates_at + RATES_S:
            found: dict[str, Rate] = {}
            starting: set[str] = set()
            for entry in self.entries.values():
                rate = None if entry.evicted else entry.account.rate()
                if rate is not None and wall - max(entry.account.heard_at, self.since) < COMPARED_S:
                    found[entry.name] = rate
                elif rate is None and self._starts(entry, wall):
                    starting.add(entry.name)
            self._rates = Rates(found, starting)
            self._rates_at = wall
        return self._rates

    def _starts(self, entry: RegistryEntry, wall: float) -> bool:
        """Returns whether a learner's training rate is unknown but expected to be known soon."""
        account = entry.account
        here = entry.connected or wall - max(account.heard_at, self.since) < LONGEST_WAIT_S
        young = wall - max(account.current.joined_at, self.since) < COMPARED_S
        return here and young and account.left_at is None and not entry.evicted

    def heard(self, entry: RegistryEntry, wall: float, spent: IncarnationCounters) -> None:
        """Records the counters of a report, limited to plausible rates. wall: wall-clock seconds."""
        before: int = entry.account.total("tokens")
        uncounted = entry.account.uncounted_tokens()
        entry.account.heard(wall, spent, self.rates(wall).most(entry.name))
        self._trained += entry.account.total("tokens") - before
        self._uncounted += entry.account.uncounted_tokens() - uncounted

    def void_tokens(self, entry: RegistryEntry, tokens: int) -> None:
        """Reduces a learner's counted tokens to at most `tokens`. The other tokens are voided permanently."""
        before = entry.account.uncounted_tokens()
        entry.account.void_tokens(tokens)
        self._uncounted += entry.account.uncounted_tokens() - before
        entry.unsaved = True

    def counted_tokens(self) -> dict[str, int]:
        """Returns the number of reported tokens per learner, excluding voided and discarded tokens."""
        return {entry.name: entry.account.counted_tokens() for entry in self.entries.values()}

    def voided_tokens(self) -> int:
        """Returns the number of tokens of all learners that operators voided or restores discarded."""
        return min(MAX_TOKENS, self._uncounted)

    def tokens(self) -> int:
        """Returns the number of all learners' tokens, excluding voided and discarded tokens."""
        return min(MAX_TOKENS, self._trained - self._uncounted)

    def restore(
        self, name: str, region: str, incarnation: int, nonces: list[int], account: dict[str, Any], reason: str
    ) -> None:
        """Adds a name from the ledger. The process that uses the name must join again.

        account: the result of `TimeAccount.as_data`. reason: reason for the eviction; empty if not evicted.
        """
        restored = TimeAccount.from_data(account)
        self.entries[name] = RegistryEntry(
            name, region, incarnation, nonces, restored, evicted=reason, announced=incarnation
        )
        self._trained += restored.total("tokens")
        self._uncounted += restored.uncounted_tokens()


def fenced(name: str) -> Refused:
    """Returns the refusal for a process whose name a newer process has taken over."""
    text = f'learner "{name}" was started again elsewhere, so this older process is fenced off: stop it'
    return Refused(Status.FAILED_PRECONDITION, text)


def evicted(entry: RegistryEntry) -> Refused:
    """Returns the refusal for a learner that an operator evicted."""
    fix = f"an operator can readmit it with `atoll evict {entry.name} --undo`"
    return Refused(Status.FAILED_PRECONDITION, f'learner "{entry.name}" was evicted ({entry.evicted}): {fix}')


def refuse_reason(reason: str) -> str:
    """Returns the reason with which an evicted learner's contributions are refused."""
    return f"its learner was evicted: {reason}"
