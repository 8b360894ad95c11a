"""PURE: the names of a run, which process may speak for each, and what each has spent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from atoll_wire.arrivals import Arrivals
from atoll_wire.certificate import NAME

from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.accounts import Account
from atoll_server.learners.plausibility import Rate, Rates

LARGEST_REGION = 64
MOST_REGIONS = 256  # of learners that have neither left nor been evicted: each is a series of metrics
MOST_TOKENS = (1 << 63) - 1  # what a message can say
LEAST_PATIENCE_S, MOST_PATIENCE_S = 4.0, 60.0  # with a connected process that does not report
CALLS_COME_S = 5.0  # after a Join: a process opens its calls at once
LATENCY_S = 0.5  # of a Join: how far the starts of processes are off
RATES_KEPT = 8  # learners whose rates are known; of fewer each look is a new one
COMPARED_S = 3600.0  # a learner that was silent for so long, or joined so long ago and made no step, is no measure
RATES_S = 1.0  # between two looks at how fast learners train
REMEMBERED = 64  # processes of a name that are known to be fenced off


@dataclass(frozen=True, slots=True)
class Comeback:
    """How the process that speaks for a name came to its first inner step, part after part."""

    down_s: float = 0.0
    prepared_s: float = 0.0
    joining_s: float = 0.0
    first_step_s: float = 0.0


@dataclass(slots=True)
class Entry:
    """One name. nonces: of the processes that spoke for it, newest last; token: proves that a call comes from that."""

    name: str
    region: str
    incarnation: int
    nonces: list[int]
    account: Account
    token: bytes = b""  # empty until it joined this core process
    challenge: tuple[int, bytes] | None = None  # nonce of a process that may take the name over; proof that it lives
    streams: dict[Callable[[Refused], None], None] = field(default_factory=dict)  # open Follow and Report calls
    due_since: float | None = None  # monotonic: it was connected when it joined again, and its calls are to come
    reports: Arrivals = field(default_factory=lambda: Arrivals(LEAST_PATIENCE_S, MOST_PATIENCE_S))
    loss: float = float("nan")
    comeback: Comeback = Comeback()
    evicted: str = ""  # why an operator sent it away; empty: nobody did
    declined: dict[int, int] = field(default_factory=dict)  # by fragment, the newest cycle that it declined
    adopted: dict[int, int] = field(default_factory=dict)  # by fragment, the newest version that it said it adopted
    doubted: bool = False  # it was said that it reports more than it can have trained
    dirty: bool = False  # the account changed since it was written down

    @property
    def nonce(self) -> int:
        """Of the process that speaks for the name now."""
        return self.nonces[-1]

    @contextmanager
    def stream(self, end: Callable[[Refused], None]) -> Iterator[None]:
        """While a Follow or Report call of the session lasts: it is connected. end: told when the session is over."""
        self.streams[end], self.due_since = None, None
        try:
            yield
        finally:
            self.streams.pop(end, None)

    @property
    def connected(self) -> bool:
        """Whether its process is there, as far as calls tell."""
        return self.due_since is not None or bool(self.streams)

    def occupied(self, now: float) -> bool:
        """Whether a living process has the name. A late Join of one that died is followed by no calls."""
        coming = self.due_since is not None and now - self.due_since <= CALLS_COME_S
        return (coming or bool(self.streams)) and not self.reports.overdue(now)

    def speaks(self, token: bytes, why: Refused) -> None:
        """Another session, or none (no token); calls of the one before, that nobody may listen to, end with this."""
        self.token = token
        old = self.streams
        self.streams = {}
        self.due_since = None
        for end in old:
            end(why)


@dataclass(frozen=True, slots=True, eq=False)
class Speaker:
    """The process that a call came from. Whatever a call does after it has waited, it asks `still` first."""

    entry: Entry
    incarnation: int

    def still(self) -> None:
        """Raises Refused when it may speak no longer: fenced, or evicted."""
        if self.entry.evicted:
            raise evicted(self.entry)
        if self.entry.incarnation != self.incarnation:
            raise fenced(self.entry.name)


class Roster:
    """All names, in a bounded number. Wall-clock times go into accounts."""

    def __init__(self, limit: int) -> None:
        self.entries: dict[str, Entry] = {}
        self._limit = limit
        self._rates = Rates({})
        self._rates_at = -RATES_S
        self.since = 0.0  # when this core began to listen: nobody could be heard before

    def join(
        self,
        name: str,
        region: str,
        nonce: int,
        incarnation: int,
        age_s: float,
        proof: bytes,
        token: bytes,
        wall: float,
        now: float,
    ) -> Entry:
        """Lets a process speak for a name: a retry gets the same incarnation, a restart the next one.

        wall, now: seconds of the run's clock, and monotonic ones. A process takes a name over only with the proof that
        it was given at its first attempt: a Join of a dead process that comes late cannot. Until then the entry is
        returned as it was, with the challenge.
        Raises Refused for a name that is malformed, taken by a living process, or beyond the limit.
        """
        if not NAME.fullmatch(name):
            raise Refused(
                Status.INVALID_ARGUMENT,
                f'learner name "{name[:80]}" is not allowed: use 1 to 64 letters, digits, ".", "_" or "-"',
            )
        if len(region) > LARGEST_REGION or not region.isprintable():
            raise Refused(Status.INVALID_ARGUMENT, "region must be at most 64 printable characters")
        if not nonce:
            text = f'learner "{name}" says nonce 0, which is none: draw one at random for each process'
            raise Refused(Status.INVALID_ARGUMENT, text)
        entry = self.entries.get(name)
        if entry is not None and entry.evicted:
            raise evicted(entry)
        self._check_region(name, region, nonce)
        if entry is None:
            return self._add(name, region, nonce, age_s, token, wall)
        over = Refused(Status.UNAUTHENTICATED, f'learner "{name}" joined again since: this call is of before')
        was_here = entry.connected
        if entry.nonce != nonce:
            self._may_take_over(entry, nonce, incarnation, age_s, wall, now)
            if entry.challenge != (nonce, proof):
                entry.challenge = (nonce, token)
                return entry
            over, was_here = fenced(name), False
            entry.nonces = [*entry.nonces[1 - REMEMBERED :], nonce]
            entry.incarnation += 1
            down_s = entry.account.down_s
            entry.account.joined(wall, age_s, returning=True)
            entry.comeback = Comeback(down_s=entry.account.down_s - down_s)
        entry.speaks(token, over)
        entry.due_since = now if was_here else None
        entry.region = region
        entry.dirty = True
        entry.account.left_at = None
        return entry

    def _may_take_over(self, entry: Entry, nonce: int, incarnation: int, age_s: float, wall: float, now: float) -> None:
        """Raises Refused for another process than the one that speaks for a name, unless that one is gone."""
        name = entry.name
        if nonce in entry.nonces or 0 < incarnation <= entry.incarnation:  # a late Join of a dead process, too
            raise fenced(name)
        if entry.occupied(now):
            raise Refused(
                Status.ALREADY_EXISTS,
                f'a learner named "{name}" is connected now: give each island a name of its own, '
                "or stop the other one first",
            )
        if self._older(entry, age_s, wall):  # or the younger one's Join came so late that it only seems younger
            text = f'a younger process joined as "{name}" and may come back: wait for its {MOST_PATIENCE_S:.0f} s'
            raise Refused(Status.UNAVAILABLE, text)

    def _check_region(self, name: str, region: str, nonce: int) -> None:
        """Raises Refused for a process that moves, and for one region too many. A name has one region at a time."""
        entry = self.entries.get(name)
        if entry is not None and entry.nonce == nonce and entry.region != region:
            text = f'learner "{name}" is in region "{entry.region}", and a process does not move: start another one'
            raise Refused(Status.INVALID_ARGUMENT, text)
        if entry is not None and entry.region == region and entry.account.left_at is None:
            return
        used = self.regions(but=entry)
        if region not in used and len(used) >= MOST_REGIONS:
            text = f"the learners of this run are in {MOST_REGIONS} regions, the most there may be: use one of them"
            raise Refused(Status.RESOURCE_EXHAUSTED, text)

    def _older(self, entry: Entry, age_s: float, wall: float) -> bool:
        """Whether a process was replaced by the one that speaks for the name, which may come back any moment."""
        account = entry.account
        waited = wall - max(account.heard_at, self.since)
        older = wall - age_s < account.began_at - LATENCY_S
        return older and account.left_at is None and waited < MOST_PATIENCE_S

    def _add(self, name: str, region: str, nonce: int, age_s: float, token: bytes, wall: float) -> Entry:
        if len(self.entries) >= self._limit:
            text = f"this run has seen {self._limit} learners, its limit: use a known name, or raise --limit-learners"
            raise Refused(Status.RESOURCE_EXHAUSTED, text)
        twin = next((known for known in self.entries if known.lower() == name.lower()), None)
        if twin is not None:  # payloads are files of that name, and some file systems do not tell the two apart
            text = f'learner name "{name}" differs from "{twin}" in case only: use that one, or another name'
            raise Refused(Status.INVALID_ARGUMENT, text)
        account = Account(first_joined_at=wall, heard_at=wall)
        account.joined(wall, age_s, returning=False)
        entry = Entry(name, region, 1, [nonce], account, token, dirty=True)
        self.entries[name] = entry
        return entry

    def check(self, name: str, incarnation: int, token: bytes) -> Entry:
        """The entry that a session speaks for. Refused: unknown here (join again), fenced, or evicted."""
        entry = self.entries.get(name)
        if entry is not None and entry.evicted:
            raise evicted(entry)
        if entry is None or not entry.token:
            raise Refused(Status.UNAUTHENTICATED, f'learner "{name[:80]}" has not joined this core: join first')
        if incarnation < entry.incarnation:
            raise fenced(name)
        if incarnation != entry.incarnation or token != entry.token:
            raise Refused(Status.UNAUTHENTICATED, f'the session of learner "{name}" is not known here: join again')
        return entry

    def regions(self, but: Entry | None = None) -> set[str]:
        """That learners are in which have neither left nor been evicted."""
        entries = (each for each in self.entries.values() if each is not but and not each.evicted)
        return {each.region for each in entries if each.account.left_at is None}

    def evict(self, entry: Entry, reason: str, wall: float) -> None:
        """Sends a learner away, or lets it in again (no reason)."""
        entry.evicted = reason
        entry.dirty = True
        if reason:
            entry.speaks(b"", evicted(entry))
            entry.account.left_at = wall

    def rates(self, wall: float) -> Rates:
        """How fast learners train, looked at once a second.

        Learners that were evicted, or not heard of for COMPARED_S while this core listened, are not among them.
        """
        # Who is looked at first must not find an older look, at nobody: then nothing would be implausible.
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

    def _starts(self, entry: Entry, wall: float) -> bool:
        """Whether a learner without a rate is about to train."""
        account = entry.account
        here = entry.connected or wall - max(account.heard_at, self.since) < MOST_PATIENCE_S
        young = wall - max(account.current.joined_at, self.since) < COMPARED_S
        return here and young and account.left_at is None and not entry.evicted

    def strike(self, entry: Entry, tokens: int) -> None:
        """So many count of all that a learner reported; struck ones never count again."""
        entry.account.strike(tokens)
        entry.dirty = True

    def counted_tokens(self) -> dict[str, int]:
        """Trained by each learner so far, as reported, without those that are struck."""
        return {entry.name: entry.account.counted_tokens() for entry in self.entries.values()}

    def struck_tokens(self) -> int:
        """Of all learners: by operators, and with what a restored checkpoint left behind."""
        accounts = [entry.account for entry in self.entries.values()]
        return sum(account.struck_tokens + account.undone_tokens for account in accounts)

    def tokens(self) -> int:
        """Trained by everybody so far, as reported."""
        total: int = sum(entry.account.total("tokens") for entry in self.entries.values()) - self.struck_tokens()
        return min(MOST_TOKENS, total)

    def restore(
        self, name: str, region: str, incarnation: int, nonces: list[int], account: dict[str, Any], reason: str
    ) -> None:
        """Takes a name up from the ledger; its process has to join again. reason: why it is evicted, if it is."""
        self.entries[name] = Entry(name, region, incarnation, nonces, Account.from_data(account), evicted=reason)


def fenced(name: str) -> Refused:
    """What a process is told whose name another one has taken over."""
    text = f'learner "{name}" was started again elsewhere: this older process is fenced off; stop it'
    return Refused(Status.FAILED_PRECONDITION, text)


def evicted(entry: Entry) -> Refused:
    """What a learner is told that an operator sent away."""
    cure = f"`atoll evict {entry.name} --undo` lets it in again"
    return Refused(Status.FAILED_PRECONDITION, f'learner "{entry.name}" was evicted ({entry.evicted}): {cure}')


def unwanted(reason: str) -> str:
    """What the receipts of an evicted learner say."""
    return f"its learner was evicted: {reason}"
