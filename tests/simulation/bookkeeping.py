"""Checks of a core's ledger that need no other information."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from atoll_server.ledger import lineage, run_ledger
from atoll_server.processes.core import Core
from atoll_server.shard.shard import Shard

DIRECTORY = Path("/run")


class Violation(Exception):
    """An invariant does not hold. number: of the invariant."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"invariant {number}: {text}")
        self.number = number


def shard_of(core: Core | None) -> Shard | None:
    """Returns a core's shard, or None before the run has parameters."""
    return core.run.shard if core is not None else None


def the_shard(core: Core) -> Shard:
    """Returns a core's shard. The run must have parameters."""
    assert core.run.shard is not None, "the run has parameters"
    return core.run.shard


def is_stored(core: Core) -> bool:
    """Returns whether the ledger contains all changes of the run, such as leases that no learner has seen yet."""
    return core.run.writer._writing is None and not core.run.writer._queued


def sums(core: Core) -> None:
    """Checks that a core's counts match the ledger: sums, and values per learner."""
    shard = the_shard(core)
    lengths = [fragment.length for fragment in shard.layout.fragments]
    rows = core.run.writer._db.execute(
        "SELECT learner, fragment, fate, tokens, size_bytes, generation, version FROM contributions"
    ).fetchall()
    line = core.run.line
    for name, entry in core.run.registry.entries.items():
        mine = [row for row in rows if row[0] == name]
        merged = sum(
            tokens * lengths[fragment]
            for _, fragment, fate, tokens, _, generation, version in mine
            if fate == "merged" and made_in(line, fragment, version) == generation
        )
        found = (entry.account.bytes_up, entry.account.merged_token_parameters)
        if found != (sum(row[4] for row in mine), merged):
            raise Violation(2, f"the core counts {found} of {name}, the ledger {sum(r[4] for r in mine)}, {merged}")
    entries = core.run.registry.entries.values()
    tokens = sum(entry.account.counted_tokens() for entry in entries)
    if core.run.registry.tokens() != tokens:
        raise Violation(2, f"the run counts {core.run.registry.tokens()} tokens, its accounts {tokens}")
    fates = Counter(row[2] for row in rows)
    in_ledger = (fates["merged"], fates["refused"], len(rows))
    contributions = shard.contributions
    counts = (contributions.merged, contributions.refused, contributions.accepted)
    if counts != in_ledger:
        raise Violation(2, f"the core counts {counts} merged, refused and accepted, the ledger {in_ledger}")
    told = tuple(counted(core, fate) for fate in ("merged", "refused", "accepted"))
    if told != in_ledger:
        raise Violation(2, f"Prometheus has {told} merged, refused and accepted, the ledger {in_ledger}")


def counted(core: Core, fate: str) -> float:
    """Returns the number of contributions with a fate, as Prometheus receives it."""
    return core.metrics.registry.get_sample_value("atoll_contributions_total", {"fate": fate}) or 0.0


def made_in(line: lineage.Line, fragment: int, version: int) -> int:
    """Returns the generation that made a version, in this history."""
    return line.spans(fragment, version - 1, version)[0][0]


def each_merged_once(db: Any, merged: set[Any]) -> None:
    """Checks that each generation merges a contribution once, and that versions' ages are sums of weights.

    merged: the expected (generation, learner, incarnation, fragment, seq).
    """
    seen: set[Any] = set()
    ages: dict[tuple[int, int, int], float] = {}
    meta = run_ledger.get_meta(db)
    query = "SELECT generation, fragment, version, shares, rule FROM merges ORDER BY generation, fragment, version"
    for generation, fragment, version, text, rule in db.execute(query).fetchall():
        shares = json.loads(text)
        before = version - 1
        origin = made_in(lineage.line_of(meta, generation), fragment, before)
        age = (ages[origin, fragment, before] if before else 0.0) + min(1.0, sum(share[3] for share in shares))
        ages[generation, fragment, version] = age
        if abs(json.loads(rule)["age"] - age) > 1e-6:
            raise Violation(7, f"{fragment}/{version} has age {age}, but its rule is {rule}")
        if not 0 < sum(share[3] for share in shares) < 1.000001:
            raise Violation(7, f"weights of {fragment}/{version} sum to {sum(share[3] for share in shares)}")
        for learner, incarnation, seq, _, _ in shares:
            name = (generation, learner, incarnation, fragment, seq)
            if name in seen:
                raise Violation(1, f"{name} was merged twice")
            seen.add(name)
    if seen != merged:
        raise Violation(2, f"the contributions' fates differ from the merges by {seen ^ merged}")
