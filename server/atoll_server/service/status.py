"""The state of a run as operators see it: one message, built at one moment."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice

from atoll_wire import outer_pb2 as pb

from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.accounts import Balance, overall
from atoll_server.learners.registry import Entry
from atoll_server.rounds.fragment_rounds import Phase
from atoll_server.rounds.liveness import NAMED, Member, named
from atoll_server.run.core import Core
from atoll_server.run.registrar import Registrar, Waiting
from atoll_server.shard.shard import Shard
from atoll_server.telemetry.timeline import Answer, Round, slowest

Answered = Mapping[int, set[str]]
MISSED = 4  # merges of each fragment at least without anything of a learner that trains, beyond which it is a trouble
OTHER_TOKENS = 20.0  # times the tokens per step of most of the others, or a part of them: the unit may be another
BEYOND = 1.02  # of the tokens that the run was to train: learners do not leave in the same moment


def status(core: Core) -> pb.StatusReply:
    """Everything that `atoll status` shows."""
    run = core.registrar
    wall, now = run.clock.wall(), run.clock.monotonic()
    entries = sorted(run.roster.entries.values(), key=lambda entry: entry.name)
    answered = _answered(run)
    balances = [entry.account.balance(wall) for entry in entries]
    pending = Counter(key.learner for shard in run.shards for each in shard.fragments.values() for key in each.held)
    reply = pb.StatusReply(
        run=run.run_id,
        generation=run.generation,
        epoch=run.epoch,
        uptime_s=now - core.started_at,
        wall_s=wall - min((entry.account.first_joined_at for entry in entries), default=wall),
        settings=run.settings_message(),
        learners=[
            _learner(core, entry, balance, now, pending[entry.name], answered)
            for entry, balance in zip(entries, balances, strict=True)
        ],
        goodput=_goodput(overall(balances)),
        tokens_trained=trained_tokens(run),
        wire=_wire(entries),
        at=wall,
        paused=run.paused,
        knows_tokens=core.settings.operator_tokens is not None,
        wan_budget_bytes=round(core.settings.wan_budget_gb * 1e9),
    )
    if run.line.beginnings:
        begun = run.line.beginnings[0]
        reply.restored.CopyFrom(pb.Restored(checkpoint=begun.checkpoint, at=begun.at))
    if run.shards:
        _add_fragments(run, reply, now)
    reply.troubles.extend(troubles(core))
    return reply


def troubles(core: Core) -> Iterator[str]:
    """What an operator should see to, a line each."""
    run = core.registrar
    if run.writer.full:
        yield "the disk is full: nothing is acknowledged until there is room"
    elif any(shard.spool.room_bytes == 0 for shard in run.shards):
        yield "the disk is nearly full: new contributions wait until there is room"
    if core.damage:
        yield core.damage
    if missing := _never_merged(run):
        yield (
            f"{named(missing)} trains, and nothing of it is merged: its answers come too late or are refused. "
            "`atoll receipts --learner NAME` says why; raise --overlap or --max-staleness, or give it a faster link"
        )
    yield from _odd_tokens(run)
    total, trained = run.settings.total_tokens, run.roster.tokens()
    if total and trained > BEYOND * total:
        yield f"{trained:,} of {total:,} tokens are trained, and outer steps are plain means: give more --total-tokens"


def trained_tokens(run: Registrar) -> int:
    """By all learners so far. What was merged was trained, also where its learner died before its next report."""
    return max(run.roster.tokens(), math.ceil(merged_tokens(run)))


def _odd_tokens(run: Registrar) -> Iterator[str]:
    """Learners whose tokens per step differ so much from the others' that they may count something else."""
    rates, now = run.roster.rates(run.clock.wall()), run.clock.monotonic()
    many, few = [], []
    for name in sorted(run.roster.entries):
        own, usual = rates.of(name), rates.usual(name)
        if own is None or usual is None or state_of(run, run.roster.entries[name], now) != "live":
            continue
        told = f"{name} reports {own.batch:,.0f} tokens per step, most of the others {usual.batch:,.0f}"
        if own.batch > OTHER_TOKENS * usual.batch:
            many.append(f"{told}: its work outweighs theirs")
        elif own.batch * OTHER_TOKENS < usual.batch:
            few.append(f"{told}: its work hardly counts")
    for told in (many or few)[:NAMED]:  # of two learners, each differs from the other
        yield f"{told}. Check that step(tokens=...) gets its own tokens, not bytes, sequences or those of all islands"


def _never_merged(run: Registrar) -> list[str]:
    """Learners that train, and of whose work nothing is merged, by name."""
    now = run.clock.monotonic()
    late = max(MISSED, 1 + run.settings.max_staleness)  # merges of each fragment
    names = sorted(run.roster.entries)
    missed = [
        name
        for name in names
        if any(shard.contributions.missed(name) > late * len(shard.fragments) for shard in run.shards)
    ]
    return [name for name in missed if state_of(run, run.roster.entries[name], now) == "live"]


def merged_tokens(run: Registrar) -> float:
    """Mean over parameters; never more than `trained_tokens`. 0 before there are parameters."""
    if isinstance(run.state, Waiting) or run.layout is None:
        return 0.0
    merged = sum(entry.account.merged_token_parameters for entry in run.roster.entries.values())
    return merged / run.layout.parameters


def member_of(run: Registrar, learner: str) -> Member | None:
    """What the syncers know of a learner."""
    return next((shard.syncer.members[learner] for shard in run.shards if learner in shard.syncer.members), None)


def state_of(run: Registrar, entry: Entry, now: float) -> str:
    """One word for people: joining, live, paused, silent, left or evicted."""
    member = member_of(run, entry.name)
    return "evicted" if entry.evicted else member.state(now) if member is not None else "joining"


def _add_fragments(run: Registrar, reply: pb.StatusReply, now: float) -> None:
    assert run.layout is not None, "a run with shards has a layout"
    reply.parameters = run.layout.parameters
    reply.tokens_merged = merged_tokens(run)
    reply.merges = sum(run.versions().values())
    counts: Counter[str] = Counter()
    for shard in run.shards:
        for index, fragment in shard.fragments.items():
            reply.fragments.add(
                fragment=index,
                parameters=fragment.place.length,
                version=fragment.rounds.version,
                cycle=fragment.rounds.cycle,
                state=shard.syncer.why(index, now),
                published_s=_since(fragment.published_at, now),
            )
        counts.update(shard.contributions.counts, pending=shard.pending())
    reply.contributions.CopyFrom(pb.Contributions(**counts))


def _learner(
    core: Core, entry: Entry, balance: Balance, now: float, pending: int, answered: Answered
) -> pb.LearnerStatus:
    account = entry.account
    member = member_of(core.registrar, entry.name)
    there = account.total("stepping_s") + account.total("blocked_s")
    return pb.LearnerStatus(
        learner=entry.name,
        region=entry.region,
        incarnation=entry.incarnation,
        state=state_of(core.registrar, entry, now),
        steps=account.total("steps"),
        tokens=account.total("tokens"),
        loss=entry.loss,
        step_time_s=member.step_time_s or 0.0 if member is not None else 0.0,
        heard_s=now - member.heard_at if member is not None else 0.0,
        blocked_fraction=account.total("blocked_s") / there if there > 0 else 0.0,
        waiting_for=_waited_for(core.registrar, entry, answered),
        goodput=_goodput(balance),
        pending=pending,
        wire=_wire([entry]),
        comeback=pb.Comeback(**asdict(entry.comeback)),
        since=core.diary.since.get(entry.name, 0.0),
        uploading=bool(member.uploading) if member is not None else False,
    )


def _since(at: float | None, now: float) -> float:
    return 0.0 if at is None else max(0.001, now - at)


def _waited_for(run: Registrar, entry: Entry, answered: Answered) -> str:
    if entry.evicted:
        return f"nothing: it was evicted, {entry.evicted}"
    if isinstance(run.state, Waiting):
        return "the first parameters"
    member = member_of(run, entry.name)
    if member is None or member.gone:
        return ""
    missing = [str(fragment) for fragment, names in answered.items() if entry.name not in names]
    return f"its answer for fragment {named(missing)}" if missing else ""


def _answered(run: Registrar) -> Answered:
    """By fragment with an open round, the learners that have answered: looked at once, however many there are."""
    return {
        index: fragment.rounds.answered()
        for shard in run.shards
        for index, fragment in shard.fragments.items()
        if fragment.rounds.phase is Phase.OPEN
    }


def _goodput(balance: Balance) -> pb.Goodput:
    return pb.Goodput(
        ratio=balance.ratio, useful_s=balance.useful_s, provisioned_s=balance.provisioned_s, lost_s=balance.lost_s
    )


def _wire(entries: list[Entry]) -> pb.WireBytes:
    accounts = [entry.account for entry in entries]
    return pb.WireBytes(
        up=sum(account.bytes_up for account in accounts),
        down=sum(account.bytes_down for account in accounts),
        up_parameters=sum(account.parameters_up for account in accounts),
        down_parameters=sum(account.parameters_down for account in accounts),
        whole=sum(account.bytes_whole for account in accounts),
    )


# ---------------------------------------------------------------------------------- rounds

MOST_ANSWERS = 64  # told of one round
LARGEST_NAME = 64


def list_rounds(run: Registrar, request: pb.ListRoundsRequest) -> pb.ListRoundsReply:
    """The newest rounds, newest first."""
    reply = pb.ListRoundsReply()
    if len(request.learner) > LARGEST_NAME:
        raise Refused(Status.INVALID_ARGUMENT, "no learner has so long a name")
    newest = [((seen, shard) for seen in shard.timeline.newest()) for shard in run.shards]
    rounds = heapq.merge(*newest, key=lambda each: each[0].opened_at, reverse=True)
    for seen, shard in islice(rounds, request.last or None):
        reply.rounds.append(_round(run, shard, seen, request))
    return reply


def _round(run: Registrar, shard: Shard, seen: Round, request: pb.ListRoundsRequest) -> pb.Round:
    now, later = run.clock.monotonic(), run.clock.wall() - run.clock.monotonic()

    def wall(at: float | None) -> float:
        return 0.0 if at is None else at + later

    open_now = seen.closed_at is None
    answers = [] if request.brief else slowest(seen, MOST_ANSWERS)
    if request.learner:
        answers = [(request.learner, seen.answers.get(request.learner, Answer()))]
    outcome = pb.ROUND_OUTCOME_MERGED if seen.published_at is not None else pb.ROUND_OUTCOME_MERGING
    told = pb.Round(
        fragment=seen.fragment, cycle=seen.cycle, version=seen.version,
        outcome=pb.ROUND_OUTCOME_OPEN if open_now else pb.ROUND_OUTCOME_LAPSED if seen.lapsed else outcome,
        reason=shard.syncer.why(seen.fragment, now) if open_now else seen.reason,
        opened_at=wall(seen.opened_at), closed_at=wall(seen.closed_at), merged_at=wall(seen.merged_at),
        quorum_at=wall(shard.syncer.fragments[seen.fragment].quorum_at if open_now else seen.quorum_at),
        published_at=wall(seen.published_at), more_answers=max(0, len(seen.answers) - len(answers)),
    )  # fmt: skip
    for name, answer in answers:
        told.answers.add(
            learner=name, began_at=wall(answer.began_at), durable_at=wall(answer.durable_at),
            adopted_at=wall(answer.adopted_at), declined=answer.declined, late=answer.late, weight=answer.weight,
            staleness=answer.staleness,
        )  # fmt: skip
    return told
