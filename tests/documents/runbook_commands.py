"""The commands of docs/operate/runbooks.md.

tests/compose runs those for Docker Compose, and the `atoll` commands, in the demo. test_runbook_actions.py runs those
that act on a run, and the filters, with a core. tests/k8s checks those for kubectl against the objects that the chart
renders.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from tests.documents.fences import ROOT, fences

PAGE = ROOT / "docs/operate/runbooks.md"
COMPOSE, ATOLL, KUBECTL = "docker compose", "atoll", "kubectl"
CHECKED = (COMPOSE, ATOLL, KUBECTL)
# Commands that change a run.
ACTION = re.compile(r"atoll (evict|pause|resume|checkpoint take)\b")


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

    @property
    def action(self) -> str:
        """The subcommand that changes the run; empty for a command that only reads."""
        found = ACTION.match(self.text)
        return found[1] if found else ""

    def filtered(self, printed: str) -> str:
        """Returns what the command's `grep` leaves of its output. Raises CalledProcessError if grep fails."""
        if not self.filter:
            return printed
        done = subprocess.run(["grep", "--", self.filter], input=printed, capture_output=True, text=True, check=False)
        if done.returncode > 1:  # 1: no line matches
            done.check_returncode()
        return done.stdout


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
