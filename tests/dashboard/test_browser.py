"""The page in a real browser with a real run: live views, a dead learner, a dead core, and actions.

The tests leave screenshots in build/pictures.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from atoll_server.cli.run_directory import restore_checkpoint
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.dashboard.house import House, house
from tests.end_to_end.world import eventually

pytestmark = [pytest.mark.observe, pytest.mark.timeout(300)]

PICTURES = Path(__file__).parent.parent.parent / "build/pictures"
PAGE = Path(__file__).parent.parent.parent / "dashboard/atoll_dashboard/page"
# The browser makes no requests of its own: no updates, no safe browsing, no first-run pages.
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
VIEWS = ("Overview", "Learners", "Rounds", "Receipts", "Fragments", "Checkpoints", "Events")
LARGEST_BYTES = 300_000
SOON_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("chromium is missing: install it (apt-get install chromium)", pytrace=False)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=QUIET)
        yield found
        found.close()


@pytest.fixture(scope="module")
def lived_in(tmp_path_factory):
    with house(tmp_path_factory.mktemp("house")) as it:
        it.learn("ap-1", "ap", 0.05)
        eventually(lambda: it.look("run")["contributions"]["merged"] > 30, 60)
        PICTURES.mkdir(parents=True, exist_ok=True)
        yield it


@pytest.fixture
def page(browser, lived_in) -> Iterator[Page]:
    """Yields a page. The test fails if the browser's console has errors."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    found, complaints = context.new_page(), list[str]()
    found.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.goto(lived_in.url)
    yield found
    context.close()
    # Browsers also log refusals and a killed core, which these tests cause on purpose.
    strange = [each for each in complaints if not re.search(r"status of (401|503)|ERR_INCOMPLETE_CHUNKED", each)]
    assert not strange, strange


def go(page: Page, view: str) -> None:
    page.get_by_role("navigation", name="Views").get_by_role("link", name=view, exact=True).click()
    expect(page.get_by_role("region", name=view, exact=True)).to_be_visible()


def test_each_view_renders_and_is_accessible_in_both_themes(page: Page, lived_in: House):
    lived_in.action("checkpoint")
    expect(page.locator("#verdict")).to_have_attribute("data-level", "good", timeout=SOON_MS)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        for view in VIEWS:
            go(page, view)
            if view not in {"Overview", "Rounds", "Events"}:
                expect(page.get_by_role("table", name=view).get_by_role("row").nth(1)).to_be_visible(timeout=SOON_MS)
            page.screenshot(path=PICTURES / f"{view.lower()}-{theme}.png")
            found = Axe().run(page)
            serious = [each for each in found.response["violations"] if each["impact"] in {"serious", "critical"}]
            assert not serious, f"{view}, {theme}: {found.generate_report()}"


def test_figures_change_without_a_reload(page: Page):
    page.evaluate("window.stillHere = true")
    metrics = page.locator("#metrics")
    expect(metrics).to_contain_text("Tokens/s")
    go(page, "Learners")
    steps = page.get_by_role("table", name="Learners").get_by_role("row").nth(1)
    before = steps.inner_text()
    expect(steps).not_to_have_text(before, timeout=SOON_MS)
    go(page, "Rounds")
    expect(page.get_by_role("list", name="Learners in this round").first).to_be_visible(timeout=SOON_MS)
    assert page.evaluate("window.stillHere"), "the page must not reload"


def test_the_learners_behind_a_link_are_named_and_reachable_with_the_keyboard(page: Page):
    row = page.get_by_role("table", name="Fronts and links").get_by_role("row").filter(has_text="us-1")
    shown = row.locator(".behind p")
    expect(row.locator("summary")).to_have_attribute("title", "us-1", timeout=SOON_MS)
    expect(shown).to_be_hidden()
    row.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(shown).to_be_visible()
    expect(shown).to_have_text("us-1")


def test_the_page_is_small_and_calls_no_other_host(page: Page, lived_in: House):
    weight = sum(path.stat().st_size for path in PAGE.rglob("*") if path.is_file())
    assert weight < LARGEST_BYTES
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    expect(page.locator("#run-id")).to_contain_text(lived_in.look("run")["run"], timeout=SOON_MS)
    assert asked
    assert all(url.startswith(lived_in.url) for url in asked), asked


def test_the_page_fits_a_phone_and_works_with_the_keyboard(browser: Browser, lived_in: House):
    context = browser.new_context(viewport={"width": 360, "height": 780}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(lived_in.url)
    expect(page.locator("#run-id")).to_contain_text(lived_in.look("run")["run"], timeout=SOON_MS)
    for view in VIEWS:
        go(page, view)
        page.screenshot(path=PICTURES / f"{view.lower()}-phone.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, f"{view} is wider than the screen"
        if view == "Receipts":  # rows are lists, and nothing scrolls sideways
            rows = page.get_by_role("table", name="Receipts").get_by_role("row")
            expect(rows.get_by_role("cell", name="merged").first).to_be_visible(timeout=SOON_MS)
            table = page.locator("#view-receipts .scroller")
            assert table.evaluate("box => box.scrollWidth <= box.clientWidth")
    go(page, "Overview")
    page.get_by_role("link", name=re.compile("^us-1, ")).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name=re.compile("us-1"))).to_be_visible()
    context.close()


def test_an_action_needs_a_token_and_states_its_effect(page: Page, lived_in: House):
    def evict(token: str) -> None:
        dialog = page.get_by_role("dialog", name="Evict eu-2?")
        if not dialog.is_visible():
            page.get_by_role("button", name="Evict eu-2").click()
        dialog.get_by_label("Reason").fill("a test")
        dialog.get_by_label("Operator's token").fill(token)
        dialog.get_by_role("button", name="Yes, evict").click()

    page.goto(f"{lived_in.url}/#learner/eu-2")
    evict("nonsense")
    expect(page.get_by_role("alert")).to_contain_text("the core does not know this token", timeout=SOON_MS)
    assert lived_in.look("learners/eu-2")["state"] == "live"
    page.screenshot(path=PICTURES / "refused.png")
    evict(lived_in.token)
    expect(page.get_by_role("status")).to_contain_text("eu-2 was evicted", timeout=SOON_MS)
    expect(page.get_by_role("button", name="Readmit eu-2")).to_be_visible(timeout=SOON_MS)
    lived_in.trainees["eu-2"].join(20)
    assert "was evicted (a test)" in str(lived_in.trainees["eu-2"].error)
    assert page.evaluate("localStorage.length + sessionStorage.length") == 0, "the page must not store a token"
    go(page, "Events")
    expect(page.get_by_role("list", name="Events, newest first")).to_contain_text(
        "was evicted: a test", timeout=SOON_MS
    )


def test_the_page_reports_a_dead_core_and_recovers_by_itself(page: Page, lived_in: House):
    expect(page.locator("#verdict")).not_to_contain_text("core unreachable", timeout=SOON_MS)
    expect(page.locator("#metrics")).to_have_text(re.compile(r"\S"), timeout=SOON_MS)
    tokens = page.locator("#metrics").inner_text()
    lived_in.core.kill()
    expect(page.locator("#verdict")).to_contain_text("core unreachable since", ignore_case=True, timeout=SOON_MS)
    expect(page.locator("#banner")).to_contain_text("no core answers at", timeout=SOON_MS)
    expect(page.locator("body")).to_have_class(re.compile("old"), timeout=SOON_MS)
    assert tokens
    page.screenshot(path=PICTURES / "core-away.png")
    lived_in.core.start()
    expect(page.locator("body")).not_to_have_class(re.compile("old"), timeout=SOON_MS)
    expect(page.locator("#verdict")).not_to_contain_text("core unreachable", timeout=SOON_MS)
    go(page, "Events")
    events = page.get_by_role("list", name="Events, newest first")
    expect(events).to_contain_text("the core started: epoch 2", timeout=SOON_MS)
    expect(events).to_contain_text(re.compile(r"core unreachable since \d\d:\d\d:\d\d UTC"))
    expect(events).to_contain_text(re.compile(r"core reachable again after \d+ s"))
    go(page, "Overview")
    chart = page.locator(".chart").filter(has=page.get_by_role("heading", name="Tokens/s"))
    ended = re.compile(r"Tokens/s: now .* no data from \d\d:\d\d:\d\d UTC")
    expect(chart.get_by_role("img")).to_have_attribute("aria-label", ended, timeout=2 * SOON_MS)
    expect(chart.locator(".void")).to_have_count(1)
    pieces = chart.locator("path.line").get_attribute("d").split("M")
    void = chart.locator(".void").bounding_box()
    frame = chart.locator("svg").bounding_box()
    assert void is not None
    assert frame is not None
    left, right = void["x"] - frame["x"], void["x"] + void["width"] - frame["x"]
    xs = [[float(place.split()[0]) for place in piece.split("L")] for piece in pieces[1:]]
    assert all(max(piece) <= left + 1 or min(piece) >= right - 1 for piece in xs), "no line may cross a gap"
    assert max(map(max, xs)) > right - 1, "the line must go on after the gap"
    page.screenshot(path=PICTURES / "core-back.png", full_page=True)


def test_a_restore_is_on_the_overview_and_keeps_the_charts(page: Page, lived_in: House):
    status, done = lived_in.action("checkpoint")
    assert status == 200, done
    checkpoint = int(re.findall(r"checkpoint (\d+) is durable", done["said"])[0])
    lived_in.core.kill()
    restore_checkpoint(lived_in.core.directory, checkpoint)
    lived_in.core.start()
    restored = f"restored to checkpoint {checkpoint}"
    expect(page.locator("#main")).to_contain_text(restored, timeout=SOON_MS)
    chart = page.locator(".chart").filter(has=page.get_by_role("heading", name="Goodput"))
    expect(chart.locator(".void").first).to_be_attached(timeout=SOON_MS)
    page.screenshot(path=PICTURES / "restored.png", full_page=True)


def test_the_overview_names_a_dead_learner_with_its_lost_time_and_cost(page: Page, lived_in: House):
    us = lived_in.trainees["us-1"]
    stopped = us._breath  # the learner's loop waits on this between two steps
    us._pace_s = 3600.0
    try:
        expect(page.locator("#verdict")).to_contain_text(re.compile("us-1 silent for", re.IGNORECASE), timeout=40_000)
        expect(page.get_by_role("link", name=re.compile("^us-1, silent for"))).to_be_visible()
        expect(page.locator("#verdict")).to_contain_text(re.compile(r"of the last .* lost"))
        page.screenshot(path=PICTURES / "silent.png")
        page.get_by_role("link", name=re.compile("^us-1, silent for")).click()
        view = page.get_by_role("region", name=re.compile("us-1"))
        expect(view).to_contain_text(re.compile("silent", re.IGNORECASE))
        expect(view).to_contain_text(re.compile("lost", re.IGNORECASE))
    finally:
        us._pace_s = 0.02
        stopped.set()
        stopped.clear()
