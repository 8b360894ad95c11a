"""Named points between durable steps at which a test may kill the process. They have no effect in production."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

POINTS = (
    "start.directory taken",
    "start.epoch raised",
    "start.state restored",
    "join.row committed",
    "eviction.committed",
    "pause.committed",
    "units.leased",
    "units.decided",
    "initial.chunk written",
    "initial.synced",
    "initial.renamed",
    "initial.directory synced",
    "initial.committed",
    "stage.committed",
    "begun.committed",
    "spool.frame written",
    "spool.synced",
    "spool.renamed",
    "spool.directory synced",
    "spool.removed",
    "ledger.transaction begun",
    "ledger.rows written",
    "ledger.committed",
    "contribution.committed",
    "contribution.refused",
    "refusal.committed",
    "merge.computed",
    "merge.committed",
    "merge.published",
    "snapshot.begun",
    "snapshot.fragment written",
    "snapshot.synced",
    "snapshot.renamed",
    "snapshot.directory synced",
    "snapshot.committed",
    "snapshot.old forgotten",
    "snapshot.old removed",
    "kept.committed",
    "manifest.snapshots durable",
    "manifest.committed",
    "rollback.checked",
    "rollback.rows written",
    "rollback.committed",
    "reshard.written",
    "reshard.marked",
    "reshard.renamed",
    "backup.begun",
    "backup.ledger copied",
    "backup.file written",
    "backup.verified",
    "backup.recorded",
    "backup.renamed",
    "backup.old forgotten",
    "backup.old removed",
    "restoring.begun",
    "restoring.copied",
    "restoring.snapshot written",
    "restoring.rolled back",
    "restoring.finished",
)

_reached: Callable[[str], None] | None = None


def point(name: str) -> None:
    """Tells the watcher, if there is one, that the process has reached this point. name: one of POINTS."""
    if _reached is not None:
        _reached(name)


def watch(reached: Callable[[str], None] | None) -> None:
    """Sets a watcher, which is called with the name of each point that the process reaches.

    None removes the watcher.
    """
    global _reached  # noqa: PLW0603 - one process, one watcher
    _reached = reached


def kill_at(wanted: str) -> Callable[[str], None]:
    """Returns a watcher that sends SIGKILL to this process at a point.

    wanted: "spool.renamed" to kill the process when it first reaches this point, "spool.renamed:3" for the third time.
    """
    name, _, nth = wanted.partition(":")
    assert name in POINTS, f"{name} is not a crash point: {', '.join(POINTS)}"
    left = int(nth or 1)

    def reached(place: str) -> None:
        nonlocal left
        left -= place == name
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached
