"""Converts the state and the newest rounds of a run to messages for operators."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice

from atoll_wire import outer_pb2 as pb

from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.goodput import GoodputTotals, total_goodput
from atoll_server.learners.learner_registry import RegistryEntry
from atoll_server.links.links import Front
from atoll_server.processes.core_process import CoreFacts
from atoll_server.rounds.liveness import named
from atoll_server.rounds.round_state import Phase
from atoll_server.run.known_run import KnownRun, Waiting
from atoll_server.run.registrar import Registrar
from atoll_server.run.summaries import contribution_counts, fragment_statuses, pending_by_learner
from atoll_server.run.troubles import troubles
from atoll_server.run.watch import liveness_of, state_of
from atoll_server.settings import CoreSettings
from atoll_server.shard.shard import Shard
from atoll_server.telemetry.timeline import Answer, Round, Timeline, slowest

Answered = Mapping[int, set[str]]


def status(run: Registrar, settings: CoreSettings, facts: CoreFacts, since: Mapping[str, float]) -> pb.StatusReply:
    """Returns the data for `atoll status`. since: time when each learner's state began, on the run's clock."""
    now = run.clock.monotonic()
    wall = run.clock.at(now)
    entries = sorted(run.registry.entries.values(), key=lambda entry: entry.name)
    answered = _answered(run)
    balances = [entry.account.balance(wall) for entry in entries]
    pending = Counter[str]() if run.shard is None else pending_by_learner(run.shard)
    for shard in run.attached.all():
        pending.update(shard.pending)
    reply = pb.StatusReply(
        run=run.run_id,
        generation=run.generation,
        epoch=run.epoch,
        uptime_s=now - facts.started_at,
        wall_s=wall - min((entry.account.first_joined_at for entry in entries), default=wall),
        settings=run.settings_message(),
        learners=[
            _learner(run, entry, balance, now, pending[entry.name], answered, since.get(entry.name, 0.0))
            for entry, balance in zip(entries, balances, strict=True)
        ],
        goodput=_goodput(total_goodput(balances)),
        tokens_trained=trained_tokens(run),
        wire=_wire(entries),
        at=wall,
        paused=run.paused,
        accepts_tokens=settings.operator_tokens is not None,
        wan_budget_bytes=round(settings.wan_budget_gb * 1e9),
    )
    reply.datasets.extend(_datasets(run))
    if run.line.beginnings:
        begun = run.line.beginnings[0]
        reply.restored.CopyFrom(
            pb.Restored(
                checkpoint=run.restored_checkpoint(),
                at=begun.at,
                backup_at=begun.backup_at,
                undone_tokens=sum(entry.account.undone_tokens for entry in entries),
            )
        )
    if run.shard is not None:
        _add_fragments(run, run.shard, reply, now)
    reply.shards.extend(_shards(run, now))
    reply.links.extend(_links(run, now))
    reply.troubles.extend(trouble.text for trouble in troubles(run, facts.damage, now))
    return reply


def _datasets(run: Registrar) -> list[pb.DatasetStatus]:
    parameters = max(1, run.data.parameters)
    return [
        pb.DatasetStatus(
            name=each.declared.name,
            units=each.declared.units,
            epochs=each.declared.epochs,
            tokens=each.declared.tokens,
            epoch=each.epoch,
            consumed=each.consumed,
            leased=each.leased,
            returned=len(each.pool),
            repeated=each.repeated / parameters,
            lost=each.lost / parameters,
        )
        for each in run.data.datasets.values()
    ]


def trained_tokens(run: Registrar) -> int:
    """Returns the number of tokens that all learners have trained on.

    Merged tokens count even if their learner died before it reported them.
    """
    return max(run.registry.tokens(), math.ceil(merged_tokens(run)))


def merged_tokens(run: Registrar) -> float:
    """Returns the number of merged tokens, averaged over all parameters. It never exceeds `trained_tokens`.

    Returns 0 before the run has parameters.
    """
    if isinstance(run.state, Waiting) or run.layout is None:
        return 0.0
    merged = sum(entry.account.merged_token_parameters for entry in run.registry.entries.values())
    return merged / run.layout.parameters


def _add_fragments(run: Registrar, own: Shard, reply: pb.StatusReply, now: float) -> None:
    assert run.layout is not None, "a run with a shard has a layout"
    reply.parameters = run.layout.parameters
    reply.tokens_merged = merged_tokens(run)
    reply.contributions.CopyFrom(contribution_counts(run))
    fragments = list(fragment_statuses(own, now))
    for shard in run.attached.all():
        away_s = now - shard.heard_at
        for known in shard.summary.fragments:
            seen = pb.FragmentStatus()
            seen.CopyFrom(known)
            seen.published_s += away_s if seen.published_s else 0.0
            if shard.outbox is None:
                seen.state = f"shard {shard.number} is not attached"
            fragments.append(seen)
        counts = shard.summary.contributions
        reply.contributions.accepted += counts.accepted
        reply.contributions.merged += counts.merged
        reply.contributions.refused += counts.refused
        reply.contributions.pending += counts.pending
        reply.contributions.turned_away += counts.turned_away
    reply.merges = sum(each.version for each in fragments)
    reply.fragments.extend(sorted(fragments, key=lambda each: each.fragment))


def _shards(run: Registrar, now: float) -> list[pb.ShardStatus]:
    """Returns the run's shards in order, or none if one core has all fragments."""
    attached = run.attached
    if not attached.remote:
        return []
    own = [] if run.shard is None else sorted(run.shard.fragments)
    shards = {attached.own: pb.ShardStatus(shard=attached.own, attached=True, fragments=own)}
    for number in attached.remote:
        shards[number] = pb.ShardStatus(shard=number)
    for each in attached.all():
        shards[each.number] = pb.ShardStatus(
            shard=each.number,
            address=each.address,
            attached=each.outbox is not None,
            fragments=each.fragments,
            heard_s=now - each.heard_at if each.heard_at else 0.0,
        )
    return [shards[number] for number in sorted(shards)]


def _links(run: Registrar, now: float) -> Iterator[pb.LinkStatus]:
    pace = run.pace(now)
    for link in run.links.all:
        up, down = link.rates(now)
        moved_at = link.traffic.moved_at
        yield pb.LinkStatus(
            name=link.name,
            region=link.region,
            front=link.front,
            state=link.state(now),
            heard_s=0.0 if link.heard_at is None else max(0.001, now - link.heard_at),
            round_trip_s=link.round_trip_s,
            byte_s=0.0 if moved_at is None else max(0.001, now - moved_at),
            up_bytes_per_s=up,
            down_bytes_per_s=down,
            learners=link.learners,
            budget_s=link.budget_s(pace, now),
            bytes_up=link.traffic.up,
            bytes_down=link.traffic.down,
            trouble=link.trouble(pace, now) if isinstance(link, Front) else "",
        )


def _learner(
    run: Registrar,
    entry: RegistryEntry,
    balance: GoodputTotals,
    now: float,
    pending: int,
    answered: Answered,
    since: float,
) -> pb.LearnerStatus:
    account = entry.account
    observed = liveness_of(run, entry.name)
    there = account.total("stepping_s") + account.total("blocked_s")
    return pb.LearnerStatus(
        learner=entry.name,
        region=entry.region,
        incarnation=entry.incarnation,
        state=state_of(run, entry, now),
        steps=account.total("steps"),
        tokens=account.total("tokens"),
        loss=account.latest_loss(),
        step_time_s=observed.step_time_s or 0.0 if observed is not None else 0.0,
        last_seen_age_s=max(0.0, run.clock.at(now) - account.heard_at),  # the syncer's own time begins with the core
        blocked_fraction=account.total("blocked_s") / there if there > 0 else 0.0,
        waiting_for=_waited_for(run, entry, answered, now),
        goodput=_goodput(balance),
        pending=pending,
        wire=_wire([entry]),
        recovery=pb.Recovery(**asdict(entry.recovery)),
        since=since,
        uploading=bool(observed.uploading) if observed is not None else False,
    )


def _waited_for(run: Registrar, entry: RegistryEntry, answered: Answered, now: float) -> str:
    if entry.evicted:
        return f"nothing: it was evicted ({entry.evicted})"
    if isinstance(run.state, Waiting):
        return "the initial parameters"
    observed = liveness_of(run, entry.name)
    if observed is None or not observed.live(now):  # rounds wait only for live learners
        return ""
    missing = [str(fragment) for fragment, names in answered.items() if entry.name not in names]
    return f"its answer for fragment{'s' * (len(missing) > 1)} {named(missing)}" if missing else ""


def _answered(run: Registrar) -> Answered:
    """Returns the learners that have answered, keyed by fragment with an open round."""
    if run.shard is None:
        return {}
    fragments = run.shard.fragments.items()
    return {index: each.rounds.answered() for index, each in fragments if each.rounds.phase is Phase.OPEN}


def _goodput(balance: GoodputTotals) -> pb.Goodput:
    return pb.Goodput(
        ratio=balance.ratio, useful_s=balance.useful_s, provisioned_s=balance.provisioned_s, lost_s=balance.lost_s
    )


def _wire(entries: list[RegistryEntry]) -> pb.WireBytes:
    accounts = [entry.account for entry in entries]
    return pb.WireBytes(
        up=sum(account.bytes_up for account in accounts),
        down=sum(account.down()[0] for account in accounts),
        up_parameters=sum(account.parameters_up for account in accounts),
        down_parameters=sum(account.down()[1] for account in accounts),
        whole=sum(account.whole() for account in accounts),
    )


# ---------------------------------------------------------------------------------- rounds

MAX_ANSWERS = 64  # limit on the answers reported for one round
LARGEST_NAME = 64


def list_rounds(run: KnownRun, timeline: Timeline, request: pb.ListRoundsRequest) -> pb.ListRoundsReply:
    """Returns the newest rounds, newest first. Raises Refused if the requested learner name is too long."""
    reply = pb.ListRoundsReply()
    if len(request.learner) > LARGEST_NAME:
        raise Refused(Status.INVALID_ARGUMENT, "the learner name is too long: names have at most 64 characters")
    for seen in islice(timeline.newest(), request.last or None):
        reply.rounds.append(_round(run, seen, request))
    return reply


def joined_rounds(
    replies: Sequence[pb.ListRoundsReply], missing: Sequence[int], request: pb.ListRoundsRequest
) -> pb.ListRoundsReply:
    """Returns the newest rounds of all shards, newest first. missing: numbers of the shards that did not reply."""
    found = sorted((each for reply in replies for each in reply.rounds), key=lambda each: -each.opened_at)
    return pb.ListRoundsReply(rounds=found[: request.last or None], missing=missing)


def _round(run: KnownRun, seen: Round, request: pb.ListRoundsRequest) -> pb.Round:
    now = run.clock.monotonic()

    def wall(at: float | None) -> float:
        return 0.0 if at is None else run.clock.at(at)

    open_now = seen.closed_at is None
    reason, quorum_at = seen.reason, seen.quorum_at
    if open_now:
        syncer = run.owner(seen.fragment)[0].syncer
        reason = syncer.why(seen.fragment, now)
        quorum_at = syncer.fragments[seen.fragment].quorum_at
    answers = [] if request.brief else slowest(seen, MAX_ANSWERS)
    if request.learner:
        answers = [(request.learner, seen.answers.get(request.learner, Answer()))]
    outcome = pb.ROUND_OUTCOME_MERGED if seen.published_at is not None else pb.ROUND_OUTCOME_MERGING
    told = pb.Round(
        fragment=seen.fragment,
        cycle=seen.cycle,
        version=seen.version,
        outcome=pb.ROUND_OUTCOME_OPEN if open_now else pb.ROUND_OUTCOME_LAPSED if seen.lapsed else outcome,
        reason=reason,
        opened_at=wall(seen.opened_at),
        closed_at=wall(seen.closed_at),
        merged_at=wall(seen.merged_at),
        quorum_at=wall(quorum_at),
        published_at=wall(seen.published_at),
        more_answers=max(0, len(seen.answers) - len(answers)),
    )
    for name, answer in answers:
        told.answers.add(
            learner=name,
            began_at=wall(answer.began_at),
            durable_at=wall(answer.durable_at),
            adopted_at=wall(answer.adopted_at),
            declined=answer.declined,
            late=answer.late,
            weight=answer.weight,
            staleness=answer.staleness,
        )
    return told
