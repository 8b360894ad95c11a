"""Acknowledged contributions: those that wait for their merge, the fates of the others, and the sums over all.

Memory follows the ledger: each method is called when what it notes is durable already. At a start the same methods
run over the ledger's tallies and what came after them, so that the sums are exact whenever the process died.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import FATES, Fate

from atoll_server.learners.registry import Roster
from atoll_server.rounds import events as ev
from atoll_server.rounds.events import Key
from atoll_server.shard.fragment import Fragment, Held
from atoll_server.storage.rows import ContributionRow, FateRow, TallyRow
from atoll_server.storage.spool import Stored


class Contributions:
    """Of one generation. accepted, merged, refused: how many, since the run began."""

    def __init__(self, fragments: Mapping[int, Fragment], parameters: int, roster: Roster) -> None:
        """fragments: those of this shard; what waits for a merge is kept there. parameters: of the whole model."""
        self._fragments = fragments
        self._shard = min(fragments)  # in accounts: no other shard has its fragments
        self._parameters = parameters
        self._roster = roster
        self._given: dict[tuple[str, int], tuple[int, int]] = {}  # by learner and fragment: incarnation, its tokens
        self.pending_bytes: Counter[str] = Counter()  # of each learner
        self.merges = 0  # of all fragments, since this core started
        self.merged_at: dict[str, int] = {}  # by learner: merges, when it joined or something of it was last in one
        self.accepted = 0
        self.merged = 0
        self.refused = 0

    def forget(self) -> None:
        """Before they are counted again from the ledger: what accounts have of this shard, and of no other."""
        for entry in self._roster.entries.values():
            entry.account.by_shard.pop(self._shard, None)

    def add(self, tally: TallyRow) -> None:
        """Those that a tally stands for."""
        account = self._roster.entries[tally.learner].account
        sums = account.at(self._shard)
        length = self._fragments[tally.fragment].place.length
        sums.bytes_up += tally.size_bytes
        sums.parameters_up += (tally.merged + tally.refused) * length
        sums.merged_token_parameters += tally.tokens * length
        self._give(Key(tally.learner, tally.incarnation, tally.fragment, tally.seq), tally.tokens)
        current = tally.incarnation == self._roster.entries[tally.learner].incarnation
        account.accepted(self._shard, tally.tokens * length / self._parameters, current=current)
        self.accepted += tally.merged + tally.refused
        self.merged += tally.merged
        self.refused += tally.refused

    def accept(self, row: ContributionRow) -> None:
        """One more was acknowledged."""
        entry = self._roster.entries[row.key.learner]
        sums = entry.account.at(self._shard)
        sums.bytes_up += row.size_bytes
        sums.parameters_up += self._fragments[row.key.fragment].place.length
        entry.account.accepted(self._shard, self._weighted(row), current=row.key.incarnation == entry.incarnation)
        entry.dirty = True
        self._give(row.key, row.tokens)
        self.accepted += 1

    def given(self, key: Key) -> int:
        """Tokens that this incarnation gave to this fragment; what was refused it did not."""
        incarnation, tokens = self._given.get((key.learner, key.fragment), (0, 0))
        return tokens if incarnation == key.incarnation else 0

    def _give(self, key: Key, tokens: int) -> None:
        if self._given.get((key.learner, key.fragment), (0, 0))[0] <= key.incarnation:
            self._given[key.learner, key.fragment] = (key.incarnation, self.given(key) + tokens)

    def hold(self, row: ContributionRow, stored: Stored) -> None:
        """It waits for its merge."""
        self._fragments[row.key.fragment].held[row.key] = Held(row, stored)
        self.pending_bytes[row.key.learner] += row.size_bytes

    def end(self, row: ContributionRow, fate: FateRow) -> None:
        """One came to its end: merged, or refused after all."""
        held = self._fragments[row.key.fragment].held.pop(row.key, None)
        if held is not None:
            held.stored.close()
            self.pending_bytes[row.key.learner] -= row.size_bytes
        entry = self._roster.entries[row.key.learner]
        if fate.fate is Fate.MERGED:
            self.merged += 1
            sums = entry.account.at(self._shard)
            sums.merged_token_parameters += row.tokens * self._fragments[row.key.fragment].place.length
        else:
            self.refused += 1
            current = row.key.incarnation == entry.incarnation
            entry.account.accepted(self._shard, -self._weighted(row), current=current)
            self._give(row.key, -row.tokens)
        entry.dirty = True

    def joined(self, learner: str) -> None:
        """From now on its work is looked for in merges."""
        self.merged_at[learner] = self.merges

    def published(self, learners: Iterable[str]) -> None:
        """A merge of these learners' work was published."""
        self.merges += 1
        self.merged_at.update(dict.fromkeys(learners, self.merges))

    def missed(self, learner: str) -> int:
        """Merges since something of it was in one."""
        return self.merges - self.merged_at.get(learner, self.merges)

    def _weighted(self, row: ContributionRow) -> float:
        """Its tokens, times the part of all parameters that its fragment holds."""
        return row.tokens * self._fragments[row.key.fragment].place.length / self._parameters


def receipt_of(fate: FateRow) -> pb.Receipt:
    """A fate as learners are told it."""
    key = fate.key
    return pb.Receipt(
        learner=key.learner, incarnation=key.incarnation, fragment=key.fragment, seq=key.seq, fate=FATES[fate.fate],
        version=fate.version, weight=fate.weight, staleness=fate.staleness, reason=fate.reason,
        drop_outstanding=fate.dropped,
    )  # fmt: skip


def refusal_row(refusal: ev.Refusal, version: int) -> FateRow:
    """A refusal as the ledger keeps it."""
    return FateRow(refusal.key, Fate.REFUSED, version, reason=refusal.reason, dropped=refusal.drop)
