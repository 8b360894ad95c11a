"""Keeps acknowledged contributions until they are merged or refused. Counts all contributions and their fates.

Each method is called after the change that it records is durable in the ledger. A starting core calls the same methods
for the sums in the ledger and for newer contributions. The counts are therefore exact, no matter when the previous
process died.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import FATES, Fate

from atoll_server.data.merged_units import MergedUnits, UnitRange, with_merged
from atoll_server.learners.learner_registry import LearnerRegistry
from atoll_server.ledger.rows import ContributionRow, FateRow, TotalsRow
from atoll_server.rounds import syncer_events as ev
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.shard.fragment import Fragment, HeldContribution
from atoll_server.storage.spool import StoredPayload


class Contributions:
    """One generation's contributions. accepted, merged, refused: number of contributions since the run began."""

    def __init__(
        self, number: int, fragments: Mapping[int, Fragment], parameters: int, registry: LearnerRegistry
    ) -> None:
        """number: the shard's number, which is its key in accounts. parameters: number of the model's parameters.

        fragments: the shard's fragments, which store the pending contributions.
        """
        self._fragments = fragments
        self._shard = number
        self._parameters = parameters
        self._registry = registry
        # by learner and fragment: an incarnation, and the tokens in its contributions, excluding refused ones
        self._given: dict[tuple[str, int], tuple[int, int]] = {}
        self.pending_bytes: Counter[str] = Counter()  # by learner
        self.merges = 0  # merges of all fragments since this core started
        self.merged_at: dict[str, int] = {}  # by learner: value of `merges` when it joined or was last merged
        # by learner, incarnation and fragment, then by lease: the data units in merged contributions
        self._units: dict[tuple[str, int, int], dict[int, MergedUnits]] = {}
        self.accepted = 0
        self.merged = 0
        self.refused = 0

    def forget(self) -> None:
        """Removes this shard's sums from all accounts, before they are restored from the ledger."""
        for entry in self._registry.entries.values():
            entry.account.by_shard.pop(self._shard, None)

    def add(self, totals_row: TotalsRow) -> None:
        """Counts the contributions that are summed in a row of the ledger."""
        account = self._registry.entries[totals_row.learner].account
        sums = account.at(self._shard)
        length = self._fragments[totals_row.fragment].place.length
        sums.bytes_up += totals_row.size_bytes
        sums.parameters_up += (totals_row.merged + totals_row.refused) * length
        sums.merged_token_parameters += totals_row.tokens * length
        self._give(
            ContributionKey(totals_row.learner, totals_row.incarnation, totals_row.fragment, totals_row.seq),
            totals_row.tokens,
        )
        current = totals_row.incarnation == self._registry.entries[totals_row.learner].incarnation
        account.accepted(self._shard, totals_row.tokens * length / self._parameters, current=current)
        self.accepted += totals_row.merged + totals_row.refused
        if totals_row.units:
            self._units[totals_row.learner, totals_row.incarnation, totals_row.fragment] = dict(totals_row.units)
        self.merged += totals_row.merged
        self.refused += totals_row.refused

    def accept(self, row: ContributionRow) -> None:
        """Counts an acknowledged contribution."""
        entry = self._registry.entries[row.key.learner]
        sums = entry.account.at(self._shard)
        sums.bytes_up += row.size_bytes
        sums.parameters_up += self._fragments[row.key.fragment].place.length
        entry.account.accepted(self._shard, self._weighted(row), current=row.key.incarnation == entry.incarnation)
        entry.unsaved = True
        self._give(row.key, row.tokens)
        self.accepted += 1

    def given(self, key: ContributionKey) -> int:
        """Returns the tokens in an incarnation's contributions to a fragment, excluding refused contributions."""
        incarnation, tokens = self._given.get((key.learner, key.fragment), (0, 0))
        return tokens if incarnation == key.incarnation else 0

    def _give(self, key: ContributionKey, tokens: int) -> None:
        if self._given.get((key.learner, key.fragment), (0, 0))[0] <= key.incarnation:
            self._given[key.learner, key.fragment] = (key.incarnation, self.given(key) + tokens)

    def hold(self, row: ContributionRow, stored: StoredPayload) -> None:
        """Keeps a contribution until it is merged or refused."""
        self._fragments[row.key.fragment].held[row.key] = HeldContribution(row, stored)
        self.pending_bytes[row.key.learner] += row.size_bytes

    def end(self, row: ContributionRow, fate: FateRow) -> None:
        """Removes a contribution that was merged or refused. Counts its fate."""
        held = self._fragments[row.key.fragment].held.pop(row.key, None)
        if held is not None:
            held.stored.close()
            self.pending_bytes[row.key.learner] -= row.size_bytes
        entry = self._registry.entries[row.key.learner]
        if fate.fate is Fate.MERGED:
            self.merged += 1
            sums = entry.account.at(self._shard)
            sums.merged_token_parameters += row.tokens * self._fragments[row.key.fragment].place.length
            self._merge_units(row.key, row.units)
        else:
            self.refused += 1
            current = row.key.incarnation == entry.incarnation
            entry.account.accepted(self._shard, -self._weighted(row), current=current)
            self._give(row.key, -row.tokens)
        entry.unsaved = True

    def _merge_units(self, key: ContributionKey, units: Sequence[UnitRange]) -> None:
        if units:
            place = (key.learner, key.incarnation, key.fragment)
            self._units[place] = with_merged(self._units.get(place, {}), units)

    def merged_units(self, learner: str, incarnation: int, lease: int) -> dict[int, MergedUnits]:
        """Returns the merged work on a lease's units, by fragment."""
        found = ((fragment, self._units.get((learner, incarnation, fragment), {})) for fragment in self._fragments)
        return {fragment: by_lease[lease] for fragment, by_lease in found if lease in by_lease}

    def forget_units(self, learner: str, incarnation: int, lease: int) -> None:
        """Forgets the merged work on a lease's units after these are decided."""
        for fragment in self._fragments:
            place = (learner, incarnation, fragment)
            if self._units.get(place, {}).pop(lease, None) is not None and not self._units[place]:
                del self._units[place]

    def joined(self, learner: str) -> None:
        """Starts to count the merges without this learner's work (see `missed`)."""
        self.merged_at[learner] = self.merges

    def published(self, learners: Iterable[str]) -> None:
        """Counts a published merge with contributions from these learners."""
        self.merges += 1
        self.merged_at.update(dict.fromkeys(learners, self.merges))

    def missed(self, learner: str) -> int:
        """Returns the number of merges since the learner joined or its work was last merged."""
        return self.merges - self.merged_at.get(learner, self.merges)

    def _weighted(self, row: ContributionRow) -> float:
        """Returns the contribution's tokens times its fragment's share of all parameters."""
        return row.tokens * self._fragments[row.key.fragment].place.length / self._parameters


def receipt_of(fate: FateRow) -> pb.Receipt:
    """Returns a fate as a receipt for the learner."""
    key = fate.key
    return pb.Receipt(
        learner=key.learner,
        incarnation=key.incarnation,
        fragment=key.fragment,
        seq=key.seq,
        fate=FATES[fate.fate],
        version=fate.version,
        weight=fate.weight,
        staleness=fate.staleness,
        reason=fate.reason,
        drop_outstanding=fate.dropped,
    )


def refusal_row(refusal: ev.Refusal, version: int) -> FateRow:
    """Returns a refusal as a row for the ledger. version: the fragment's current version."""
    return FateRow(refusal.key, Fate.REFUSED, version, reason=refusal.reason, dropped=refusal.drop)
