"""Writes journal entries to a core's audit log."""

from __future__ import annotations

from typing import assert_never

from atoll_server.access.audit_log import AuditLog
from atoll_server.telemetry import entries
from atoll_server.telemetry.entries import Entry

LONGEST_NAME = 80


def audited(audit_log: AuditLog, entry: Entry, _now: float) -> None:
    """Writes an entry to the audit log if the entry's kind belongs there."""
    match entry:
        case entries.Joined():
            audit_log.moved(
                "joined", entry.learner, incarnation=str(entry.incarnation), region=entry.region, by=entry.by
            )
        case entries.Left():
            audit_log.moved("left", entry.learner, incarnation=str(entry.incarnation))
        case entries.JoinRefused() | entries.SessionRefused():
            learner, refused = entry.learner[:LONGEST_NAME], entry.refused
            audit_log.refused(
                "refused", entry.peer, learner=learner, status=refused.status.value, detail=refused.detail
            )
        case entries.CallLimited():
            audit_log.refused("limited", entry.peer, method=entry.method, detail=entry.detail)
        case entries.OperatorRefused():
            refused = entry.refused
            asked = entry.asked or "read"
            audit_log.refused(
                "operator refused", entry.peer, asked=asked, status=refused.status.value, detail=refused.detail
            )
        case entries.OperatorActed():
            audit_log.note(entry.action, operator=entry.operator, peer=entry.peer, **entry.what, **entry.outcome)
        case (
            entries.OfTheRun()
            | entries.Evicted()  # the audit log already contains the operator's action
            | entries.Readmitted()
            | entries.Silenced()
            | entries.Recovered()
            | entries.OfFronts()
            | entries.OfContributions()
            | entries.OfRounds()
        ):
            pass
        case _:
            assert_never(entry)
