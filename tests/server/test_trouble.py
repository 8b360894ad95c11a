"""Full or slow disks, and clocks that jump, while a core runs. `end_to_end/test_full_disk.py` has a real full disk."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable

import pytest
import structlog
from atoll_server.ledger import ledger_writer
from atoll_server.ledger.ledger_writer import SLOW_S, LedgerWriter
from atoll_server.run.run_clock import RunClock
from atoll_wire.process.clock import SYSTEM

from tests.clocks import SetClock


@pytest.fixture
def said():
    with structlog.testing.capture_logs() as lines:
        yield lines


def database(path, pages: int = 1 << 30) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("CREATE TABLE t (x BLOB)")
    db.execute(f"PRAGMA max_page_count={pages}")
    return db


async def until(found: Callable[[], bool]) -> None:
    for _ in range(500):
        if found():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not hold within 5 s")


def insert(size_bytes: int):
    return lambda db: db.execute("INSERT INTO t VALUES (zeroblob(?))", (size_bytes,))


def test_a_full_disk_delays_all_answers_and_each_caller_gets_one(tmp_path, said, monkeypatch):
    monkeypatch.setattr(ledger_writer, "FULL_RETRY_S", 0.01)

    async def run() -> None:
        failures: list[BaseException] = []
        db = database(tmp_path / "db", pages=4)
        ledger = LedgerWriter(db, failures.append, SYSTEM)
        ledger.start()
        await ledger.commit(insert(10))
        waiting = [asyncio.create_task(ledger.commit(insert(50_000))) for _ in range(3)]
        await until(lambda: ledger.full)
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        db.execute(f"PRAGMA max_page_count={1 << 20}")
        await asyncio.gather(*waiting)
        assert (ledger.full, failures) == (False, [])
        assert db.execute("SELECT count(*) FROM t").fetchone() == (4,)
        await ledger.stop()

    asyncio.run(run())
    events = [line["event"] for line in said]
    assert events == [
        "the disk is full: nothing is acknowledged, and senders wait, until you free space",
        "the disk has free space again",
    ]  # fmt: skip


def test_any_other_failure_of_a_commit_ends_the_core_before_any_answer(tmp_path):
    async def run() -> None:
        failures: list[BaseException] = []
        ledger = LedgerWriter(database(tmp_path / "db"), failures.append, SYSTEM)
        ledger.start()
        waiting = asyncio.create_task(ledger.commit(lambda db: db.execute("INSERT INTO nothing VALUES (1)")))
        await until(lambda: bool(failures))
        later = asyncio.create_task(ledger.commit(insert(1)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert not later.done()
        waiting.cancel()
        later.cancel()

    asyncio.run(run())


def test_a_slow_disk_is_reported(tmp_path, said):
    clock = SetClock()

    def slow(_: sqlite3.Connection) -> None:
        clock.steady += 2 * SLOW_S

    async def run() -> None:
        ledger = LedgerWriter(database(tmp_path / "db"), lambda _: None, clock)
        ledger.start()
        await ledger.commit(insert(1))
        await ledger.commit(slow)
        await ledger.stop()

    asyncio.run(run())
    (line,) = said
    assert line["event"] == "the disk is slow: a commit delayed acknowledgements"
    assert line["took_s"] >= SLOW_S


def test_the_runs_clock_continues_through_changes_of_the_machines_clock(said):
    machine = SetClock(5.0, 1000.0)
    run = RunClock(machine)
    run.begin_after(1100.0)
    assert run.wall() == 1100.0
    machine.steady += 10.0
    machine.at += 10.0
    run.look()
    for jump in (3600.0, -7200.0):
        machine.at += jump
        machine.steady += 1.0
        run.look()
        run.look()
    assert run.wall() == 1112.0, "the run's clock must show 1100 s plus 12 steady seconds"
    assert [line["event"] for line in said] == [
        "this machine's clock is behind the run's: the run continues from its last saved time; check NTP",
        "this machine's clock jumped: the run keeps its own time; check NTP",
        "this machine's clock jumped: the run keeps its own time; check NTP",
    ]
