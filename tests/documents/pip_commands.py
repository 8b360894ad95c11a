"""The `pip install` commands that README.md, the documentation and the examples tell a reader to run.

`python -m tests.documents.pip_commands` prints them.
"""

from __future__ import annotations

import re
import shlex

from tests.documents.fences import ROOT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/*.*"))]
COMMAND = re.compile(r"\bpip install +([^`\n]+)")
PLACEHOLDER = "..."  # in the text of an error message


def pip_commands() -> dict[str, list[str]]:
    """Returns the words after `pip install` of each command, by page and line."""
    found = {}
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            for words in COMMAND.findall(line):
                if PLACEHOLDER not in words:
                    found[f"{page.relative_to(ROOT)}:{number}"] = shlex.split(words)
    return found


if __name__ == "__main__":
    for place, words in pip_commands().items():
        print(f"{place}: pip install {shlex.join(words)}")
