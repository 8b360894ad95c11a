"""Replays a recorded run from its ledger, either byte for byte or with other outer settings."""

from __future__ import annotations

import itertools
import math
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from atoll_wire.cli.output import Format, show_lines
from atoll_wire.codec.block_kernels import F32
from atoll_wire.errors import UsageError
from atoll_wire.layout.layout import FragmentLayout, Layout

from atoll_server.checkpoints.restore import check_merge, initial_state, merge_again
from atoll_server.checkpoints.tensor_file import TensorFile
from atoll_server.cli.run_directory import ledger_of, read_run
from atoll_server.ledger import lineage, run_ledger
from atoll_server.ledger.rows import MergeRow
from atoll_server.merging.merge import FragmentState, MergeResult
from atoll_server.settings import RunSettings
from atoll_server.storage.disk import DISK
from atoll_server.storage.spool import Spool, SpoolError

WHAT_IF = ("outer_lr", "outer_momentum", "outer_warm_up", "staleness_exponent", "codec")

Tell = Callable[[int, int], None]  # arguments: number of merges so far, total number of merges


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay, compared with the state that a core would start with.

    identical: whether parameters and momentum are bitwise equal. snapshot: whether a snapshot could be read; if not,
    the compared state comes from the same ledger as the replay. apart: distance between the replayed and the recorded
    published parameters, as a fraction of the distance between the recorded run's initial and final parameters.
    """

    layout: Layout
    initial: TensorFile
    states: dict[int, FragmentState]
    merges: int
    identical: bool
    snapshot: bool
    apart: float


def replay(directory: Path, changes: Sequence[str], tell: Tell, generation: int | None = None) -> Replayed:
    """Repeats every merge of a run, or of one shard of a run, starting from the initial parameters.

    changes: settings to change, as NAME=VALUE; if empty, the replay compares each merge with the ledger's checksums.
    tell: called after each merge. generation: generation whose history is replayed; None for the current generation.
    Changes do not affect contributions, because learners trained from the recorded anchors. A core may use the
    directory during the replay. The replay omits merges that this core makes meanwhile. Raises UsageError, LedgerError,
    SpoolError or TensorFileError.
    """
    recorded = read_run(directory, check=True, generation=generation)
    layout, initial = recorded.layout, recorded.initial
    total, done = sum(state.version for state in recorded.states.values()), itertools.count(1)
    identical, apart, moved, states = True, 0.0, 0.0, dict[int, FragmentState]()
    with ledger_of(directory) as db:
        meta = run_ledger.get_meta(db)
        what_if = _WhatIf(RunSettings.model_validate(meta["settings"]), changes)
        spool = Spool(directory / "spool", limit_bytes=0, kept_bytes=0, disk=DISK)
        for fragment in (layout.fragments[index] for index in sorted(recorded.states)):
            theirs = recorded.states[fragment.index]
            state = initial_state(layout, initial, fragment)
            first = state.theta_pub.copy()
            for made_in, row in lineage.merges(db, recorded.line, fragment.index, after=0)[: theirs.version]:
                merged = _again(db, spool, made_in, fragment, state, what_if.of(row))
                if not changes:
                    check_merge(merged, row)
                state = merged.state
                tell(next(done), total)
            identical = identical and _identical(state, theirs)
            apart += _squared(state.theta_pub, theirs.theta_pub)
            moved += _squared(theirs.theta_pub, first)
            states[fragment.index] = state
    distance = math.sqrt(apart / moved) if moved else 0.0
    return Replayed(layout, initial, states, total, identical, bool(recorded.snapshots), distance)


def show_replayed(done: Replayed, changes: Sequence[str], out: Path | None, form: Format) -> None:
    """Prints the result of a replay. changes: as in `replay`. out: the written model, or None."""
    found = {
        "merges": done.merges,
        "changes": list(changes),
        "identical": done.identical,
        "snapshot": done.snapshot,
        "apart": done.apart,
        "out": None if out is None else str(out),
    }
    show_lines(found, form, _lines(done, changes, out))


def _lines(done: Replayed, changes: Sequence[str], out: Path | None) -> Iterator[str]:
    if changes:
        yield (
            f"{done.merges:,} merges repeated with {', '.join(changes)}: the final parameters differ from the recorded "
            f"ones by {100 * done.apart:.3g} % of the run's change"
        )
        if out is None:
            yield "to evaluate the result, write the model with --out PATH"
        return
    same = "the same, byte for byte" if done.identical else "NOT THE SAME"
    checked = f"{done.merges:,} merges repeated, all with the ledger's checksums"
    yield f"{checked}; the final parameters and momentum are {same}"
    if not done.snapshot:
        yield "no snapshot could be read, so the merges were compared only with the ledger's checksums"


def _again(
    db: sqlite3.Connection, spool: Spool, generation: int, fragment: FragmentLayout, state: FragmentState, row: MergeRow
) -> MergeResult:
    try:
        return merge_again(db, spool, generation, fragment, state, row)
    except SpoolError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise SpoolError(
            f"the payloads of version {row.version} of fragment {fragment.index} were deleted: a run can be replayed "
            "only if its core had --record from the start"
        ) from error


class _WhatIf:
    """The run's settings with the requested changes. Raises UsageError for a setting that is not in WHAT_IF."""

    def __init__(self, recorded: RunSettings, changes: Sequence[str]) -> None:
        given: dict[str, str] = {}
        for change in changes:
            name, equals, value = change.partition("=")
            name = name.strip().replace("-", "_")
            if not equals or name not in WHAT_IF:
                raise UsageError(
                    f'--set "{change}" is invalid: give NAME=VALUE, where NAME is one of {", ".join(WHAT_IF)}'
                )
            if name in given:
                raise UsageError(f"--set {name} is given twice: give each name once")
            given[name] = value.strip()
        self._names = given.keys()
        self._settings = recorded.changed(**given)

    def of(self, row: MergeRow) -> MergeRow:
        """Returns a merge's row after applying the changed settings."""
        rule, settings = dict(row.rule), self._settings
        lr, momentum = settings.outer_at(rule["age"], rule["heat"])
        if "outer_lr" in self._names:
            rule["lr"] = lr
        if self._names & {"outer_momentum", "outer_warm_up"}:
            rule["momentum"] = momentum
        if "codec" in self._names:
            rule["codec"] = int(settings.codec)
        if "staleness_exponent" not in self._names:
            return replace(row, rule=rule)
        lighter = rule["staleness_exponent"] - settings.staleness_exponent
        shares = tuple((*s[:3], s[3] * max(1.0, s[4]) ** lighter, s[4]) for s in row.shares)
        return replace(row, rule=rule, shares=shares)


def _identical(ours: FragmentState, theirs: FragmentState) -> bool:
    return all(
        getattr(ours, name).tobytes() == getattr(theirs, name).tobytes() for name in ("theta", "theta_pub", "momentum")
    )


def _squared(some: F32, others: F32) -> float:
    return float(np.square(some.astype(np.float64) - others).sum())
