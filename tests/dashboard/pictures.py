"""Takes pictures of the dashboard for docs and records/operator: `make pictures`. Needs Debian's chromium.

They show a run with a core, three fronts, and two learners behind each front. In this order:

- link-cut: the link of front ap-south is cut. Then the link is restored.
- front-dead: the process of front us-east is killed. Then it is started again.
- core-dead: the core has been dead for 73 s. Then it is started again.
- restored: the run was restored from a backup that was taken before the first scene.

In records/operator, each scene has a light, a dark and a phone version, which show what fits on a screen. The pictures
in docs show whole pages: the cut link, its recovery, and the rounds after the recovery.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.demo.processes import children
from atoll_server.backups.backup_folder import backups_in
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from tests.dashboard.test_browser import QUIET, go
from tests.end_to_end.relay import relay
from tests.end_to_end.world import Core, Front, Trainee, core

ROOT = Path(__file__).parent.parent.parent
DOCS, RECORDS = ROOT / "docs/pictures", ROOT / "records/operator"
REGIONS = ("ap-south", "eu-west", "us-east")
CUT, DEAD = "ap-south", "us-east"
PACE_S = 0.15  # pause of a learner between two steps
AFTER_S = 20.0  # seconds from the detection of a failure to its pictures
OUTAGE_S = 73.0  # seconds for which the core is dead
WIDTH, HEIGHT = 1280, 860
PHONE = {"width": 390, "height": 844}
EDGE = 10  # pixels below the last panel
ROUNDS = 3  # number of rounds on the picture
COLORS = 128  # of a picture's palette
MAX_WAIT_S = 600.0


@dataclass
class Scene:
    """A run with its dashboard at `url`. fronts: by region."""

    directory: Path
    core: Core
    fronts: dict[str, Front]
    url: str
    browser: Browser

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/{path}", timeout=60) as answer:
            return json.loads(answer.read())

    def until(self, path: str, enough: Callable[[Any], bool]) -> None:
        deadline = time.monotonic() + MAX_WAIT_S
        while not enough(said := self.ask(path)):
            assert time.monotonic() < deadline, said
            time.sleep(1)

    def all_live(self) -> None:
        """Waits until all learners are live and the header shows rates."""
        self.until("run", lambda run: run["reachable"] and run["learners"]["live"] == 2 * len(REGIONS))
        self.until("run", lambda run: run["tokens_per_s"] and run["wire"]["up_bytes_per_s"])

    def take(self, name: str) -> None:
        """Takes the three pictures of a scene."""
        self.screen(name, "light", {"width": WIDTH, "height": HEIGHT})
        self.screen(name, "dark", {"width": WIDTH, "height": HEIGHT})
        self.screen(name, "phone", PHONE)

    def screen(self, name: str, kind: str, size: Any) -> None:
        with self.page(size, dark=kind == "dark") as page:
            save(page.screenshot(), RECORDS / f"{name}-{kind}.png")

    def whole(self, view: str, name: str, last: str) -> None:
        """Takes pictures of a view in both themes, from its top to the end of the element `last`."""
        for suffix in ("", "-dark"):
            with self.page({"width": WIDTH, "height": HEIGHT}, dark=suffix == "-dark") as page:
                go(page, view)
                page.wait_for_timeout(3000)
                page.evaluate("scrollTo(0, 0)")
                box = page.locator(last).first.bounding_box()
                assert box is not None, f"{view} has no {last}"
                clip: Any = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + EDGE}
                save(page.screenshot(full_page=True, clip=clip), DOCS / f"{name}{suffix}.png")

    @contextlib.contextmanager
    def page(self, size: Any, *, dark: bool) -> Iterator[Page]:
        """Context manager for a page that has drawn its charts."""
        context = self.browser.new_context(viewport=size, color_scheme="dark" if dark else "light")
        page = context.new_page()
        page.goto(self.url)
        page.wait_for_timeout(4000)
        yield page
        context.close()


def save(png: bytes, path: Path) -> None:
    """Writes a picture with a palette, which makes it several times smaller."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as file:
        file.write(png)
        with Image.open(file) as image:
            image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """Starts a run, breaks it in four ways, and takes the pictures. Arguments: scenes to take; default: all."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        here = Path(directory)
        running = stack.enter_context(core(here / "core", "--fragments", "4", "--inner-steps", "16"))
        group = stack.enter_context(children(here / "fronts"))
        link = stack.enter_context(relay(running.address))
        to = {CUT: link.address}
        fronts = {each: Front(group, each, to.get(each, running.address), ["--region", each]) for each in REGIONS}
        _, url = group.start_dashboard("127.0.0.1:0", running.address)
        stack.enter_context(training(fronts))
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=shutil.which("chromium"), args=QUIET
        )
        scene = Scene(here, running, fronts, url, browser)
        scene.until("run", lambda run: run["contributions"]["merged"] > 60 and run["goodput"]["recent"] is not None)
        scene.all_live()
        checkpoint("backup", str(here / "backups"), "--dir", str(running.directory))
        chosen = sys.argv[1:] or ["link-cut", "front-dead", "core-dead", "restored"]
        if "link-cut" in chosen:
            cut_link(scene, link.cut, link.reconnect)
        if "front-dead" in chosen:
            front_dead(scene)
        if "core-dead" in chosen:
            core_dead(scene)
        if "restored" in chosen:
            restored(scene)
        browser.close()


@contextlib.contextmanager
def training(fronts: dict[str, Front]) -> Iterator[None]:
    """Context manager for two learners behind each front."""
    over: list[bool] = []
    trainees = [
        Trainee(
            front.address, f"{region}-{n}", lambda _: bool(over), region=region, pace_s=PACE_S, connect_timeout_s=300
        )
        for region, front in fronts.items()
        for n in (1, 2)
    ]
    for each in trainees:
        each.start()
    try:
        yield
    finally:
        over.append(True)
        for each in trainees:
            each.join(60)


def cut_link(scene: Scene, cut: Callable[[], None], restore: Callable[[], None]) -> None:
    """The link is cut, and later restored."""
    cut()
    scene.until("run", lambda run: run["learners"]["cut_off"] == 2)
    time.sleep(AFTER_S)
    scene.take("link-cut")
    scene.whole("Overview", "dashboard-overview", ".overview")
    before = newest(scene)
    restore()
    scene.all_live()
    scene.until("receipts?fate=merged&limit=500", lambda _: newest(scene) > before)
    scene.whole("Overview", "dashboard-recovered", ".overview")
    scene.whole("Rounds", "dashboard-rounds", f".rounds > :nth-child({ROUNDS})")


def front_dead(scene: Scene) -> None:
    """A front's process dies, and is started again."""
    scene.fronts[DEAD].kill()
    scene.until("run", lambda run: run["learners"]["cut_off"] == 2)
    time.sleep(AFTER_S)
    scene.take("front-dead")
    scene.fronts[DEAD].start()
    scene.all_live()


def core_dead(scene: Scene) -> None:
    """The core's process dies, and is started again after the pictures."""
    scene.core.kill()
    time.sleep(OUTAGE_S)
    scene.take("core-dead")
    scene.core.start()
    scene.all_live()


def restored(scene: Scene) -> None:
    """The core loses its directory, and is restored from the backup."""
    scene.core.kill()
    shutil.rmtree(scene.core.directory)
    (backup,) = backups_in(scene.directory / "backups")
    checkpoint("restore-backup", str(backup), "--dir", str(scene.core.directory))
    scene.core.start()
    scene.all_live()
    time.sleep(AFTER_S)
    scene.take("restored")


def checkpoint(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "atoll_server", "checkpoint", *words], check=True)


def newest(scene: Scene) -> int:
    """Returns the number of the newest merged receipt of the cut region's learners."""
    found = scene.ask("receipts?fate=merged&limit=500")["items"]
    return max((each["number"] for each in found if CUT in each["learner"]), default=0)


if __name__ == "__main__":
    main()
