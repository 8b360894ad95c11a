"""Writes journal entries to the core's log."""

from __future__ import annotations

from typing import assert_never

import structlog
from atoll_wire import outer_pb2 as pb

from atoll_server.telemetry import entries
from atoll_server.telemetry.entries import Entry

log = structlog.get_logger()

LONGEST_NAME = 80
AGAIN_S = 60.0  # shortest time between two warnings about refused contributions of one learner
NEAR = 0.9  # if more of a contribution counts, its learner's step times only varied
KNOWN = 1024  # limit on the learners whose refusals are counted


class JournalLog:
    """Writes a process's entries to its log.

    After an outage, all outstanding contributions of a learner may be refused within seconds. Within a minute, only the
    first of a learner's refusals is a warning, and the others have the level debug.
    """

    def __init__(self) -> None:
        self._refused: dict[str, tuple[float, int]] = {}  # by learner: time of the last warning, refusals since then

    def on(self, entry: Entry, now: float) -> None:
        """Writes an entry to the log if the entry's kind belongs there. now: monotonic seconds."""
        match entry:
            case entries.TurnedAway(learner, refused):
                told = {"status": refused.status.value, "detail": refused.detail}
                self._refusal("contribution turned away", learner[:LONGEST_NAME], now, **told)
            case entries.ArrivalRefused(fate):
                told = {"contribution": str(fate.key), "reason": fate.reason}
                self._refusal("contribution refused", fate.key.learner, now, **told)
            case _:
                _log(entry)

    def _refusal(self, what: str, learner: str, now: float, **told: str) -> None:
        """Logs a refusal as a warning, or at debug level within AGAIN_S seconds of the learner's last warning."""
        at, others = self._refused.get(learner, (-AGAIN_S, 0))
        if now - at < AGAIN_S:
            self._refused[learner] = (at, others + 1)
            log.debug(what, learner=learner, **told)
            return
        if len(self._refused) >= KNOWN:
            self._refused.clear()
        self._refused[learner] = (now, 0)
        log.warning(what, learner=learner, **told, **({"others_before": others} if others else {}))


def _log(entry: Entry) -> None:  # noqa: C901, PLR0912, PLR0915 - a case for each kind
    match entry:
        case entries.Restored(checkpoint, generation, backup):
            log.warning("restored: later work is lost", checkpoint=checkpoint, generation=generation, backup=backup)
        case entries.TakenUp(merges, pending, files):
            log.info("state restored", merges=merges, pending=pending, files_not_needed=files)
        case entries.InitialParameters(parameters, fragments):
            log.info("initial parameters accepted", parameters=parameters, fragments=fragments)
        case entries.InitialParametersRefused(detail, by_disk):
            say = log.error if by_disk else log.warning
            say("initial parameters refused", detail=detail)
        case entries.PauseChanged(reason):
            log.warning("run paused" if reason else "run resumed", **({"reason": reason} if reason else {}))
        case entries.SnapshotTaken(number, merges, size_bytes):
            log.info("snapshot taken", id=number, merges=merges, size_bytes=size_bytes)
        case entries.SnapshotFailed(error):
            log.error("the snapshot could not be written: check the disk", error=error)
        case entries.Joined(learner, region, incarnation, state=state):
            name = pb.JoinReply.State.Name(state).removeprefix("STATE_").lower()
            log.info("joined", learner=learner, incarnation=incarnation, region=region, state=name)
        case entries.Left(learner, incarnation):
            log.info("left", learner=learner, incarnation=incarnation)
        case entries.Evicted(learner, reason):
            log.warning("evicted", learner=learner, reason=reason)
        case entries.Readmitted(learner):
            log.warning("readmitted", learner=learner)
        case entries.FrontConnected() | entries.FrontSilenced():
            _log_front(entry)
        case entries.JoinRefused(learner, _, refused):
            log.warning("join refused", learner=learner[:LONGEST_NAME], detail=refused.detail)
        case entries.OperatorActed(action, operator, _, what):
            log.info(action, operator=operator, **what, **entry.outcome)
        case entries.UploadBegan(key, cycle, received):
            log.debug("receiving a contribution", contribution=str(key), cycle=cycle, received=received)
        case entries.Clamped(learner, tokens, steps, counted_tokens, counted_steps):
            counts = {"counted_tokens": counted_tokens, "counted_steps": counted_steps}
            text = "a contribution declares more work than its learner could have done"
            near = counted_tokens > NEAR * tokens and counted_steps > NEAR * steps
            (log.debug if near else log.warning)(text, learner=learner, tokens=tokens, steps=steps, **counts)
        case entries.Acknowledged(key):
            log.debug("contribution durable", contribution=str(key))
        case entries.RoundLapsed(lapse):
            log.info("round lapsed", fragment=lapse.fragment, cycle=lapse.cycle, reason=lapse.reason)
        case entries.Published(merge):
            shares = {str(share.key): round(share.weight, 4) for share in merge.shares}
            place = {"fragment": merge.fragment, "version": merge.version}
            log.debug("fragment merged", **place, reason=merge.reason, shares=shares)
        case entries.Started() | entries.Trouble() | entries.Silenced() | entries.Recovered():
            pass  # the server logs the start with its addresses; status and metrics show the others
        case entries.SessionRefused() | entries.CallLimited() | entries.OperatorRefused():
            pass  # the audit log contains these, and limits the lines per caller
        case entries.TurnedAway() | entries.ArrivalRefused() | entries.PendingRefused() | entries.OfRounds():
            pass  # `JournalLog` limits the lines about refusals
        case _:
            assert_never(entry)


def _log_front(entry: entries.FrontConnected | entries.FrontSilenced) -> None:
    if isinstance(entry, entries.FrontConnected):
        log.info("front connected", front=entry.front, region=entry.region, silent_s=round(entry.silent_s, 1))
    else:
        log.warning("front cut off: no message arrives", front=entry.front, learners=entry.learners)
