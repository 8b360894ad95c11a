"""The overview shows the data units of a run whose learners lease them."""

from __future__ import annotations

import sys

import pytest
from playwright.sync_api import Browser, expect

from tests.dashboard.house import house
from tests.dashboard.test_browser import PICTURES, SOON_MS, browser
from tests.end_to_end.world import eventually

pytestmark = [pytest.mark.observe, pytest.mark.timeout(300)]
__all__ = ["browser"]  # a fixture

UNITS, EPOCHS = 400, 50  # more than the learner consumes during the test


def test_datasets_appear_when_a_learner_leases_units_and_their_counts_grow(browser: Browser, tmp_path):
    with house(tmp_path) as it:
        eventually(lambda: it.look("run")["contributions"]["merged"] > 5, 120)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(it.url)
        expect(page.get_by_role("heading", name="The run", exact=True)).to_be_visible(timeout=SOON_MS)
        heading = page.get_by_role("heading", name="Datasets", exact=True)
        expect(heading).to_be_hidden()
        command = [sys.executable, "-m", "benchmarks.failures.unit_learner", it.core.address, "data"]
        it.group.start("data", [*command, str(UNITS), str(EPOCHS), str(tmp_path / "log"), "0.01"])
        eventually(lambda: it.look("run")["datasets"] and it.look("run")["datasets"][0]["consumed"] > 20, 60)
        expect(heading).to_be_visible(timeout=SOON_MS)
        row = page.get_by_role("table", name="Datasets").get_by_role("row").nth(1)
        expect(row).to_contain_text("corpus")
        expect(row).to_contain_text(f"1 of {EPOCHS}")
        before = it.look("run")["datasets"][0]["consumed"]
        eventually(lambda: it.look("run")["datasets"][0]["consumed"] > before + 20, 60)
        expect(row).not_to_contain_text(f" {before:,} of", timeout=SOON_MS)
        page.get_by_role("table", name="Datasets").scroll_into_view_if_needed()
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=PICTURES / "datasets.png")
        page.close()
