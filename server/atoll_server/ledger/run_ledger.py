"""The run's tables in the ledger: the learners, and the run's values, which include the session key.

Functions here read or write rows within their caller's transaction (see ledger_writer.py).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from atoll_server.ledger.database import checksum, verified
from atoll_server.ledger.rows import LearnerRow

# Keys of the run's values
VIEW = "view"  # in a shard's ledger: its newest view of the run
STAGED = "staged"  # in a shard's ledger: digest of all initial parameters, of which its directory contains a part
ATTACHED = "attached"  # in the registrar's ledger: the division into shards, with their addresses and directories
MOVED = "moved"  # the folder to which `atoll reshard` moved the run; a core no longer starts from this directory


def put_meta(db: sqlite3.Connection, key: str, value: Any) -> None:  # noqa: ANN401
    """Stores one of the run's values. value: a value that can be serialised as JSON."""
    values = (key, json.dumps(value))
    db.execute("INSERT OR REPLACE INTO meta VALUES (?,?,?)", (*values, checksum(values)))


def put_all_meta(db: sqlite3.Connection, meta: Mapping[str, Any]) -> None:
    """Stores several of the run's values."""
    for key, value in meta.items():
        put_meta(db, key, value)


def get_meta(db: sqlite3.Connection) -> dict[str, Any]:
    return {r[0]: json.loads(r[1]) for r in verified(db.execute("SELECT * FROM meta"), "meta", 2, named_by=1)}


def put_learner(db: sqlite3.Connection, row: LearnerRow) -> None:
    values = (row.name, row.region, row.incarnation, json.dumps(row.nonces), json.dumps(row.account), row.evicted)
    db.execute("INSERT OR REPLACE INTO learners VALUES (?,?,?,?,?,?,?)", (*values, checksum(values)))


def learners(db: sqlite3.Connection) -> list[LearnerRow]:
    """Returns all learners, sorted by name."""
    rows = verified(db.execute("SELECT * FROM learners ORDER BY name"), "learners", 6, named_by=3)
    return [LearnerRow(r[0], r[1], r[2], json.loads(r[3]), json.loads(r[4]), r[5]) for r in rows]
