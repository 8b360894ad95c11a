"""A hostile learner with a valid name among honest learners, and the limits of its influence.

It runs the real agent with false data. It joins once the core can judge its kind of lie (`may_come`). An early liar
joins as soon as the other learners have joined. Its reports are held back, but its contributions count as declared,
because there is no other work yet.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from atoll.fragments.exchange import DueRound, Submission
from atoll_server.learners.goodput import TimeAccount
from atoll_server.learners.plausibility import FASTER
from atoll_server.ledger import lineage, run_ledger
from atoll_server.merging.merge import weight
from atoll_server.processes.core import Core
from atoll_wire import outer_pb2 as pb

from tests.simulation.bookkeeping import Violation, shard_of, the_shard
from tests.simulation.checks import Checks
from tests.simulation.island import Answers, Island, Rank
from tests.simulation.network import Network
from tests.simulation.training import BATCH, Take

NAME = "mallory"
STRIDE = 1e6  # size of its inner steps: 1e8 times that of an honest learner
LARGEST = 1e4  # limit on a parameter: the norm limit times honest movement, with all momentum
DECLINES = 128  # declined rounds per report
BOAST = 1 << 40
FASTEST_S, SLOWEST_S = 0.06, 0.2  # an honest learner's time for an inner step
STALLED = 4.0  # a step takes up to this many times as long on the core's clock, if outages delay it or its reports
MAX_OF_A_STEP = FASTER * BATCH * STALLED * SLOWEST_S / FASTEST_S  # tokens of a learner that is ten times as fast
MAX_TOKENS_PER_S = FASTER * BATCH / FASTEST_S  # limit per learner: ten times the fastest honest learner's rate


class Lie(StrEnum):
    """A hostile learner's false data."""

    FLOOD = "huge contributions as often as possible, with or without a round"
    DECLINES = "as many declined rounds as fit in a report"
    BOAST = "contributions with more steps and tokens than it reported"
    INFLATE = "reports of more tokens than it could have trained, and contributions with all of them in one step"
    EARLY = "such reports before other learners have taken a step"


LIES = (Lie.FLOOD, Lie.DECLINES)  # lies that are not about tokens


class AnswersAlways(Answers):
    """Answers every round, even without work."""

    _island: Hostile

    def answer(self, boundary: int = 0) -> None:
        due = self._exchange.todo.due
        while due:
            self._island._take(due.popleft())


class Hostile(Island):
    """A hostile learner's process: the real agent with false data."""

    answers = AnswersAlways

    def __init__(
        self, lie: Lie, network: Network, checks: Checks, addresses: Sequence[str], step_s: float, seed: int
    ) -> None:
        super().__init__(network, checks, NAME, 0, addresses, step_s, seed)
        self.lie, self.stride = lie, STRIDE if lie is Lie.FLOOD else 0.01
        self.sent = 0

    def _step(self) -> None:
        super()._step()
        assert self.session is not None, "the learner has joined"
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

    def _take(self, due: DueRound) -> None:
        boundary = self.ranks[0].boundary
        assert self.session is not None and boundary is not None, "rounds arrive in a session"  # noqa: PT018
        if self.session.core.tracks[due.fragment].in_flight is None and self.tracks[due.fragment].flying is None:
            self.sent += 1
            boundary._rounds.take(due)

    def _submit(self, rank: Rank, taken: Submission) -> None:
        if self.lie is Lie.BOAST:
            taken.outstanding.tokens = taken.outstanding.steps = BOAST
        elif self.lie is Lie.INFLATE:  # as if it trained with huge batches
            taken.outstanding.tokens, taken.outstanding.steps = BOAST, 1
        super()._submit(rank, taken)

    def _check(self, take: Take, taken: Submission) -> None:
        """Does nothing: a hostile learner may send work that it did not train."""


def is_usual_known(core: Core) -> bool:
    """Returns whether every fragment has enough durable contributions to judge another one's norm."""
    shard = shard_of(core)
    db = core.run.writer._db if shard is not None else None
    return shard is not None and all(
        len(lineage.latest_norms(db, core.run.line, index, fragment.norms.window)) >= fragment.norms.window
        for index, fragment in shard.fragments.items()
    )


def are_rates_known(core: Core, names: Sequence[str]) -> bool:
    """Returns whether the core has stored the training rates of all these learners."""
    accounts = {row.name: TimeAccount.from_data(row.account) for row in run_ledger.learners(core.run.writer._db)}
    return all(name in accounts and accounts[name].rate() is not None for name in names)


def are_joined(core: Core, names: Sequence[str]) -> bool:
    """Returns whether all these learners are connected, so that a liar is not alone."""
    entries = [core.run.registry.entries.get(name) for name in names]
    return all(entry is not None and entry.connected for entry in entries)


def may_come(lie: Lie, core: Core, names: Sequence[str]) -> bool:
    """Returns whether the core can judge this lie, or hold it back. names: of the honest learners."""
    match lie:
        case Lie.EARLY:
            return are_joined(core, names)
        case Lie.BOAST | Lie.INFLATE:
            return are_rates_known(core, names)
        case Lie.FLOOD | Lie.DECLINES:
            return is_usual_known(core)


def check_influence(core: Core, hostile: Hostile, honest: Sequence[str], trained: int, elapsed_s: float) -> None:
    """Checks that the hostile learner's effect on the model and token counts is limited.

    trained: tokens of all honest processes.
    """
    if core.run.registry.tokens() > trained + MAX_TOKENS_PER_S * elapsed_s:
        raise Violation(11, f"the run counts {core.run.registry.tokens()} tokens, honest learners trained {trained}")
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
    """Checks that the hostile learner's counted work is at most ten times that of an honest learner."""
    rows = core.run.writer._db.execute("SELECT fragment, tokens, steps FROM contributions WHERE learner=?", (NAME,))
    made: Counter[int] = Counter()
    for fragment, tokens, steps in rows.fetchall():
        made[fragment] += tokens
        if tokens > MAX_OF_A_STEP * steps + 1:  # tokens are rounded
            raise Violation(11, f"a hostile learner's contribution counts {tokens} tokens in {steps} steps")
    if max(made.values(), default=0) > MAX_TOKENS_PER_S * elapsed_s:
        raise Violation(11, f"a hostile learner's contributions count {dict(made)} tokens by fragment")


def _check_work(core: Core, trained: int) -> None:
    """Checks that a learner with honest token reports has each token merged at most once per fragment."""
    query = "SELECT fragment, SUM(tokens) FROM contributions WHERE learner=? AND fate='merged' GROUP BY fragment"
    for fragment, tokens in core.run.writer._db.execute(query, (NAME,)).fetchall():
        if tokens > trained:
            text = f"{tokens} tokens of a hostile learner are merged in fragment {fragment}, it trained {trained}"
            raise Violation(11, text)


def _check_shares(core: Core, honest: Sequence[str]) -> None:
    """Checks that the hostile learner's weight in each merge is at most ten times an honest learner's last weight."""
    db, exponent = core.run.writer._db, core.run.settings.staleness_exponent
    last: dict[tuple[int, str], float] = {}  # by fragment and honest learner: weight of its newest merged contribution
    merges = db.execute("SELECT fragment, version, shares FROM merges ORDER BY fragment, version").fetchall()
    for fragment, version, text in merges:
        given = _given(core, fragment, version)
        scale, weighs = 0.0, 0.0  # ratio of weight to share of the merge; the hostile learner's share
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
            raise Violation(11, f"a hostile learner's share of {fragment}/{version} is {weighs}: {text}")


def _given(core: Core, fragment: int, version: int) -> dict[tuple[str, int, int], tuple[int, int]]:
    """Returns tokens and steps of a merge's contributions, by (learner, incarnation, seq)."""
    rows = core.run.writer._db.execute(
        "SELECT learner, incarnation, seq, tokens, steps FROM contributions "
        "WHERE fragment=? AND version=? AND fate='merged'",
        (fragment, version),
    )
    return {(row[0], row[1], row[2]): (row[3], row[4]) for row in rows.fetchall()}
