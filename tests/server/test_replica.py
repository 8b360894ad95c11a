"""A shard process's durable copy of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.learner_registry import LearnerProcess
from atoll_server.learners.session_tokens import SessionKey
from atoll_server.ledger import database, run_ledger
from atoll_server.ledger.ledger_writer import LedgerWriter
from atoll_server.processes.replica import Replica
from atoll_server.run.run_clock import RunClock
from atoll_server.settings import Limits, RunSettings
from atoll_server.shard_context.run_view import RunView
from atoll_server.telemetry.journal import Journal
from atoll_wire import outer_pb2 as pb
from atoll_wire import shards_pb2 as sh
from atoll_wire.process.clock import SYSTEM

KEY = SessionKey(bytes(32), b"first start", "r", 1)


def welcome(start: bytes = KEY.start) -> sh.Welcome:
    return sh.Welcome(
        run="r", generation=1, epoch=1, secret=KEY.secret, start=start, settings=RunSettings().model_dump_json()
    )


def session(incarnation: int = 1, number: int = 1, key: SessionKey = KEY) -> pb.Session:
    token = key.token("a", incarnation, number)
    return pb.Session(run="r", generation=1, learner="a", incarnation=incarnation, token=token)


class Told:
    """Stands in for the shard in the process."""

    def __init__(self) -> None:
        self.joins: list[tuple[str, int]] = []
        self.evictions: list[tuple[str, int, str]] = []
        self.views: list[RunView] = []
        self.joined = lambda *values: self.joins.append(values)
        self.evicted = lambda *values: self.evictions.append(values)
        self.told = self.views.append
        self.dispatch = lambda _: None
        self.contributions = SimpleNamespace(units={})


Life = Callable[[Replica, Told], Awaitable[Any]]


def live(directory: Path, life: Life, *, stops: bool = False) -> None:
    """Runs one process with this directory, which is killed at the end. stops: whether it stops cleanly instead."""

    async def lives() -> None:
        db = database.open_ledger(directory / "ledger")
        writer = LedgerWriter(db, _failed, SYSTEM)
        writer.start()
        run, told = Replica(Limits(), RunClock(SYSTEM), Journal(), 1), Told()
        run.restore({"epoch": 1} | run_ledger.get_meta(db), run_ledger.learners(db), writer)
        shard: Any = told
        layout: Any = SimpleNamespace()
        run.runs(layout, shard)
        await life(run, told)
        if stops:
            await run.save_accounts()
        await writer.stop()  # uncommitted data is lost

    asyncio.run(lives())


def _failed(error: BaseException) -> None:
    raise error


def refusal(run: Replica, of: pb.Session) -> Refused:
    with pytest.raises(Refused) as refused:
        run.session(of)
    return refused.value


def test_a_token_admits_a_session_that_the_registrar_never_announced(tmp_path):
    async def life(run: Replica, told: Told) -> None:
        await run.welcomed(welcome())
        process = run.session(session())
        assert (process.entry.name, process.incarnation, told.joins) == ("a", 1, [("a", 1)])
        assert run.session(session()).entry is process.entry
        assert told.joins == [("a", 1)], "the shard must hear of a Join once"
        for wrong in (session(key=SessionKey(b"x" * 32, KEY.start, "r", 1)), pb.Session(run="other", learner="a")):
            assert refusal(run, wrong).status in {Status.UNAUTHENTICATED, Status.UNAVAILABLE}

    live(tmp_path, life)


def test_an_unproven_session_waits_for_the_registrar_and_is_then_refused(tmp_path):
    async def life(run: Replica, _: Told) -> None:
        await run.welcomed(welcome())
        run.session(session())
        wrong = session(key=SessionKey(KEY.secret, b"next start", "r", 1))
        assert refusal(run, wrong).status is Status.UNAVAILABLE
        run.attached = True
        assert refusal(run, wrong).status is Status.UNAUTHENTICATED

    live(tmp_path, life)


def test_a_newer_session_or_process_ends_the_older_one(tmp_path):
    async def life(run: Replica, told: Told) -> None:
        await run.welcomed(welcome())
        run.session(session(1, 1))
        older = run.session(session(1, 2))
        run.attached = True
        assert refusal(run, session(1, 1)).status is Status.UNAUTHENTICATED
        run.session(session(2, 1))
        assert told.joins[-1] == ("a", 2)
        with pytest.raises(Refused, match="fenced off"):
            older.check_current()
        assert "fenced off" in refusal(run, session(1, 3)).detail
        await run.member(sh.Member(learner="a", incarnation=1, session=9))  # an older message from the registrar
        assert run.session(session(2, 1)).incarnation == 2

    live(tmp_path, life)


def test_a_fenced_process_stays_fenced_when_the_shard_is_killed_after_it_served_the_newer_one(tmp_path):
    async def before(run: Replica, _: Told) -> None:
        await run.welcomed(welcome())
        process = run.session(session(2))
        await run.fence(process)

    async def after(run: Replica, told: Told) -> None:
        assert refusal(run, session(1)).status is Status.UNAUTHENTICATED
        assert run.session(session(2)).incarnation == 2
        assert "fenced off" in refusal(run, session(1)).detail
        assert told.joins == [("a", 2)]

    live(tmp_path, before)
    live(tmp_path, after)


def test_fencing_costs_one_commit_for_each_process(tmp_path):
    async def life(run: Replica, _: Told) -> None:
        await run.welcomed(welcome())
        process = run.session(session(2))
        await run.fence(process)
        run.writer = SimpleNamespace()  # type: ignore[assignment]
        await run.fence(run.session(session(2)))
        await run.fence(LearnerProcess(process.entry, 2))

    live_without_stop(tmp_path, life)


def live_without_stop(directory: Path, life: Life) -> None:
    """Runs one process whose writer `life` replaces."""

    async def other(run: Replica, told: Told) -> None:
        writer = run.writer
        await life(run, told)
        run.writer = writer

    live(directory, other)


def test_sessions_from_before_a_registrars_restart_end_and_open_calls_continue(tmp_path):
    async def life(run: Replica, _: Told) -> None:
        await run.welcomed(welcome())
        process = run.session(session(1, 5))
        await run.welcomed(welcome())  # the same registrar process, so nothing changes
        assert run.session(session(1, 5)).entry is process.entry
        await run.welcomed(welcome(b"next start"))
        process.check_current()
        run.attached = True
        assert refusal(run, session(1, 5)).status is Status.UNAUTHENTICATED
        again = SessionKey(KEY.secret, b"next start", "r", 1)
        assert run.session(session(1, 1, again)).incarnation == 1, "a new registrar counts sessions from 1"

    async def after(run: Replica, _: Told) -> None:
        again = SessionKey(KEY.secret, b"next start", "r", 1)
        assert run.session(session(1, 1, again)).incarnation == 1, "the registrar's start must be durable"
        assert refusal(run, session(1, 5)).status is Status.UNAVAILABLE

    live(tmp_path, life)
    live(tmp_path, after)


def test_an_eviction_and_its_end_are_durable_before_they_are_confirmed(tmp_path):
    async def evicts(run: Replica, told: Told) -> None:
        await run.welcomed(welcome())
        run.session(session(1, 1))
        await run.member(sh.Member(learner="a", incarnation=1, session=1, evicted="by alice: it lies"))
        assert told.evictions == [("a", 1, "its learner was evicted: by alice: it lies")]

    async def refuses(run: Replica, told: Told) -> None:
        assert "was evicted (by alice: it lies)" in refusal(run, session(1, 1)).detail
        await run.member(sh.Member(learner="a", incarnation=1, evicted="by alice: it lies"))
        assert not told.evictions, "the shard must hear of an eviction once"
        await run.member(sh.Member(learner="a", incarnation=1))

    async def readmits(run: Replica, _: Told) -> None:
        assert run.session(session(1, 2)).incarnation == 1

    for life in (evicts, refuses, readmits):
        live(tmp_path, life)


def test_a_pause_is_durable_before_it_is_confirmed(tmp_path):
    async def pauses(run: Replica, told: Told) -> None:
        await run.viewed(RunView(3, 1, run_tokens=10, paused="by alice"))
        assert told.views == [run.view()]

    async def is_paused(run: Replica, _: Told) -> None:
        assert (run.paused, run.view()) == ("by alice", RunView(3, 1, run_tokens=10, paused="by alice"))
        await run.viewed(RunView(3, 2))

    async def is_not(run: Replica, _: Told) -> None:
        assert run.paused == ""

    for life in (pauses, is_paused, is_not):
        live(tmp_path, life)


def test_the_newest_view_wins_not_the_one_with_the_most_tokens(tmp_path):
    async def life(run: Replica, told: Told) -> None:
        await run.viewed(RunView(3, 5, run_tokens=100))
        await run.viewed(RunView(3, 6, run_tokens=60, voided_tokens=40))
        for older in (RunView(3, 5, run_tokens=900), RunView(3, 6, run_tokens=900), RunView(2, 99, paused="x")):
            await run.viewed(older)
        assert (run.view(), run.paused) == (RunView(3, 6, 60, 40), "")
        await run.viewed(RunView(4, 1, run_tokens=10))
        assert [view.run_tokens for view in told.views] == [100, 60, 10]

    async def after(run: Replica, _: Told) -> None:
        assert run.view() == RunView(4, 1, run_tokens=10)

    live(tmp_path, life, stops=True)
    live(tmp_path, after)


@pytest.mark.parametrize("change", [{"evicted": "why"}, {"left": True}, {"incarnation": 2}], ids=str)
def test_a_process_counts_as_fenced_after_the_ledger_has_it(tmp_path, change):
    """The registrar then decides the process's data units, so a restarted shard must not merge more work on them."""

    async def life(run: Replica, _: Told) -> None:
        await run.welcomed(welcome())
        member = {"learner": "a", "incarnation": 1, "session": 1}
        await run.member(sh.Member(**member))
        assert not run.fenced("a", 1)
        commit, before = run.writer.commit, list[bool]()

        async def watched(operation: Any) -> Any:
            before.append(run.fenced("a", 1))
            return await commit(operation)

        run.writer.commit = watched  # type: ignore[method-assign]
        await run.member(sh.Member(**member | change))
        assert before[0] is False
        assert run.fenced("a", 1)

    live(tmp_path, life)


def test_awaited_leases_are_those_of_the_registrars_newest_call(tmp_path):
    async def life(run: Replica, told: Told) -> None:
        forgotten = list[tuple[str, int, int]]()
        told.contributions = SimpleNamespace(forget_units=lambda *place: forgotten.append(place))
        await run.welcomed(welcome())
        for lease in (7, 8):
            run.lease(sh.AwaitedLease(lease=lease, learner="a", incarnation=1))
        run.lease(sh.AwaitedLease(lease=7, learner="a", incarnation=1, over=True))
        assert run.leases == {8: ("a", 1)}
        assert forgotten == [("a", 1, 7)]
        await run.welcomed(welcome())
        assert run.leases == {}

    live(tmp_path, life)
