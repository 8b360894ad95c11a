"""A thousand learners and ten thousand receipts: the server sends pages, and the browser does not lag."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from atoll_server.checkpoints.restore import LEDGER
from atoll_server.learners.goodput import TimeAccount
from atoll_server.ledger import database, run_ledger, shard_ledger
from atoll_server.ledger.rows import ContributionRow, FateRow, LearnerRow
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.storage.disk import DISK
from atoll_wire.contract import Fate
from playwright.sync_api import expect

from tests.dashboard.house import House
from tests.dashboard.test_browser import SOON_MS, browser, go
from tests.end_to_end.world import Core, children, eventually, train

pytestmark = [pytest.mark.observe, pytest.mark.timeout(300)]
__all__ = ["browser"]  # a fixture

LEARNERS, REGIONS, RECEIPTS = 1000, 8, 10_000
LONGEST_TASK_MS = 400  # limit on a task of the page's thread, on two busy CPUs
QUICK_S = 0.5


def populate(directory: Path) -> None:
    """Writes the ledger of a long run with many learners, none of which is connected."""
    now = time.time()
    with closing(database.open_ledger(directory / LEDGER, DISK)) as db, database.transaction(db):
        for number in range(LEARNERS):
            name, region = f"learner-{number}", f"region-{number % REGIONS}"
            account = TimeAccount(first_joined_at=now - 100, heard_at=now - number % 50)
            account.joined(now - 100, 1.0, returning=False)
            run_ledger.put_learner(db, LearnerRow(name, region, 1, [number], account.as_data(), ""))
        _receipts(db, now)


def _receipts(db: sqlite3.Connection, now: float) -> None:
    for number in range(RECEIPTS):
        key = ContributionKey(f"learner-{number % LEARNERS}", 1, number % 2, number // LEARNERS + 1)
        row = ContributionRow(key, 1, 0, 100, 8, 3, 1, 1000, bytes(32), (1.0,), 1.0, now)
        shard_ledger.add_contribution(db, 1, row, FateRow(key, Fate.MERGED, 1, 0.5, 0))


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("crowd")
    with children(directory) as group:
        core = Core(group, directory / "run", ["--fragments", "2", "--inner-steps", "4"])
        train(core.address, "first", steps=30)
        core.stop()
        populate(directory / "run")
        core.start()
        dashboard, url = group.start_dashboard("127.0.0.1:0", core.address)
        it = House(core, group, "", url, dashboard)
        eventually(lambda: sum(it.look("run")["learners"].values()) > LEARNERS, 60)
        yield it


def test_the_server_answers_in_pages_and_quickly(crowded: House):
    for path in ("learners?limit=50", "learners?sort=lost&descending=true&offset=900", "learners?search=learner-77",
                 "receipts?limit=100", "receipts?learner=learner-7", "regions", "run"):  # fmt: skip
        took = []
        for _ in range(3):
            began = time.monotonic()
            told = crowded.look(path)
            took.append(time.monotonic() - began)
        assert min(took) < QUICK_S, f"{path} took {min(took):.2f} s"
        assert len(json.dumps(told)) < 200_000, f"the reply to {path} is too large"
    assert crowded.look("learners?limit=50")["total"] == LEARNERS + 1
    numbers, before = [], ""
    while before is not None:
        page = crowded.look(f"receipts?limit=500&before={before}")
        numbers += [each["number"] for each in page["items"]]
        before = page["before"]
    assert len(set(numbers)) == len(numbers) >= RECEIPTS
    with contextlib.closing(urllib.request.urlopen(f"{crowded.url}/api/live", timeout=20)) as stream:
        lines = (line for line in stream if line.startswith(b"data: "))
        assert len(next(lines)) < 100_000, "each viewer receives this every second"


def test_the_page_does_not_lag(browser, crowded: House):
    page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
    page.goto(crowded.url)
    expect(page.get_by_role("link", name=re.compile("^Region region-0")).first).to_be_visible(timeout=SOON_MS)
    page.evaluate(
        "window.longest = 0; new PerformanceObserver(list => { for (const each of list.getEntries())"
        " window.longest = Math.max(window.longest, each.duration); }).observe({entryTypes: ['longtask']})"
    )
    for view in ("Learners", "Receipts", "Overview"):
        began = time.monotonic()
        go(page, view)
        if view != "Overview":
            expect(page.get_by_role("table", name=view).get_by_role("row").nth(40)).to_be_visible(timeout=SOON_MS)
        print(f"{view}: {time.monotonic() - began:.2f} s")
        page.wait_for_timeout(3000)  # three polls of the core
    go(page, "Learners")
    page.get_by_label("Search learners").fill("learner-777")
    expect(page.get_by_role("table", name="Learners").get_by_role("row")).to_have_count(2, timeout=SOON_MS)
    longest = page.evaluate("window.longest")
    print(f"longest task of the page: {longest:.0f} ms")
    assert longest < LONGEST_TASK_MS
    page.context.close()
