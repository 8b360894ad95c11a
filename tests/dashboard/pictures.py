"""Pictures for README and docs, of `atoll demo --regions 3` as it goes: `make pictures`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from tests.dashboard.test_browser import QUIET, go

OUT = Path(__file__).parent.parent.parent / "docs/pictures"
STEPS = 6000
URL = re.compile(r"dashboard: (http://\S+)")


def main() -> None:
    """Takes them in the middle of one demo."""
    demo = subprocess.Popen(
        [sys.executable, "-u", "-m", "atoll.cli", "demo", "--regions", "3", "--steps", str(STEPS), "--no-kills"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert demo.stdout is not None, "it is read"
        url = next(found[1] for line in demo.stdout if (found := URL.search(line)))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=QUIET)
            page = browser.new_page(viewport={"width": 1280, "height": 860})
            page.goto(url)
            # Learners that are made slow pause after each step: some are live, the others paused.
            _until(url, lambda run: run["contributions"]["merged"] > 60 and run["cost"]["per_day"] is not None)
            _until(url, lambda run: not run["learners"]["joining"] and run["goodput"]["recent"] is not None)
            for view in ("Overview", "Rounds"):
                _take(page, view, "light")
                _take(page, view, "dark")
            browser.close()
    finally:
        demo.terminate()
        demo.wait()


def _take(page: Page, view: str, theme: str) -> None:
    page.emulate_media(color_scheme="light" if theme == "light" else "dark")
    go(page, view)
    page.wait_for_timeout(3000)
    page.screenshot(path=OUT / f"dashboard-{view.lower()}{'-dark' if theme == 'dark' else ''}.png")


def _until(url: str, enough: Any) -> None:
    deadline = time.monotonic() + 300
    while True:
        with urllib.request.urlopen(f"{url}/api/run", timeout=20) as answer:
            run = json.loads(answer.read())
        if enough(run):
            return
        assert time.monotonic() < deadline, run
        time.sleep(1)


if __name__ == "__main__":
    main()
