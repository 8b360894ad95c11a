"""Maintains sums over contributions, so that a starting core reads only these sums and newer contributions.

Each row sums the contributions from one incarnation of a learner to one fragment. A contribution is added once all
contributions up to it are merged or refused. Functions here run within their caller's transaction.
"""

from __future__ import annotations

import sqlite3

from atoll_wire.contract import Fate

from atoll_server.ledger import shard_ledger
from atoll_server.ledger.rows import TotalsRow

STEP = 1000  # limit on the contributions that one transaction adds


def add_up(db: sqlite3.Connection, generation: int) -> bool:
    """Adds up to STEP contributions to the sums. Returns whether there may be more to add."""
    last = next(shard_ledger.totals(db, generation, "ORDER BY through DESC LIMIT 1"), None)
    lines: dict[tuple[str, int, int], TotalsRow] = {}
    count = 0
    for number, row, fate in shard_ledger.came_after(db, generation, last.through if last is not None else 0, STEP):
        if fate.fate is Fate.PENDING:
            break
        line = (row.key.learner, row.key.incarnation, row.key.fragment)
        if line not in lines:
            known = shard_ledger.totals(db, generation, "AND learner=? AND incarnation=? AND fragment=?", line)
            lines[line] = next(known, TotalsRow(*line))
        lines[line] = lines[line].plus(number, row, fate)
        count += 1
    for totals_row in lines.values():
        shard_ledger.put_totals(db, generation, totals_row)
    return count == STEP
