"""Takes pictures of the dashboard for README and docs: `make pictures`. Needs Debian's chromium.

They show `atoll demo --regions 3`, in which a region's link is cut and restored:

- dashboard-overview: the region is cut off. Its learners may be training, but the core does not hear them.
- dashboard-recovered: the region is back. Its learner is live, and its contributions are merged again.
- dashboard-rounds: the rounds after the recovery, with the answers of all regions.

Each picture has a dark version. The lower edge of a picture never cuts a panel.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Page, sync_playwright

from tests.dashboard.test_browser import QUIET, go

OUT = Path(__file__).parent.parent.parent / "docs/pictures"
STEPS = 6000
URL = re.compile(r"dashboard: (http://\S+)")
REGION = "ap-south"
CUT_S = 30.0  # seconds for which the region is cut off before its picture is taken
WIDTH = 1280
EDGE = 14  # pixels below the last panel
ROUNDS = 3  # number of rounds on the picture
MAX_WAIT_S = 300


def main() -> None:
    """Starts a demo, cuts and restores the link of a region, and takes the pictures."""
    command = [sys.executable, "-u", "-m", "atoll.cli", "demo"]
    options = ["--regions", "3", "--steps", str(STEPS), "--no-kills"]
    demo = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert demo.stdout is not None, "the demo's output is a pipe"
        url = next(found[1] for line in demo.stdout if (found := URL.search(line)))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=QUIET)
            page = browser.new_page(viewport={"width": WIDTH, "height": 860})
            page.goto(url)
            _tell(page, url, demo.pid)
            browser.close()
    finally:
        demo.terminate()
        demo.wait()


def _tell(page: Page, url: str, demo: int) -> None:
    _until(url, "run", lambda run: run["contributions"]["merged"] > 60)
    _until(url, "run", lambda run: not run["learners"]["joining"] and run["goodput"]["recent"] is not None)
    relay = _relay(demo)
    relay.send_signal(signal.SIGUSR1)  # the relay cuts the link
    _until(url, "regions", lambda regions: _unheard(regions) > 0)
    time.sleep(CUT_S)
    _take(page, "Overview", "dashboard-overview", ".overview")
    before = _merged(url)
    relay.send_signal(signal.SIGUSR2)  # the relay restores the link
    _until(url, "regions", lambda regions: _unheard(regions) == 0)
    _until(url, "receipts?fate=merged&limit=500", lambda receipts: _of_region(receipts["items"]) > before)
    _take(page, "Overview", "dashboard-recovered", ".overview")
    _take(page, "Rounds", "dashboard-rounds", f".rounds > :nth-child({ROUNDS})")


def _relay(demo: int) -> psutil.Process:
    """Returns the process that emulates the region's link."""
    for process in psutil.Process(demo).children(recursive=True):
        words = process.cmdline()
        if "atoll.demo.relay" in words and any(word.endswith(f"{REGION}.link.json") for word in words):
            return process
    raise AssertionError(f"the demo has no relay for {REGION}")


def _of(regions: list[dict[str, Any]]) -> dict[str, Any]:
    return next(each for each in regions if each["region"] == REGION)


def _unheard(regions: list[dict[str, Any]]) -> int:
    """Returns the number of the region's learners that are silent, or cut off with their front."""
    learners = _of(regions)["learners"]
    return int(learners["silent"] + learners["cut_off"])


def _of_region(receipts: list[dict[str, Any]]) -> int:
    """Returns the number of the newest receipt of the region's learners."""
    return max((each["number"] for each in receipts if REGION in each["learner"]), default=0)


def _merged(url: str) -> int:
    return _of_region(_ask(url, "receipts?fate=merged&limit=500")["items"])


def _take(page: Page, view: str, name: str, last: str) -> None:
    """Takes a picture of the view in both themes, from its top to the end of the element `last`."""
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme="light" if theme == "light" else "dark")
        go(page, view)
        page.wait_for_timeout(3000)
        page.evaluate("scrollTo(0, 0)")
        box = page.locator(last).first.bounding_box()
        assert box is not None, f"{view} has no {last}"
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + EDGE}
        path = OUT / f"{name}{'-dark' if theme == 'dark' else ''}.png"
        page.screenshot(path=path, full_page=True, clip=clip)


def _ask(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/{path}", timeout=20) as answer:
        return json.loads(answer.read())


def _until(url: str, path: str, enough: Callable[[Any], bool]) -> None:
    deadline = time.monotonic() + MAX_WAIT_S
    while not enough(said := _ask(url, path)):
        assert time.monotonic() < deadline, said
        time.sleep(1)


if __name__ == "__main__":
    main()
