"""PURE: converts the core's messages to the models of the JSON API."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import FATE_NAMES, LearnerState, LinkState

from atoll_dashboard.models.api_models import (
    Answer,
    Checkpoint,
    Counts,
    Dot,
    Fragment,
    Goodput,
    Learner,
    Link,
    Outcome,
    Receipt,
    Restored,
    Round,
    Units,
    Wire,
)

_ORDER = (
    LearnerState.SILENT,
    LearnerState.CUT_OFF,
    LearnerState.JOINING,
    LearnerState.PAUSED,
    LearnerState.LIVE,
    LearnerState.EVICTED,
    LearnerState.LEFT,
)
TROUBLE_FIRST = {state: place for place, state in enumerate(_ORDER)}
OUTCOMES: dict[int, Outcome] = {
    pb.ROUND_OUTCOME_OPEN: "open",
    pb.ROUND_OUTCOME_MERGING: "merging",
    pb.ROUND_OUTCOME_MERGED: "merged",
    pb.ROUND_OUTCOME_LAPSED: "lapsed",
}
NAMES = 16  # limit on the names of learners behind a link
GOES_ON = {pb.ROUND_OUTCOME_OPEN, pb.ROUND_OUTCOME_MERGING}


def known(value: float) -> float | None:
    """Returns the value, or None for 0 and NaN, which stand for an unknown value in messages."""
    return value if value and math.isfinite(value) else None


def moment(at: float) -> float | None:
    """Returns a time rounded to milliseconds, or None if the time is unknown.

    The core computes such times from two clocks, so their last digits vary between answers.
    """
    return known(round(at, 3))


def codec(number: int) -> str:
    """Returns the name of a codec."""
    return pb.Codec.Name(number).removeprefix("CODEC_").lower() if number in pb.Codec.values() else "unknown"


def states(learners: Iterable[pb.LearnerStatus]) -> dict[LearnerState, int]:
    """Returns the number of learners in each state, including states without learners."""
    found = Counter(each.state for each in learners)
    return {state: found[state] for state in LearnerState}


def goodput(told: pb.Goodput, recent: float | None) -> Goodput:
    return Goodput(
        ratio=told.ratio,
        recent=recent,
        useful_s=told.useful_s,
        provisioned_s=told.provisioned_s,
        lost_s=dict(told.lost_s),
    )


def counts(told: pb.Contributions) -> Counts:
    return Counts(
        accepted=told.accepted,
        merged=told.merged,
        pending=told.pending,
        refused=told.refused,
        turned_away=told.turned_away,
    )


def units(told: pb.DatasetStatus) -> Units:
    return Units(
        name=told.name,
        units=told.units,
        epochs=told.epochs,
        epoch=told.epoch,
        consumed=told.consumed,
        leased=told.leased,
        returned=told.returned,
        repeated=told.repeated,
        lost=told.lost,
    )


def wire(told: pb.WireBytes, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> Wire:
    return Wire(
        up_bytes=told.up,
        down_bytes=told.down,
        whole_bytes=told.whole,
        up_bytes_per_s=up_bytes_per_s,
        down_bytes_per_s=down_bytes_per_s,
        up_bits=8 * told.up / told.up_parameters if told.up_parameters else None,
        down_bits=8 * told.down / told.down_parameters if told.down_parameters else None,
    )


def state(told: pb.LearnerStatus) -> LearnerState:
    """Returns a learner's state, or JOINING for a state that only a newer core knows."""
    return next((known for known in LearnerState if known == told.state), LearnerState.JOINING)


def loss(learners: Iterable[pb.LearnerStatus]) -> float | None:
    """Returns the mean loss of the learners that train. If none does, returns the loss of the one that trained last."""
    told = [each for each in learners if math.isfinite(each.loss)]
    training = [each.loss for each in told if each.state in {LearnerState.LIVE, LearnerState.PAUSED}]
    if training:
        return sum(training) / len(training)
    return max(told, key=lambda each: each.since).loss if told else None


def dot(told: pb.LearnerStatus, lost_s: float) -> Dot:
    return Dot(
        learner=told.learner, state=state(told), since=known(told.since), uploading=told.uploading, lost_s=lost_s
    )


def links_by_region(links: Iterable[pb.LinkStatus]) -> dict[str, list[pb.LinkStatus]]:
    """Returns the links of each region: fronts first, then those that are not connected."""
    found: defaultdict[str, list[pb.LinkStatus]] = defaultdict(list)
    for each in sorted(links, key=lambda each: (not each.front, each.state == LinkState.CONNECTED, each.name)):
        found[each.region].append(each)
    return found


def link(told: pb.LinkStatus) -> Link:
    return Link(
        name=told.name,
        front=told.front,
        state=next((known for known in LinkState if known == told.state), LinkState.UNKNOWN),
        heard_age_s=known(told.heard_s),
        round_trip_s=known(told.round_trip_s),
        byte_age_s=known(told.byte_s),
        up_bytes_per_s=told.up_bytes_per_s,
        down_bytes_per_s=told.down_bytes_per_s,
        learners=len(told.learners),
        learner_names=sorted(told.learners)[:NAMES],
        budget_s=told.budget_s if told.HasField("budget_s") else None,
        trouble=told.trouble,
    )


def learner(told: pb.LearnerStatus, tokens_per_s: float | None) -> Learner:
    return Learner(
        learner=told.learner,
        region=told.region,
        state=state(told),
        since=known(told.since),
        incarnation=told.incarnation,
        steps=told.steps,
        tokens=told.tokens,
        tokens_per_s=tokens_per_s,
        loss=known(told.loss),
        step_time_s=known(told.step_time_s),
        last_seen_age_s=told.last_seen_age_s,
        blocked_fraction=told.blocked_fraction,
        goodput=told.goodput.ratio,
        provisioned_s=told.goodput.provisioned_s,
        lost_s=dict(told.goodput.lost_s),
        lost_total_s=told.goodput.provisioned_s - told.goodput.useful_s,
        pending=told.pending,
        waiting_for=told.waiting_for,
        up_bytes=told.wire.up,
        down_bytes=told.wire.down + told.wire.whole,
    )


def fragment(told: pb.FragmentStatus, shard: int) -> Fragment:
    return Fragment(
        fragment=told.fragment,
        shard=shard,
        parameters=told.parameters,
        size_bytes=4 * told.parameters,
        version=told.version,
        cycle=told.cycle,
        state=told.state,
        published_age_s=known(told.published_s),
    )


def answer(told: pb.Answer) -> Answer:
    return Answer(
        learner=told.learner,
        began_at=moment(told.began_at),
        durable_at=moment(told.durable_at),
        adopted_at=moment(told.adopted_at),
        declined=told.declined,
        late=told.late,
        weight=known(told.weight),
        staleness=told.staleness if told.weight else None,
    )


def round_of(told: pb.Round) -> Round:
    return Round(
        fragment=told.fragment,
        cycle=told.cycle,
        version=told.version or None,
        outcome=OUTCOMES.get(told.outcome, "open"),
        reason=told.reason,
        opened_at=round(told.opened_at, 3),
        quorum_at=moment(told.quorum_at),
        closed_at=moment(told.closed_at),
        merged_at=moment(told.merged_at),
        published_at=moment(told.published_at),
        answers=[answer(each) for each in told.answers],
        more_answers=told.more_answers,
    )


def receipt(told: pb.LoggedReceipt) -> Receipt:
    key = told.receipt
    return Receipt(
        shard=told.shard,
        number=told.number,
        key=f"{key.learner}/{key.incarnation}/{key.fragment}/{key.seq}",
        learner=key.learner,
        fragment=key.fragment,
        accepted_at=told.accepted_at,
        tokens=told.tokens,
        steps=told.steps,
        size_bytes=told.size_bytes,
        norm=told.norm,
        clipped=told.clipped,
        fate=FATE_NAMES.get(key.fate, "pending"),  # type: ignore[arg-type]
        version=key.version,
        weight=key.weight,
        staleness=key.staleness,
        reason=key.reason,
    )


def checkpoint(told: pb.Checkpoint) -> Checkpoint:
    return Checkpoint(
        id=told.id,
        taken_at=told.taken_at,
        merges=sum(told.versions.values()),
        size_bytes=told.size_bytes,
        generation=told.generation,
    )


def restored(status: pb.StatusReply) -> Restored | None:
    """Returns the restore that began the current generation, or None in the first generation."""
    if not status.HasField("restored"):
        return None
    told = status.restored
    return Restored(
        checkpoint=told.checkpoint,
        at=told.at,
        backup_at=told.backup_at or None,
        undone_tokens=told.undone_tokens,
    )
