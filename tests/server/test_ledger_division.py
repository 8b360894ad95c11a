"""Rows of ledgers are divided by fragment, and a start counts the same work as before."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from atoll_server.data.accounts import Accounts, Changes, Declared, Lease
from atoll_server.ledger import data_ledger, database, ledger_division, shard_ledger, totals
from atoll_server.ledger.database import LedgerError
from atoll_server.ledger.rows import FateRow, MergeRow
from atoll_wire.contract import Fate

from tests.server.test_totals import contribution, sums

FRAGMENTS = 6


def ledger(path: Path, rng: random.Random, fragments: list[int]) -> sqlite3.Connection:
    """Returns a ledger with contributions. The sums include some of them, and others are pending."""
    db, waiting = database.open_ledger(path), []
    db.execute("PRAGMA synchronous=OFF")
    seqs: Counter[tuple[str, int, int]] = Counter()
    for at in range(200):
        if rng.random() < 0.7:
            line = (rng.choice("ab"), rng.randint(1, 2), rng.choice(fragments))
            seqs[line] += 1
            row = replace(contribution(*line, seqs[line], rng.randint(1, 9)), accepted_at=at + 5 * rng.random())
            shard_ledger.add_contribution(db, 1, row)
            waiting.append(row.key)
        elif waiting:
            key = waiting.pop(rng.randrange(min(4, len(waiting))))
            shard_ledger.put_fates(db, 1, [FateRow(key, rng.choice((Fate.MERGED, Fate.REFUSED)), 1)])
        if rng.random() < 0.02:
            totals.add_up(db, 1)
    for fragment in fragments:
        shares, rule = (("a", 1, 1, 1.0, 0.0),), {"lr": 0.7}
        shard_ledger.add_merge(db, 1, MergeRow(fragment, 1, 1, shares, rule, 5, 0, 1, 2, 3, 99, 7.0), [])
    return db


def order(db: sqlite3.Connection, fragment: int) -> list[tuple[object, ...]]:
    """Returns a fragment's contributions in order of arrival, with all columns."""
    return db.execute("SELECT * FROM contributions WHERE fragment=? ORDER BY rowid", (fragment,)).fetchall()


def divided(path: Path, owned: list[list[int]], sources: list[sqlite3.Connection]) -> list[sqlite3.Connection]:
    targets = [database.open_ledger(path / f"new{number}") for number in range(len(owned))]
    for db in targets:
        db.execute("PRAGMA synchronous=OFF")
    owners = {fragment: targets[number] for number, mine in enumerate(owned) for fragment in mine}
    ledger_division.divide_rows(sources, owners, 1)
    return targets


@pytest.mark.parametrize("seed", range(12))
def test_divided_rows_keep_their_bytes_order_and_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int):
    monkeypatch.setattr(totals, "STEP", 15)
    rng = random.Random(seed)
    split = [each for each in ([0, 1, 2], [3, 4], [5]) if each] if seed % 2 else [list(range(FRAGMENTS))]
    sources = [ledger(tmp_path / f"old{at}", rng, mine) for at, mine in enumerate(split)]
    owned = [[4, 0], [1, 2, 5], [3]] if seed % 3 else [list(range(FRAGMENTS))]
    targets = divided(tmp_path, owned, sources)
    ledger_division.check_counts(sources, targets)
    for targets_index, mine in enumerate(owned):
        for fragment in mine:
            [source] = [db for db, had in zip(sources, split, strict=True) if fragment in had]
            assert order(targets[targets_index], fragment) == order(source, fragment)
    before, after = (sum((sums(db, 1)[0] for db in group), Counter()) for group in (sources, targets))
    assert after == before
    assert sum(len(sums(db, 1)[1]) for db in targets) == sum(len(sums(db, 1)[1]) for db in sources) > 0
    for db in targets:
        shard_ledger.check_rows(db)
        assert shard_ledger.read_again(db, 0, 10_000)
        while totals.add_up(db, 1):
            pass
        assert +Counter(sums(db, 1)[0]), "the sums must continue"


def test_a_damaged_row_and_a_lost_row_are_found(tmp_path: Path):
    source = ledger(tmp_path / "old", random.Random(1), [0, 1])
    targets = divided(tmp_path, [[0], [1]], [source])
    targets[1].execute("DELETE FROM contributions WHERE rowid=1")
    with pytest.raises(LedgerError, match="the old ledgers have"):
        ledger_division.check_counts([source], targets)
    source.execute("UPDATE contributions SET tokens=tokens+1 WHERE rowid=3")
    (tmp_path / "again").mkdir()
    with pytest.raises(LedgerError, match="contributions does not match its checksum"):
        divided(tmp_path / "again", [[0, 1]], [source])


def test_accounts_of_data_units_are_copied(tmp_path: Path):
    source, target = (database.open_ledger(tmp_path / name) for name in ("old", "new"))
    accounts, changes = Accounts({0: 10, 1: 6}), Changes()
    dataset = accounts.add(Declared("text", 20, 0, 1, 1, ""), changes)
    lease = Lease(7, dataset.id, "a", 1)
    accounts.open_lease(lease, changes)
    accounts.hand_out(lease, 5, changes)
    data_ledger.write(source, data_ledger.rows_of(changes))
    data_ledger.copy(source, target)
    again = Accounts({0: 10, 1: 6})
    data_ledger.restore(target, again)
    assert again.datasets == accounts.datasets
    assert again.leases.keys() == {7}
    assert data_ledger.of_stopped_run(target, {0: 10, 1: 6}) == data_ledger.as_data(accounts)
    source.execute("UPDATE leases SET handed=9")
    with pytest.raises(LedgerError, match="leases does not match its checksum"):
        data_ledger.copy(source, database.open_ledger(tmp_path / "other"))
