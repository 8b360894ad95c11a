"""What a core's ledger must say by itself, whatever was told."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

from atoll_server.run.core import Core
from atoll_server.shard.shard import Shard


class Violation(Exception):
    """Something that must always hold did not. number: of the invariant."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"invariant {number}: {text}")
        self.number = number


def shard_of(core: Core | None) -> Shard | None:
    """The one of a core, once the run has parameters."""
    return next(iter(core.registrar.shards), None) if core is not None else None


def the_shard(core: Core) -> Shard:
    """The same, of a run that has parameters."""
    (shard,) = core.registrar.shards
    return shard


def sums(core: Core) -> None:
    """What a core counts, in sums and one by one, is what the ledger holds."""
    shard = the_shard(core)
    lengths = [fragment.length for fragment in shard.layout.fragments]
    rows = core.registrar.writer._db.execute(
        "SELECT learner, fragment, fate, tokens, size_bytes FROM contributions"
    ).fetchall()
    for name, entry in core.registrar.roster.entries.items():
        mine = [row for row in rows if row[0] == name]
        merged = sum(tokens * lengths[fragment] for _, fragment, fate, tokens, _ in mine if fate == "merged")
        found = (entry.account.bytes_up, entry.account.merged_token_parameters)
        if found != (sum(row[4] for row in mine), merged):
            raise Violation(2, f"the core counts {found} of {name}, the ledger {sum(r[4] for r in mine)}, {merged}")
    entries = core.registrar.roster.entries.values()
    tokens = sum(entry.account.total("tokens") - entry.account.struck_tokens for entry in entries)
    if core.registrar.roster.tokens() != tokens:
        raise Violation(2, f"the run counts {core.registrar.roster.tokens()} tokens, its accounts {tokens}")
    fates = Counter(row[2] for row in rows)
    in_ledger = (fates["merged"], fates["refused"], len(rows))
    contributions = shard.contributions
    counts = (contributions.merged, contributions.refused, contributions.accepted)
    if counts != in_ledger:
        raise Violation(2, f"the core counts {counts} merged, refused and accepted, the ledger {in_ledger}")
    told = tuple(counted(core, fate) for fate in ("merged", "refused", "accepted"))
    if told != in_ledger:
        raise Violation(2, f"the journal told Prometheus of {told} merged, refused and accepted, not {in_ledger}")


def counted(core: Core, fate: str) -> float:
    """Contributions by fate, as Prometheus is told."""
    return core.metrics.registry.get_sample_value("atoll_contributions_total", {"fate": fate}) or 0.0


def each_merged_once(db: Any, merged: set[Any]) -> None:
    """Every contribution is in one merge, and the ages of versions follow from the weights."""
    seen: set[Any] = set()
    ages: dict[int, float] = defaultdict(float)
    merges = db.execute("SELECT fragment, version, shares, rule FROM merges ORDER BY fragment, version").fetchall()
    for fragment, version, text, rule in merges:
        shares = json.loads(text)
        ages[fragment] += min(1.0, sum(share[3] for share in shares))
        if abs(json.loads(rule)["age"] - ages[fragment]) > 1e-6:
            raise Violation(7, f"{fragment}/{version} is of age {ages[fragment]}, not {rule}")
        if not 0 < sum(share[3] for share in shares) < 1.000001:
            raise Violation(7, f"weights of {fragment}/{version} sum to {sum(share[3] for share in shares)}")
        for learner, incarnation, seq, _, _ in shares:
            name = (learner, incarnation, fragment, seq)
            if name in seen:
                raise Violation(1, f"{name} was merged twice")
            seen.add(name)
    if seen != merged:
        raise Violation(2, f"fates and merges differ by {seen ^ merged}")
