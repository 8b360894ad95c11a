"""The commands of docs/operate/runbooks.md.

tests/compose runs those for Docker Compose, and the `atoll` commands, in the demo. tests/k8s checks those for kubectl
against the objects that the chart renders.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.documents.fences import ROOT, fences

PAGE = ROOT / "docs/operate/runbooks.md"
COMPOSE, ATOLL, KUBECTL = "docker compose", "atoll", "kubectl"
CHECKED = (COMPOSE, ATOLL, KUBECTL)


@dataclass(frozen=True, slots=True)
class RunbookCommand:
    """A command. filter: the pattern of a `grep` that filters the output; empty if there is none."""

    text: str
    filter: str = ""

    def __str__(self) -> str:
        return self.text

    @property
    def kind(self) -> str:
        """The element of CHECKED with which the command begins; empty if no test covers the command."""
        return next((each for each in CHECKED if self.text.startswith(f"{each} ")), "")


def commands(kind: str = "") -> list[RunbookCommand]:
    """Returns each command once, in order. kind: an element of CHECKED; empty for all commands."""
    lines = [
        re.sub(r"\s+#.*", "", line).strip()
        for fence in fences(PAGE)
        if fence.language == "bash"
        for line in fence.text.replace("\\\n", " ").splitlines()
    ]
    found = [_parsed(line) for line in dict.fromkeys(lines) if line]
    return [each for each in found if kind in {"", each.kind}]


def _parsed(line: str) -> RunbookCommand:
    whole = re.fullmatch(r'([^|]+?) \| grep "?([^"|]+?)"?', line)
    return RunbookCommand(whole[1], whole[2]) if whole else RunbookCommand(line)
