"""Each page's commands run as written, from top to end, in a copy of the checkout. This takes minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from tests.documents.fences import ROOT, Fence, all_fences
from tests.documents.page_run import PageRun

COMMANDS = all_fences("bash")
PAGES = {page: list(fences) for page, fences in groupby(all_fences("bash", "python"), lambda fence: fence.page)}


def test_a_fence_that_is_not_run_says_why():
    skipped = [fence for fence in COMMANDS if fence.reason]
    assert all(len(fence.reason) > 8 for fence in skipped)
    assert len(skipped) < 0.6 * len(COMMANDS), "most commands of the documents must run"


RUN = sorted({fence.page for fence in COMMANDS if not fence.reason})


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_as_written(page: str, tmp_path: Path):
    checkout = copied(tmp_path / "atoll")
    path = f"{checkout / 'venv/bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ATOLL_", "PYTHONPATH"))}
    with PageRun(checkout, {**environment, "PATH": path}) as run:
        for fence in PAGES[page]:
            if fence.title:
                (checkout / fence.title).write_text(fence.text)
            elif fence.language == "bash" and not fence.reason:
                run.run(fence)
        run.interrupt()


def test_a_fence_that_fails_is_found(tmp_path: Path):
    with PageRun(tmp_path, os.environ) as run, pytest.raises(AssertionError, match="ended with 1"):
        run.run(Fence("page.md", 1, "bash", "true\nfalse\ntrue\n", ""))


def copied(to: Path) -> Path:
    """Copies the files that git would check out, with uncommitted changes."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    there = [name for name in listed.stdout.split(b"\0") if name and (ROOT / os.fsdecode(name)).exists()]
    to.mkdir()
    subprocess.run(
        ["xargs", "-0", "cp", "--no-dereference", "--parents", "-t", str(to)],
        cwd=ROOT,
        input=b"\0".join(there),
        check=True,
    )
    return to
