"""A learner with a valid name that means harm, beside those that the world waits for; and how much it may move them.

It runs the real agent, which sends what it is told to send. It comes once the core knows what is usual of what it lies
about: before that nothing can be judged (`atoll_server.merging.norm_limit`). One that lies early comes as soon as the
others have joined: its reports are held back, and its contributions count as it says, for no work of others is there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

import numpy as np
from atoll.fragments.exchange import DueRound, Submission
from atoll_server.learners.goodput import TimeAccount
from atoll_server.learners.plausibility import FASTER
from atoll_server.merging.merge import weight
from atoll_server.run.core import Core
from atoll_server.storage import lineage, run_ledger
from atoll_wire import outer_pb2 as pb

from tests.simulation.bookkeeping import Violation, shard_of, the_shard
from tests.simulation.checks import Checks
from tests.simulation.island import Island
from tests.simulation.network import Network
from tests.simulation.training import BATCH

NAME = "mallory"
STRIDE = 1e6  # of its inner steps: a hundred million times an honest one's
LARGEST = 1e4  # that a parameter may become: the norm limit times what honest learners move, with all momentum
DECLINES = 128  # in a report
BOAST = 1 << 40
FASTEST_S, SLOWEST_S = 0.06, 0.2  # an inner step of an honest learner
MAX_OF_A_STEP = FASTER * BATCH * SLOWEST_S / FASTEST_S  # tokens: those of a learner ten times as fast
MAX_TOKENS_PER_S = FASTER * BATCH / FASTEST_S  # of one learner: ten times the fastest honest one's


class Lie(StrEnum):
    """What it does."""

    FLOOD = "garbage as often as there is room, round or none"
    DECLINES = "as many declined rounds as a report takes"
    BOAST = "more steps and tokens behind its work than it ever reported"
    INFLATE = "reports of more tokens than it can have trained"
    EARLY = "such reports before the others have made a step"


LIES = (Lie.FLOOD, Lie.DECLINES)  # that are not about tokens


class Hostile(Island):
    """One hostile process."""

    def __init__(
        self, lie: Lie, network: Network, checks: Checks, addresses: Sequence[str], step_s: float, seed: int
    ) -> None:
        super().__init__(network, checks, NAME, 0, addresses, step_s, seed)
        self.lie, self.stride = lie, STRIDE if lie is Lie.FLOOD else 0.01
        self.sent = 0

    def _step(self) -> None:
        super()._step()
        assert self.session is not None, "it trains"
        if self.lie is Lie.DECLINES:
            self._exchange.declined.extend(
                pb.Declined(fragment=fragment, cycle=self.counters.steps + cycle, reason="x" * 64)
                for fragment in range(len(self.tracks))
                for cycle in range(DECLINES // len(self.tracks))
            )
        elif self.lie in (Lie.INFLATE, Lie.EARLY):
            self.counters.tokens += BOAST
        elif self.lie is Lie.FLOOD:
            for fragment, track in self.session.core.tracks.items():
                if track.in_flight is None and self.counters.connected:
                    self._take(DueRound(fragment, self.counters.steps, 0.0))

    def _answer(self) -> None:
        due = self._exchange.todo.due
        while due:
            self._take(due.popleft())

    def _take(self, due: DueRound) -> None:
        assert self.session is not None, "a round comes through it"
        if self.session.core.tracks[due.fragment].in_flight is None and self.tracks[due.fragment].flying is None:
            self.sent += 1
            self._rounds.take(due)

    def _submit(self, taken: Submission) -> None:
        if self.lie is Lie.BOAST:
            taken.outstanding = replace(taken.outstanding, tokens=BOAST, steps=BOAST)
        super()._submit(taken)

    def _check(self, taken: Submission) -> None:
        """It sends what it likes."""


def is_usual_known(core: Core) -> bool:
    """Whether so many contributions to every fragment are durable that another can be judged, after a crash too."""
    shard = shard_of(core)
    db = core.registrar.writer._db if shard is not None else None
    return shard is not None and all(
        len(lineage.latest_norms(db, core.registrar.line, index, fragment.norms.window)) >= fragment.norms.window
        for index, fragment in shard.fragments.items()
    )


def are_rates_known(core: Core, names: Sequence[str]) -> bool:
    """Whether the core has seen all of these train, and would still know it after a crash."""
    accounts = {row.name: TimeAccount.from_data(row.account) for row in run_ledger.learners(core.registrar.writer._db)}
    return all(name in accounts and accounts[name].rate() is not None for name in names)


def are_joined(core: Core, names: Sequence[str]) -> bool:
    """Whether all of these are in the run and about to train: none is alone in it."""
    entries = [core.registrar.registry.entries.get(name) for name in names]
    return all(entry is not None and entry.connected for entry in entries)


def may_come(lie: Lie, core: Core, names: Sequence[str]) -> bool:
    """Whether what it lies about can be judged, or held back. names: honest learners."""
    match lie:
        case Lie.EARLY:
            return are_joined(core, names)
        case Lie.BOAST | Lie.INFLATE:
            return are_rates_known(core, names)
        case Lie.FLOOD | Lie.DECLINES:
            return is_usual_known(core)


def check_influence(core: Core, hostile: Hostile, honest: Sequence[str], trained: int, elapsed_s: float) -> None:
    """At the end: what it did to the model and to the run's numbers is what one honest learner could have done.

    trained: tokens of all honest processes.
    """
    if core.registrar.registry.tokens() > trained + MAX_TOKENS_PER_S * elapsed_s:
        raise Violation(
            11, f"the run counts {core.registrar.registry.tokens()} tokens, honest learners trained {trained}"
        )
    for index, fragment in the_shard(core).fragments.items():
        largest = float(np.abs(fragment.state.theta_pub).max())
        if not largest <= LARGEST:
            raise Violation(11, f"a hostile learner moved fragment {index} to {largest:.3g}")
    if hostile.lie is not Lie.EARLY:
        _check_declared(core, elapsed_s)
    if hostile.lie in LIES:
        _check_work(core, hostile.counters.tokens)
    _check_shares(core, honest)


def _check_declared(core: Core, elapsed_s: float) -> None:
    """What counts of its contributions is what a learner ten times as fast as the others could have made."""
    rows = core.registrar.writer._db.execute(
        "SELECT fragment, tokens, steps FROM contributions WHERE learner=?", (NAME,)
    )
    made: Counter[int] = Counter()
    for fragment, tokens, steps in rows.fetchall():
        made[fragment] += tokens
        if tokens > MAX_OF_A_STEP * steps + 1:  # whole tokens
            raise Violation(11, f"a contribution of a hostile learner counts {tokens} tokens in {steps} steps")
    if max(made.values(), default=0) > MAX_TOKENS_PER_S * elapsed_s:
        raise Violation(11, f"{made} tokens count in contributions of a hostile learner")


def _check_work(core: Core, trained: int) -> None:
    """One that does not lie about tokens weighs by what it trained, and by each token once."""
    query = "SELECT fragment, SUM(tokens) FROM contributions WHERE learner=? AND fate='merged' GROUP BY fragment"
    for fragment, tokens in core.registrar.writer._db.execute(query, (NAME,)).fetchall():
        if tokens > trained:
            text = f"{tokens} tokens of a hostile learner are merged in fragment {fragment}, it trained {trained}"
            raise Violation(11, text)


def _check_shares(core: Core, honest: Sequence[str]) -> None:
    """In each merge it weighs at most ten times what an honest learner gave last, which may have had fewer steps."""
    db, exponent = core.registrar.writer._db, core.registrar.settings.staleness_exponent
    last: dict[tuple[int, str], float] = {}  # by fragment and honest learner, what it gave to its newest merge
    merges = db.execute("SELECT fragment, version, shares FROM merges ORDER BY fragment, version").fetchall()
    for fragment, version, text in merges:
        given = _given(core, fragment, version)
        scale, weighs = 0.0, 0.0  # of a weight to its part of the merge; the hostile one's part
        for name, incarnation, seq, part, staleness in json.loads(text):
            if name in honest:
                scale = max(scale, part / weight(*given[name, incarnation, seq], staleness, exponent))
            else:
                weighs += part
        last |= {
            (fragment, name): sum(weight(*each, 0.0, exponent) for key, each in given.items() if key[0] == name)
            for name in {key[0] for key in given if key[0] in honest}
        }
        most = FASTER * max((given for (where, _), given in last.items() if where == fragment), default=0.0)
        if scale and weighs > scale * most * (1 + 1e-9):
            raise Violation(11, f"a hostile learner weighs {weighs} in {fragment}/{version}: {text}, at most {most}")


def _given(core: Core, fragment: int, version: int) -> dict[tuple[str, int, int], tuple[int, int]]:
    """Tokens and steps of the contributions to a merge, by learner, incarnation and number."""
    rows = core.registrar.writer._db.execute(
        "SELECT learner, incarnation, seq, tokens, steps FROM contributions "
        "WHERE fragment=? AND version=? AND fate='merged'",
        (fragment, version),
    )
    return {(row[0], row[1], row[2]): (row[3], row[4]) for row in rows.fetchall()}
