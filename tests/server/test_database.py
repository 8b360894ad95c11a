"""Reading a ledger: while a core uses it, after the core's end, and on a read-only disk."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing

import pytest
from atoll_server.ledger.database import SCHEMA_VERSION, LedgerError, open_ledger, read_ledger, transaction


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a ledger?#%.sqlite"  # a URI must quote this name
    with closing(open_ledger(path)) as db, transaction(db):
        db.execute("INSERT INTO meta VALUES ('run', '\"r\"', 0)")
    return path


def _runs(path) -> list[str]:
    with read_ledger(path) as db:
        return [value for (value,) in db.execute("SELECT value FROM meta")]


def test_a_ledger_is_read_while_another_process_writes(path):
    with closing(open_ledger(path)) as db:
        assert _runs(path) == ['"r"']
        with transaction(db):
            db.execute("INSERT INTO meta VALUES ('more', '1', 0)")
            assert _runs(path) == ['"r"']
        assert len(_runs(path)) == 2


def test_a_read_ledger_refuses_writes(path):
    with pytest.raises(LedgerError, match="readonly"), read_ledger(path) as db:
        db.execute("DELETE FROM meta")


def test_a_ledger_on_a_read_only_disk_needs_no_further_files(path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name]
    with read_ledger(path) as db:
        assert db.execute("SELECT count(*) FROM meta").fetchone() == (1,)
        assert sorted(each.name for each in path.parent.iterdir()) == [path.name]


def test_unreadable_files_give_a_reason(path, tmp_path):
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION - 1}")
    with pytest.raises(LedgerError, match="use the version that wrote it"):
        _runs(path)
    path.write_bytes(b"")
    with pytest.raises(LedgerError, match="it is empty"):
        _runs(path)
    path.write_bytes(b"no ledger at all" * 1000)
    with pytest.raises(LedgerError, match="restore it from a backup"):
        _runs(path)
    with pytest.raises(LedgerError, match="permissions"):
        _runs(tmp_path / "gone.sqlite")
