"""Each page's fences run as written, from top to bottom, in a copy of the checkout. This takes minutes.

not_run.py names the fences and commands that do not run, each with its reason. The installed environment replaces what
`pip install` would download (installed.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compose.stack import NoEngineError, Stack
from tests.documents import not_run
from tests.documents.fences import ROOT, Fence, all_fences
from tests.documents.page_run import STOP, PageRun, prepared, terminal_of

COMMANDS = all_fences("bash", "python")
RUN = sorted({fence.page for fence in COMMANDS if fence.language == "bash" and not fence.reason})
IN_CI = {"docs/start.md", "docs/guides/followers.md"}
NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--mount"]


def test_fences_and_commands_that_do_not_run_exist_and_have_a_reason():
    texts = {page: [fence.text.splitlines() for fence in COMMANDS if fence.page == page] for page in not_run.FENCES}
    gone = [
        f"{page}: {line}"
        for page, lines in not_run.FENCES.items()
        for line in lines
        if not any(line in text for text in texts[page])
    ]
    assert not gone, f"remove these from not_run.py: {gone}"
    assert not [fence for fence in COMMANDS if fence.reason and len(fence.reason) < 9]


def test_most_fences_run_and_each_python_fence_runs_on_a_page_with_commands():
    runs = [fence for fence in COMMANDS if not fence.reason]
    assert len(runs) > 0.6 * len(COMMANDS)
    assert {fence.page for fence in runs} == set(RUN)
    assert {"README.md", "docs/start.md", "docs/operate/deploy.md", "docs/operate/backups.md"} <= set(RUN)


def test_fences_do_not_change_the_directory():
    left = [str(fence) for fence in COMMANDS if not fence.reason and re.search(r"^\s*cd ", fence.text, re.MULTILINE)]
    assert not left, f"these fences change the directory for the next one: {left}"


def test_the_test_of_a_page_understands_which_terminals_to_stop():
    sentences = {
        (str(fence), sentence)
        for fence in COMMANDS
        for sentence in re.split(r"[.:]\s", fence.before)
        if "Ctrl-C" in sentence and re.search("terminals? [0-9]", sentence)
    }
    assert len(sentences) > 3
    assert not [each for each in sentences if not STOP.search(each[1])], "write: Press Ctrl-C in terminal N"


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "page", [pytest.param(each, marks=pytest.mark.ci if each in IN_CI else pytest.mark.slow) for each in RUN]
)
def test_a_page_runs_as_written(page: str, tmp_path: Path):
    if subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode:
        pytest.fail("unshare is refused, so a page cannot have its own ports and host names: allow user namespaces")
    checkout = copied(tmp_path / "atoll")
    command = [*NAMESPACES, sys.executable, "-m", "tests.documents.page_run", page, str(checkout)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, errors = process.communicate()
        finally:
            process.terminate()  # so that the page's processes end after an interruption
    assert process.returncode == 0, errors


@pytest.mark.compose
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", ["docs/operate/deploy.md", "docs/operate/backups.md"])
def test_fences_for_docker_run_as_written(page: str, tmp_path: Path):
    mine = [fence for fence in all_fences("bash") if fence.page == page and fence.reason == not_run.DOCKER]
    try:
        Stack().check()
    except NoEngineError as error:
        pytest.fail(str(error), pytrace=False)
    checkout = copied(tmp_path / "atoll")
    restores = page.endswith("backups.md")  # this page's commands run in docker/, on the running demo
    down = ["docker", "compose", "--profile", "*", "down", "--volumes"]
    # No registry is needed: Prometheus is Debian's, as in tests/compose.
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    engine = {"COMPOSE_FILE": "compose.yaml:compose.test.yaml", "PYTHON_IMAGE": f"python:{version}-slim"}
    with PageRun(checkout / "docker" if restores else checkout, prepared(checkout) | engine) as run:
        try:
            if restores:
                run.run(Fence(page, 0, "bash", "docker compose up --build --detach --wait"), whole=True)
            for fence in mine:
                run.run(fence, whole=True)
        finally:
            subprocess.run(down, cwd=checkout / "docker", env=os.environ | engine, check=False)


def test_a_fence_that_fails_is_found(tmp_path: Path):
    with PageRun(tmp_path, os.environ) as run, pytest.raises(AssertionError, match="ended with 1"):
        run.run(Fence("page.md", 1, "bash", "true\nfalse\ntrue\n"))


def test_terminals_follow_the_text():
    stop = "Press Ctrl-C in terminals 1 to 3. In terminal 1, start another core:"
    assert terminal_of(Fence("page.md", 1, "bash", "", before="Terminal 2 runs it:")) == "2"
    assert terminal_of(Fence("page.md", 1, "bash", "", before=stop)) == "1"
    assert not terminal_of(Fence("page.md", 1, "bash", "", before="Press Ctrl-C in terminal 1."))


def copied(to: Path) -> Path:
    """Copies the files that git would check out, with uncommitted changes."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    there = [name for name in listed.stdout.split(b"\0") if name and (ROOT / os.fsdecode(name)).exists()]
    to.mkdir()
    subprocess.run(
        ["xargs", "-0", "cp", "--no-dereference", "--preserve=timestamps", "--parents", "-t", str(to)],
        cwd=ROOT,
        input=b"\0".join(there),
        check=True,
    )
    return to
