"""The tables of datasets, leases and leased units in the registrar's ledger.

Consumed units have no rows. A dataset's row contains the first position that was never handed out, and the returned
positions as runs. Functions here read or write rows within their caller's transaction (see ledger_writer.py).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from atoll_server.data.accounts import (
    Accounts,
    Changes,
    Dataset,
    Declared,
    Lease,
    LeasedUnit,
    Outcome,
    numbers_in,
    runs_of,
)
from atoll_server.ledger.database import checksum, verified


@dataclass(frozen=True, slots=True)
class DataRows:
    """Rows to write and to delete in one transaction. Later changes of the accounts do not affect them."""

    puts: tuple[tuple[str, tuple[Any, ...]], ...]  # table, values without the checksum
    deletes: tuple[tuple[str, tuple[int, ...]], ...]  # table, primary key


def rows_of(changes: Changes) -> DataRows:
    """Returns the rows of the changed accounts."""
    puts: list[tuple[str, tuple[Any, ...]]] = [("datasets", _dataset(each)) for each in changes.datasets.values()]
    deletes: list[tuple[str, tuple[int, ...]]] = []
    for number, lease in changes.leases.items():
        if lease is None:
            deletes.append(("leases", (number,)))
        else:
            values = (lease.id, lease.dataset, lease.learner, lease.incarnation, lease.handed, lease.ended)
            puts.append(("leases", values))
    for place, unit in changes.units.items():
        if unit is None:
            deletes.append(("leased_units", place))
        else:
            puts.append(("leased_units", (*place, unit.position, unit.outcome.value, unit.merged)))
    return DataRows(tuple(puts), tuple(deletes))


def _dataset(dataset: Dataset) -> tuple[Any, ...]:
    account = {
        "next": dataset.next,
        "pool": runs_of(dataset.pool),
        "consumed": dataset.consumed,
        "repeated": dataset.repeated,
        "lost": dataset.lost,
    }
    return dataset.id, json.dumps(asdict(dataset.declared)), json.dumps(account)


def _of_row(number: int, declared: str, account: str) -> Dataset:
    values = json.loads(account)
    return Dataset(number, Declared(**json.loads(declared)), **(values | {"pool": numbers_in(values["pool"])}))


def write(db: sqlite3.Connection, rows: DataRows) -> None:
    for table, values in rows.puts:
        marks = ",".join("?" * (len(values) + 1))
        db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", (*values, checksum(values)))  # noqa: S608 - constants
    for table, place in rows.deletes:
        where = "id=?" if table == "leases" else "lease=? AND ordinal=?"
        db.execute(f"DELETE FROM {table} WHERE {where}", place)  # noqa: S608 - constants


def copy(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """Copies all rows to another ledger, whose tables must be empty.

    Raises LedgerError if a checksum does not match.
    """
    for table, columns in (("datasets", 3), ("leases", 6), ("leased_units", 5)):
        for row in verified(source.execute(f"SELECT * FROM {table}"), table, columns, named_by=2):  # noqa: S608
            target.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(row))})", row)  # noqa: S608 - constants


def restore(db: sqlite3.Connection, accounts: Accounts) -> None:
    """Adds all rows to the accounts. Raises LedgerError if a checksum does not match."""
    datasets = verified(db.execute("SELECT * FROM datasets"), "datasets", 3, named_by=2)
    leases = verified(db.execute("SELECT * FROM leases"), "leases", 6)
    units = verified(db.execute("SELECT * FROM leased_units"), "leased_units", 5)
    accounts.restore(
        [_of_row(*r[:3]) for r in datasets],
        [Lease(*r[:6]) for r in leases],
        [LeasedUnit(r[0], r[1], r[2], Outcome(r[3]), r[4]) for r in units],
    )


# ------------------------------------------------------------------------------------------------- checkpoints


def as_data(accounts: Accounts) -> list[Any]:
    """Returns the datasets' accounts as JSON values for a checkpoint. A restore to the checkpoint ends all leases."""
    return [list(_dataset(each)) for each in accounts.concluded()]


def of_stopped_run(db: sqlite3.Connection, lengths: Mapping[int, int]) -> list[Any]:
    """Does the same as `as_data` for the accounts in a ledger. lengths: number of parameters in each fragment.

    A unit counts as returned if its merges are not in the accounts yet.
    """
    accounts = Accounts(lengths)
    restore(db, accounts)
    return as_data(accounts)


def roll_back(db: sqlite3.Connection, datasets: Iterable[Sequence[Any]]) -> None:
    """Replaces all accounts with those of a checkpoint. Ends all leases. datasets: the result of `as_data`."""
    for table in ("datasets", "leases", "leased_units"):
        db.execute(f"DELETE FROM {table}")  # noqa: S608 - constants
    write(db, DataRows(tuple(("datasets", tuple(values)) for values in datasets), ()))
