"""The state of a run as operators see it: one message, built at one moment."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from atoll_wire import outer_pb2 as pb

from atoll_server.core import Core
from atoll_server.goodput import Balance, overall
from atoll_server.roster import Entry


def status(core: Core) -> pb.StatusReply:
    """Everything that `atoll status` shows."""
    wall, now = core.clock.now(), time.monotonic()
    entries = sorted(core.roster.entries.values(), key=lambda entry: entry.name)
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
            _learner(core, entry, balance, now, pending[entry.name])
            for entry, balance in zip(entries, balances, strict=True)
        ],
        goodput=_goodput(overall(balances)),
        tokens_trained=core.roster.tokens(),
        wire=_wire(entries),
    )
    if core.engine is not None:
        _add_fragments(core, reply, now)
    reply.troubles.extend(_troubles(core))
    return reply


def _troubles(core: Core) -> Iterator[str]:
    if core.writer.full:
        yield "the disk is full: nothing is acknowledged until there is room"
    elif core.engine is not None and core.engine.spool.room_bytes == 0:
        yield "the disk is nearly full: new contributions wait until there is room"
    if core.damage:
        yield core.damage
    for entry in core.roster.entries.values():
        if entry.evicted:
            yield f"{entry.name} is evicted: {entry.evicted}"


def _add_fragments(core: Core, reply: pb.StatusReply, now: float) -> None:
    engine = core.engine
    assert engine is not None, "only a run with parameters has fragments"
    reply.parameters = engine.layout.parameters
    merged = sum(entry.account.merged_token_parameters for entry in core.roster.entries.values())
    reply.tokens_merged = merged / engine.layout.parameters  # never more than were trained
    reply.outer_steps = sum(engine.versions())
    for fragment, rounds in zip(engine.layout.fragments, engine.syncer.fragments, strict=True):
        reply.fragments.add(
            fragment=fragment.index, parameters=fragment.length, version=rounds.version, cycle=rounds.cycle,
            state=engine.syncer.why(fragment.index, now),
        )  # fmt: skip
    reply.contributions.CopyFrom(
        pb.Contributions(**engine.contributions.counts, pending=len(engine.contributions.pending))
    )


def _learner(core: Core, entry: Entry, balance: Balance, now: float, pending: int) -> pb.LearnerStatus:
    account, engine = entry.account, core.engine
    member = engine.syncer.members.get(entry.name) if engine is not None else None
    there = account.total("stepping_s") + account.total("blocked_s")
    return pb.LearnerStatus(
        learner=entry.name,
        region=entry.region,
        incarnation=entry.incarnation,
        state="evicted" if entry.evicted else member.state(now) if member is not None else "joining",
        steps=account.total("steps"),
        tokens=account.total("tokens"),
        loss=entry.loss,
        step_time_s=member.step_time_s or 0.0 if member is not None else 0.0,
        heard_s=now - member.heard_at if member is not None else 0.0,
        blocked_fraction=account.total("blocked_s") / there if there > 0 else 0.0,
        waiting_for=engine.syncer.waits_for(entry.name) if engine is not None else "the first parameters",
        goodput=_goodput(balance),
        pending=pending,
        wire=_wire([entry]),
        comeback=pb.Comeback(**asdict(entry.comeback)),
    )


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
