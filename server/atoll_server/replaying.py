"""A recorded run again, from its ledger alone: as it was, byte for byte, or as other outer settings had made it."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from atoll_wire.layout import Layout

from atoll_server import ledger, merge
from atoll_server.disk import DISK
from atoll_server.events import Key
from atoll_server.merge import FragmentState
from atoll_server.offline import open_ledger, read_run
from atoll_server.process import SettingsError
from atoll_server.restore import (
    INITIAL,
    check_initial,
    check_merge,
    contribution_of,
    initial_states,
    merge_again,
    stored_layout,
)
from atoll_server.rows import MergeRow
from atoll_server.settings import RunSettings
from atoll_server.spool import Spool, SpoolError
from atoll_server.tensorfile import TensorFile, open_tensors

WHAT_IF = ("outer_lr", "outer_momentum", "outer_warm_up", "staleness_exponent", "codec")

Tell = Callable[[int, int], None]  # merges so far, and in all


@dataclass(frozen=True, slots=True)
class Replayed:
    """The last state of every fragment, and how it compares with what a core would start with.

    identical: every bit of every fragment. apart: the norm of the difference of what is published, relative to how far
    the recorded run moved from its first parameters.
    """

    layout: Layout
    initial: TensorFile
    states: list[FragmentState]
    merges: int
    identical: bool
    apart: float


def replay(directory: Path, changes: Sequence[str], tell: Tell) -> Replayed:
    """Makes every merge again, from the first parameters. changes: NAME=VALUE; none: each is checked with the ledger.

    With changes, contributions stay those that were recorded, of learners that had trained from other anchors.
    Raises SettingsError, LedgerError, SpoolError, TensorFileError.
    """
    with closing(open_ledger(directory)) as db:
        meta = ledger.get_meta(db)
        wanted = _settings(RunSettings.model_validate(meta["settings"]), changes)
        layout, generation = stored_layout(meta), meta["generation"]
        initial = open_tensors(directory / INITIAL, DISK)
        check_initial(initial.path, meta["initial_sha256"], DISK)
        states, first = initial_states(layout, initial), initial_states(layout, initial)
        spool = Spool(directory / "spool", limit_bytes=0, kept_bytes=0, disk=DISK)
        rows = [row for f in layout.fragments for row in ledger.merges(db, generation, f.index, after=0)]
        for count, row in enumerate(rows, start=1):
            asked = _asked(db, generation, row, wanted) if changes else row
            try:
                merged = merge_again(db, spool, generation, layout.fragments[row.fragment], states[row.fragment], asked)
            except SpoolError as error:
                text = f"{error}. A run can be replayed when its core was started with --record from its beginning"
                raise SpoolError(text) from error
            if not changes:
                check_merge(merged, row)
            states[row.fragment] = merged.state
            tell(count, len(rows))
    recorded = read_run(directory).states
    return Replayed(layout, initial, states, len(rows), _identical(states, recorded), _apart(states, recorded, first))


def _settings(recorded: RunSettings, changes: Sequence[str]) -> RunSettings:
    """The run's, as they were at its end, with what is asked for."""
    given: dict[str, str] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in WHAT_IF:
            raise SettingsError(f'--set "{change}": give NAME=VALUE with one of {", ".join(WHAT_IF)}')
        given[name] = value.strip()
    return recorded.changed(**given)


def _asked(db: sqlite3.Connection, generation: int, row: MergeRow, wanted: RunSettings) -> MergeRow:
    """A merge with other settings than it had."""
    rule = {"lr": wanted.outer_lr, "momentum": wanted.momentum_at(row.version), "codec": int(wanted.codec)}
    sent = [contribution_of(db, generation, Key(s[0], s[1], row.fragment, s[2])) for s in row.shares]
    exponent = wanted.staleness_exponent
    weights = [merge.weight(c.tokens, c.steps, s[4], exponent) for c, s in zip(sent, row.shares, strict=True)]
    shares = tuple((*s[:3], w / math.fsum(weights), s[4]) for s, w in zip(row.shares, weights, strict=True))
    return replace(row, rule=rule, shares=shares)


def _identical(states: Sequence[FragmentState], recorded: Sequence[FragmentState]) -> bool:
    return all(
        (ours.version, ours.theta.tobytes(), ours.theta_pub.tobytes(), ours.momentum.tobytes())
        == (theirs.version, theirs.theta.tobytes(), theirs.theta_pub.tobytes(), theirs.momentum.tobytes())
        for ours, theirs in zip(states, recorded, strict=True)
    )


def _apart(states: Sequence[FragmentState], recorded: Sequence[FragmentState], first: Sequence[FragmentState]) -> float:
    apart = _distance(states, recorded)
    return apart / moved if (moved := _distance(recorded, first)) else 0.0


def _distance(some: Sequence[FragmentState], others: Sequence[FragmentState]) -> float:
    pairs = zip(some, others, strict=True)
    return math.sqrt(sum(float(np.square(a.theta_pub.astype(np.float64) - b.theta_pub).sum()) for a, b in pairs))
