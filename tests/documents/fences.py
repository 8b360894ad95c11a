"""Code fences of the documents, as a reader sees them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md")])
FENCE = re.compile(
    r"(?:^[ ]*<!-- not run: (?P<reason>[^\n]*?) -->\n\s*)?"
    r"^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Fence:
    """One fence. reason: why it is not run as written, from the comment above it. title: the file's name."""

    page: str
    line: int
    language: str
    text: str
    reason: str
    title: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def fences(path: Path) -> Iterator[Fence]:
    """Yields the fences of a page, in order."""
    text = path.read_text()
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        body = re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        language, _, attributes = found["language"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', attributes)
        yield Fence(str(path.relative_to(ROOT)), line, language, body, found["reason"] or "", title[1] if title else "")


def all_fences(*languages: str) -> list[Fence]:
    """Returns the fences of all pages, in the given languages or in all."""
    found = [fence for path in PAGES for fence in fences(path)]
    return [fence for fence in found if not languages or fence.language in languages]
