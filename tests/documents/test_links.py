"""Links lead to existing headings, on GitHub and on the site. The two derive anchors differently."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.documents.fences import FENCE, PAGES

LINK = re.compile(r"\]\(\s*([^)\s]+)\s*\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
GENERATED = {"grpc.md", "python.md"}  # pages to which the site adds headings


def test_links_to_headings_work_on_github_and_on_the_site():
    dead = list[str]()
    for page in PAGES:
        for target in LINK.findall(FENCE.sub("", page.read_text())):
            file, _, anchor = target.partition("#")
            to = (page.parent / file).resolve() if file else page
            if not anchor or ":" in file or to.suffix != ".md" or to.name in GENERATED:
                continue
            if any(anchor not in names for names in anchors(to)):
                dead.append(f"{page.name}: {target}")
    assert not dead, f"no such heading (a linked heading must not end in punctuation): {dead}"


@cache
def anchors(page: Path) -> tuple[set[str], set[str]]:
    """Returns the anchors of a page's headings on GitHub, and on the site."""
    headings = [
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each) for each in HEADING.findall(FENCE.sub("", page.read_text()))
    ]
    kept = [re.sub(r"[^\w\s-]", "", heading).strip(" ").lower() for heading in headings]
    plain = [re.sub(r"[^\w\s-]", "", heading).lower() for heading in headings]
    return {each.replace(" ", "-") for each in plain}, {re.sub(r"[-\s]+", "-", each) for each in kept}


def test_a_heading_that_ends_in_dots_has_two_names(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# `it failed: ...`\n\n## Two words\n")
    assert anchors(page) == ({"it-failed-", "two-words"}, {"it-failed", "two-words"})
