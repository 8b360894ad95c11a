"""Code fences of the documents, as a reader sees them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.documents import not_run

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md")])
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Fence:
    """One fence. title: the name of the file in which a reader saves it; before: the prose since the last fence."""

    page: str
    line: int
    language: str
    text: str
    title: str = ""
    before: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str:
        """Why no part of the fence is run; empty if a part runs."""
        if self.language != "bash":
            return not_run.reason(self.page, self.text)
        runs, left = not_run.split(self.text)
        return not_run.reason(self.page, self.text) or ("" if runs.strip() else left[0][1])

    @property
    def script(self) -> str:
        """The commands that run."""
        return not_run.split(self.text)[0]

    @property
    def commands_left(self) -> list[tuple[str, str]]:
        """The commands that a partly run fence leaves out, each with the reason."""
        return [] if self.reason or self.language != "bash" else not_run.split(self.text)[1]


def fences(path: Path) -> Iterator[Fence]:
    """Yields the fences of a page, in order."""
    text = path.read_text()
    end = 0
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        body = re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        language, _, attributes = found["language"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', attributes)
        yield Fence(
            str(path.relative_to(ROOT)), line, language, body, title[1] if title else "", text[end : found.start()]
        )
        end = found.end()


def all_fences(*languages: str) -> list[Fence]:
    """The fences of all pages. languages: all, if none is given."""
    found = [fence for path in PAGES for fence in fences(path)]
    return [fence for fence in found if not languages or fence.language in languages]
