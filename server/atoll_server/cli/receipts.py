"""Implements `atoll receipts`, which shows the receipts of contributions from a core or from a run's directory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from atoll_wire import outer_pb2 as pb
from atoll_wire.cli.output import Format, as_data, columns, show
from atoll_wire.contract import FATE_NAMES, FATES, Fate
from atoll_wire.errors import UsageError
from rich.markup import escape

from atoll_server.checkpoints.restore import LEDGER
from atoll_server.cli.operator_client import TIMEOUT_S, OperatorError, OperatorTarget, operator
from atoll_server.cli.run_directory import shard_number
from atoll_server.cli.tables import named_shards
from atoll_server.ledger import run_ledger, shard_ledger
from atoll_server.ledger.database import read_ledger
from atoll_server.operators.receipt_pages import logged_receipt
from atoll_server.rounds.liveness import named


def from_core(remote: OperatorTarget, learner: str, fate: str, last: int) -> list[pb.LoggedReceipt]:
    """Returns the newest `last` receipts from a core, newest first.

    Makes several calls, since the core limits the number of receipts per reply. Raises OperatorError, and UsageError
    if the run has no such learner.
    """
    found: list[pb.LoggedReceipt] = []
    before, missing = "", set[int]()
    wanted = FATES[_fate(fate)] if fate else pb.FATE_UNSPECIFIED
    with operator(remote) as stub:
        while len(found) < last:
            request = pb.ListReceiptsRequest(learner=learner, fate=wanted, limit=last - len(found), before=before)
            reply = stub.ListReceipts(request, timeout=TIMEOUT_S)
            missing |= set(reply.missing)
            if not reply.receipts:
                break
            found += reply.receipts
            before = reply.next
        if learner and not found:
            known = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).learners
            _check_learner(learner, [each.learner for each in known])
    if missing:
        print(
            f"warning: receipts are missing, because {named_shards(missing)} did not answer: try again later",
            file=sys.stderr,
        )
    return found


def from_directory(directory: Path, learner: str, fate: str, last: int) -> list[pb.LoggedReceipt]:
    """Returns the newest `last` receipts from the ledger of a core or a shard, newest first.

    A core may be using the ledger. Raises OperatorError, and UsageError if the run has no such learner.
    """
    path = directory / LEDGER
    if not path.is_file():
        raise OperatorError(f"{directory} holds no run: give the --dir of a core")
    wanted = _fate(fate) if fate else None
    with read_ledger(path) as db:
        shard = shard_number(run_ledger.get_meta(db))
        found = [logged_receipt(shard, *row) for row in shard_ledger.receipts(db, learner, wanted, 0, last)]
        if learner and not found:
            _check_learner(learner, [row.name for row in run_ledger.learners(db)])
        return found


def _check_learner(name: str, known: Sequence[str]) -> None:
    """Raises UsageError if the run has no learner with this name."""
    if name not in known:
        some = f"its learners are {named(sorted(known))}" if known else "no learner has joined it"
        raise UsageError(f'the run has no learner "{name}": {some}')


def _fate(name: str) -> Fate:
    for fate in FATES:
        if fate == name:
            return fate
    raise UsageError(f'--fate "{name}" is invalid: give pending, merged or refused')


COLUMNS = (
    "received (UTC)",
    "contribution",
    "tokens",
    "steps",
    "norm",
    "fate",
    "version",
    "weight",
    "staleness",
    "outcome",
)
NARROW = ("received (UTC)", "contribution", "fate", "outcome")


def show_receipts(receipts: Sequence[pb.LoggedReceipt], form: Format) -> None:
    """Prints receipts in the given order."""
    show([as_data(each) for each in receipts], form, lambda: columns(COLUMNS, NARROW, form, map(_cells, receipts)))


def _cells(each: pb.LoggedReceipt) -> tuple[str, ...]:
    receipt, merged = each.receipt, each.receipt.fate == pb.FATE_MERGED
    clipped = f" clipped to {each.clipped:.2f}" if each.clipped < 1 else ""
    return (
        datetime.fromtimestamp(each.accepted_at, UTC).strftime("%Y-%m-%d %H:%M:%S"),
        f"{receipt.learner}/{receipt.incarnation}/{receipt.fragment}/{receipt.seq}",
        f"{each.tokens:,}",
        str(each.steps),
        f"{each.norm:.3g}{clipped}",
        FATE_NAMES.get(receipt.fate, ""),
        str(receipt.version) if receipt.fate != pb.FATE_PENDING else "",
        f"{receipt.weight:.4f}" if merged else "",
        f"{receipt.staleness:.3g}" if merged else "",
        f"version {receipt.version}, weight {receipt.weight:.3f}" if merged else escape(receipt.reason),
    )
