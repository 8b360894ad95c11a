"""The state of a run as operators see it: one message, built at one moment."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice

from atoll_wire import outer_pb2 as pb

from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.accounts import Balance, overall
from atoll_server.learners.registry import Entry
from atoll_server.rounds.fragment_rounds import Phase
from atoll_server.rounds.liveness import NAMED, named
from atoll_server.run.core import Core
from atoll_server.shard.engine import Engine
from atoll_server.telemetry.timeline import Answer, Round, slowest

Answered = Mapping[int, set[str]]
MISSED = 4  # merges of each fragment at least without anything of a learner that trains, beyond which it is a trouble
OTHER_TOKENS = 20.0  # times the tokens per step of most of the others, or a part of them: the unit may be another
BEYOND = 1.02  # of the tokens that the run was to train: learners do not leave in the same moment


def status(core: Core) -> pb.StatusReply:
    """Everything that `atoll status` shows."""
    wall, now = core.clock.now(), time.monotonic()
    entries = sorted(core.roster.entries.values(), key=lambda entry: entry.name)
    answered = _answered(core.engine) if core.engine is not None else {}
    balances = [entry.account.balance(wall) for entry in entries]
    pending = (
        Counter(key.learner for key in core.engine.contributions.pending) if core.engine is not None else Counter()
    )
    reply = pb.StatusReply(
        run=core.run_id,
        generation=core.generation,
        epoch=core.epoch,
        uptime_s=now - core.started_at,
        wall_s=wall - min((entry.account.first_joined_at for entry in entries), default=wall),
        settings=core.settings_message(),
        learners=[
            _learner(core, entry, balance, now, pending[entry.name], answered)
            for entry, balance in zip(entries, balances, strict=True)
        ],
        goodput=_goodput(overall(balances)),
        tokens_trained=trained_tokens(core),
        wire=_wire(entries),
        at=wall,
        paused=core.paused,
        knows_tokens=core.settings.operator_tokens is not None,
        wan_budget_bytes=round(core.settings.wan_budget_gb * 1e9),
    )
    if core.engine is not None:
        _add_fragments(core, reply, now)
    reply.troubles.extend(troubles(core))
    return reply


def troubles(core: Core) -> Iterator[str]:
    """What an operator should see to, a line each."""
    if core.writer.full:
        yield "the disk is full: nothing is acknowledged until there is room"
    elif core.engine is not None and core.engine.spool.room_bytes == 0:
        yield "the disk is nearly full: new contributions wait until there is room"
    if core.damage:
        yield core.damage
    if missing := _never_merged(core):
        yield (
            f"{named(missing)} trains, and nothing of it is merged: its answers come too late or are refused. "
            "`atoll receipts --learner NAME` says why; raise --overlap or --max-staleness, or give it a faster link"
        )
    yield from _odd_tokens(core)
    total, trained = core.run.total_tokens, core.roster.tokens()
    if total and trained > BEYOND * total:
        yield f"{trained:,} of {total:,} tokens are trained, and outer steps are plain means: give more --total-tokens"


def trained_tokens(core: Core) -> int:
    """By everybody so far. What was merged was trained, also where its learner died before its next report."""
    return max(core.roster.tokens(), 0 if core.engine is None else math.ceil(merged_tokens(core)))


def _odd_tokens(core: Core) -> Iterator[str]:
    """Learners whose tokens per step differ so much from the others' that they may count something else."""
    rates, now = core.roster.rates(core.clock.now()), time.monotonic()
    many, few = [], []
    for name in sorted(core.roster.entries):
        own, usual = rates.of(name), rates.usual(name)
        if own is None or usual is None or state_of(core, core.roster.entries[name], now) != "live":
            continue
        told = f"{name} reports {own.batch:,.0f} tokens per step, most of the others {usual.batch:,.0f}"
        if own.batch > OTHER_TOKENS * usual.batch:
            many.append(f"{told}: its work outweighs theirs")
        elif own.batch * OTHER_TOKENS < usual.batch:
            few.append(f"{told}: its work hardly counts")
    for told in (many or few)[:NAMED]:  # of two learners, each differs from the other
        yield f"{told}. Check that step(tokens=...) gets its own tokens, not bytes, sequences or those of all islands"


def _never_merged(core: Core) -> list[str]:
    """Learners that train for nothing, by name."""
    if core.engine is None:
        return []
    engine, now = core.engine, time.monotonic()
    late = max(MISSED, 1 + engine.run.max_staleness) * len(engine.layout.fragments)
    names = (name for name in sorted(core.roster.entries) if engine.contributions.missed(name) > late)
    return [name for name in names if state_of(core, core.roster.entries[name], now) == "live"]


def merged_tokens(core: Core) -> float:
    """Mean over parameters; never more than `trained_tokens`."""
    assert core.engine is not None, "only a run with parameters merges"
    merged = sum(entry.account.merged_token_parameters for entry in core.roster.entries.values())
    return merged / core.engine.layout.parameters


def state_of(core: Core, entry: Entry, now: float) -> str:
    """One word for people: joining, live, paused, silent, left or evicted."""
    member = core.engine.syncer.members.get(entry.name) if core.engine is not None else None
    return "evicted" if entry.evicted else member.state(now) if member is not None else "joining"


def _add_fragments(core: Core, reply: pb.StatusReply, now: float) -> None:
    engine = core.engine
    assert engine is not None, "only a run with parameters has fragments"
    reply.parameters = engine.layout.parameters
    reply.tokens_merged = merged_tokens(core)
    reply.merges = sum(engine.versions())
    for fragment, rounds in zip(engine.layout.fragments, engine.syncer.fragments, strict=True):
        reply.fragments.add(
            fragment=fragment.index,
            parameters=fragment.length,
            version=rounds.version,
            cycle=rounds.cycle,
            state=engine.syncer.why(fragment.index, now),
            published_s=_since(engine.published_at[fragment.index], now),
        )
    reply.contributions.CopyFrom(
        pb.Contributions(**engine.contributions.counts, pending=len(engine.contributions.pending))
    )


def _learner(
    core: Core, entry: Entry, balance: Balance, now: float, pending: int, answered: Answered
) -> pb.LearnerStatus:
    account, engine = entry.account, core.engine
    member = engine.syncer.members.get(entry.name) if engine is not None else None
    there = account.total("stepping_s") + account.total("blocked_s")
    return pb.LearnerStatus(
        learner=entry.name,
        region=entry.region,
        incarnation=entry.incarnation,
        state=state_of(core, entry, now),
        steps=account.total("steps"),
        tokens=account.total("tokens"),
        loss=entry.loss,
        step_time_s=member.step_time_s or 0.0 if member is not None else 0.0,
        heard_s=now - member.heard_at if member is not None else 0.0,
        blocked_fraction=account.total("blocked_s") / there if there > 0 else 0.0,
        waiting_for=_waited_for(core, entry, answered),
        goodput=_goodput(balance),
        pending=pending,
        wire=_wire([entry]),
        comeback=pb.Comeback(**asdict(entry.comeback)),
        since=core.diary.since.get(entry.name, 0.0),
        uploading=bool(member.uploading) if member is not None else False,
    )


def _since(at: float | None, now: float) -> float:
    return 0.0 if at is None else max(0.001, now - at)


def _waited_for(core: Core, entry: Entry, answered: Answered) -> str:
    if entry.evicted:
        return f"nothing: it was evicted, {entry.evicted}"
    if core.engine is None:
        return "the first parameters"
    member = core.engine.syncer.members.get(entry.name)
    if member is None or member.gone:
        return ""
    missing = [str(fragment) for fragment, names in answered.items() if entry.name not in names]
    return f"its answer for fragment {named(missing)}" if missing else ""


def _answered(engine: Engine) -> Answered:
    """Of each open round, who has: looked at once, however many learners there are."""
    rounds = enumerate(engine.syncer.fragments)
    return {fragment: each.answered() for fragment, each in rounds if each.phase is Phase.OPEN}


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


def list_rounds(core: Core, request: pb.ListRoundsRequest) -> pb.ListRoundsReply:
    """The newest rounds, newest first."""
    reply, engine = pb.ListRoundsReply(), core.engine
    if len(request.learner) > LARGEST_NAME:
        raise Refused(Status.INVALID_ARGUMENT, "no learner has so long a name")
    if engine is None:
        return reply
    for seen in islice(engine.timeline.newest(), request.last or None):
        reply.rounds.append(_round(core, engine, seen, request))
    return reply


def _round(core: Core, engine: Engine, seen: Round, request: pb.ListRoundsRequest) -> pb.Round:
    now, later = time.monotonic(), core.clock.now() - time.monotonic()

    def wall(at: float | None) -> float:
        return 0.0 if at is None else at + later

    open_now = seen.closed_at is None
    answers = [] if request.brief else slowest(seen, MOST_ANSWERS)
    if request.learner:
        answers = [(request.learner, seen.answers.get(request.learner, Answer()))]
    outcome = pb.ROUND_OUTCOME_MERGED if seen.published_at is not None else pb.ROUND_OUTCOME_MERGING
    told = pb.Round(
        fragment=seen.fragment,
        cycle=seen.cycle,
        version=seen.version,
        outcome=pb.ROUND_OUTCOME_OPEN if open_now else pb.ROUND_OUTCOME_LAPSED if seen.lapsed else outcome,
        reason=engine.syncer.why(seen.fragment, now) if open_now else seen.reason,
        opened_at=wall(seen.opened_at),
        closed_at=wall(seen.closed_at),
        merged_at=wall(seen.merged_at),
        quorum_at=wall(engine.syncer.fragments[seen.fragment].quorum_at if open_now else seen.quorum_at),
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
