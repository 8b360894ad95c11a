"""A start reads sums and newer rows.

Together they give the whole history, at a cost that does not depend on its length.
"""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from atoll_server.ledger import database, lineage, shard_ledger, totals
from atoll_server.ledger.lineage import Line
from atoll_server.ledger.rows import ContributionRow, FateRow
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_wire.contract import Fate


def contribution(learner: str, incarnation: int, fragment: int, seq: int, tokens: int) -> ContributionRow:
    key = ContributionKey(learner, incarnation, fragment, seq)
    return ContributionRow(key, seq, 0, tokens, 1, 3, 1, 10 + seq, bytes(32), (1.5,), 1.0, 7.0)


def sums(db: sqlite3.Connection, generation: int) -> tuple[Counter[tuple[str, int, int, str]], list[int]]:
    """Returns counts, tokens and bytes per row, from sums and newer contributions, and those without a fate."""
    found: Counter[tuple[str, int, int, str]] = Counter()
    through = 0
    for t in shard_ledger.totals(db, generation):
        through = max(through, t.through)
        line = (t.learner, t.incarnation, t.fragment)
        for what in ("merged", "refused", "tokens", "size_bytes"):
            found[*line, what] += getattr(t, what)
        found[*line, "seq"], found[*line, "cycle"] = t.seq, t.cycle
    waiting = []
    for number, row, fate in shard_ledger.came_after(db, generation, through):
        _count(found, row, fate)
        if fate.fate == "pending":
            waiting.append(number)
    return +found, waiting


def _count(found: Counter[tuple[str, int, int, str]], row: ContributionRow, fate: FateRow) -> None:
    line = (row.key.learner, row.key.incarnation, row.key.fragment)
    if fate.fate != "pending":
        found[*line, fate.fate] += 1
    found[*line, "tokens"] += row.tokens * (fate.fate == "merged")
    found[*line, "size_bytes"] += row.size_bytes
    found[*line, "seq"] = max(found[*line, "seq"], row.key.seq)
    found[*line, "cycle"] = max(found[*line, "cycle"], row.cycle)


@pytest.mark.parametrize("seed", range(20))
def test_sums_and_newer_rows_give_the_whole_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int):
    monkeypatch.setattr(totals, "STEP", 7)
    rng, db = random.Random(seed), database.open_ledger(tmp_path / "ledger")
    db.execute("PRAGMA synchronous=OFF")
    waiting: list[ContributionRow] = []
    seqs: Counter[tuple[int, str, int, int]] = Counter()
    for _ in range(300):
        what = rng.random()
        if what < 0.6:
            line = (rng.choice((1, 1, 2)), rng.choice("ab"), rng.randint(1, 3), rng.randint(0, 1))
            seqs[line] += 1
            row = contribution(*line[1:], seqs[line], rng.choice((1, 1 << 50)))
            at_once = FateRow(row.key, Fate.REFUSED, reason="garbage") if rng.random() < 0.1 else None
            shard_ledger.add_contribution(db, line[0], row, at_once)
            if at_once is None:
                waiting.append((line[0], row))
        elif what < 0.9 and waiting:
            generation, row = waiting.pop(rng.randrange(min(4, len(waiting))))
            shard_ledger.put_fates(
                db, generation, [FateRow(row.key, rng.choice((Fate.MERGED, Fate.MERGED, Fate.REFUSED)), 1)]
            )
        else:
            totals.add_up(db, rng.choice((1, 2)))
    for generation in (1, 2):
        while totals.add_up(db, generation):
            pass
        assert any(shard_ledger.totals(db, generation)), "some rows must be in the sums"
        whole: Counter[tuple[str, int, int, str]] = Counter()
        pending = 0
        for row, fate in shard_ledger.contributions(db, generation):
            _count(whole, row, fate)
            pending += fate.fate == "pending"
        found, left = sums(db, generation)
        assert found == +whole
        assert len(left) == pending


def test_a_pending_fate_holds_back_later_work(tmp_path: Path):
    db = database.open_ledger(tmp_path / "ledger")
    for seq in (1, 2, 3):
        shard_ledger.add_contribution(db, 1, contribution("a", 1, 0, seq, 5))
    shard_ledger.put_fates(db, 1, [FateRow(ContributionKey("a", 1, 0, seq), Fate.MERGED, 1) for seq in (1, 3)])
    assert not totals.add_up(db, 1)
    assert [t.merged for t in shard_ledger.totals(db, 1)] == [1]
    shard_ledger.put_fates(db, 1, [FateRow(ContributionKey("a", 1, 0, 2), Fate.REFUSED, 1)])
    totals.add_up(db, 1)
    assert [(t.merged, t.refused, t.seq) for t in shard_ledger.totals(db, 1)] == [(2, 1, 3)]


def test_a_start_reads_no_more_with_a_longer_history(tmp_path: Path):
    def instructions(path: Path, count: int) -> int:
        """Returns how many hundred SQLite instructions a start needs to read the contributions."""
        db = database.open_ledger(path)
        db.execute("BEGIN")
        for seq in range(1, count + 1):
            row = contribution("a", 1, seq % 2, seq, 5)
            shard_ledger.add_contribution(db, 1, row, FateRow(row.key, Fate.MERGED, seq))
        while totals.add_up(db, 1):
            pass
        shard_ledger.add_contribution(db, 1, contribution("b", 1, 0, 1, 5))
        db.execute("COMMIT")
        ticks = 0

        def tick() -> None:
            nonlocal ticks
            ticks += 1

        db.set_progress_handler(tick, 100)
        found, waiting = sums(db, 1)
        lineage.last_merge(db, Line(), 0)
        lineage.latest_norms(db, Line(), 0, 10)
        assert shard_ledger.contribution(db, 1, ContributionKey("a", 1, count % 2, count)) is not None
        assert len(list(shard_ledger.contributions(db, 1, "AND fate='pending'"))) == len(waiting) == 1
        condition = "AND fragment=? AND fate='merged' AND version>?"
        assert len(list(shard_ledger.contributions(db, 1, condition, (0, count - 4)))) == 2
        assert found["a", 1, 0, "merged"] == count // 2
        return ticks

    assert instructions(tmp_path / "long", 4000) <= instructions(tmp_path / "short", 400) + 2
