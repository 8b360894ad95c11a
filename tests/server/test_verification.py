"""A check of data that a start does not read: it names damage, and delays neither serving nor stopping."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from atoll_server.checkpoints import verification
from atoll_server.checkpoints.verification import RunVerifier
from atoll_server.ledger import database, shard_ledger
from atoll_server.ledger.rows import ContributionRow, FateRow
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.storage.disk import DISK
from atoll_wire.contract import Fate
from atoll_wire.process.clock import SYSTEM

INITIAL = b"initial parameters"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Returns a run with more contributions than are read at a time."""
    with closing(database.open_ledger(tmp_path / "ledger.sqlite")) as db, database.transaction(db):
        for seq in range(1, 2501):
            key = ContributionKey("a", 1, 0, seq)
            row = ContributionRow(key, 1, 0, 5, 1, 3, 1, 10, bytes(32), (1.5,), 1.0, 7.0)
            shard_ledger.add_contribution(db, 1, row, FateRow(key, Fate.MERGED, seq))
    (tmp_path / "initial.safetensors").write_bytes(INITIAL)
    return tmp_path


def said(directory: Path) -> list[str]:
    """Returns the descriptions of damage from a complete check."""
    found: list[str] = []
    one = RunVerifier(directory, DISK, SYSTEM, found.append)
    one.begin(hashlib.sha256(INITIAL).hexdigest())
    one._thread.join(30)
    assert not one._thread.is_alive()
    return found


def test_valid_files_are_not_reported(run: Path, monkeypatch: pytest.MonkeyPatch):
    assert said(run) == []
    monkeypatch.setattr(database, "CHECKED_AT_ONCE_BYTES", 0)
    assert said(run) == []


def change(statement: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        with closing(sqlite3.connect(directory / "ledger.sqlite")) as db, db:
            assert db.execute(statement).rowcount == 1, "the statement must damage a row"

    return damage


def page(directory: Path) -> None:
    path = directory / "ledger.sqlite"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)


def parameters(directory: Path) -> None:
    (directory / "initial.safetensors").write_bytes(INITIAL.upper())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            change("UPDATE contributions SET tokens=7 WHERE seq=2400"),
            "a row of the ledger table contributions does not match",
        ),
        (change("UPDATE contributions SET fate='refused' WHERE seq=2400"), "does not match its checksum"),
        (change("UPDATE contributions SET learner=CAST(x'e1' AS TEXT) WHERE seq=2400"), "UTF-8"),
        (page, "is damaged"),
        (parameters, "initial.safetensors does not match its checksum"),
        (lambda directory: (directory / "initial.safetensors").unlink(), "No such file"),
    ],
)
def test_damage_is_named(run: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], says: str):
    monkeypatch.setattr(database, "CHECKED_AT_ONCE_BYTES", 0)
    damage(run)
    found = said(run)
    assert any(says in each for each in found), found
    assert not any("\n" in each for each in found)
    assert all(each.endswith("backup, but first export the model and check the disk") for each in found), found


def test_a_stop_does_not_wait_for_a_long_check(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verification, "ROWS", 1)
    monkeypatch.setattr(verification, "REST", 1e9)
    one = RunVerifier(run, DISK, SYSTEM, print)
    one.begin("")
    began = time.monotonic()
    one.end()
    assert time.monotonic() - began < 2 * verification.MAX_WAIT_S
    assert not one._thread.is_alive(), "the check must hear of the stop"
