"""Tests and test files that the pages cite exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "ARCHITECTURE.md", ROOT / "SECURITY.md", ROOT / "README.md"]
NAMING = [page for page in PAGES if page.parent.name == "concepts"]  # other tables name settings and metrics
CITED = re.compile(r"`([a-z0-9]+(?:_[a-z0-9]+){3,})(_\.\.\.)?`")  # four words or more; `...` ends a cut name
FILE = re.compile(r"`(?:tests/)?((?!tests/)[a-z0-9_]+/test_[a-z0-9_]+\.py)`")


def names() -> set[str]:
    """Returns the names of all tests, without `test_`."""
    source = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return set(re.findall(r"def test_(\w+)\(", source))


def test_cited_tests_exist():
    known, wrong = names(), []
    for page in NAMING:
        for line in page.read_text().splitlines():
            for name, cut in CITED.findall(line) if line.startswith("|") else ():
                found = any(each.startswith(name) for each in known) if cut else name in known
                if not found and not name.startswith("test_"):
                    wrong.append(f"{page.name}: {name}{cut}")
    assert not wrong


def test_cited_files_exist():
    cited = {(page, name) for page in PAGES for name in FILE.findall(page.read_text())}
    assert len(cited) > 20
    assert not [f"{page.name}: {name}" for page, name in cited if not (ROOT / "tests" / name).is_file()]
