"""Prints the dependencies in pyproject.toml, one per line: python needs.py [EXTRA].

An extra that names other extras of Atoll includes their dependencies.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]


def needs(extra: str) -> Iterator[str]:
    """Yields the dependencies of an extra; "": the dependencies that all processes need."""
    for line in PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]:
        own = re.fullmatch(r"atoll\[(.+)\]", line)
        for name in own[1].split(",") if own else ():
            yield from needs(name)
        if not own:
            yield line


print(*needs(sys.argv[1] if len(sys.argv) > 1 else ""), sep="\n")
