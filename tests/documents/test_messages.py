"""The messages that troubleshooting.md explains are those that Atoll prints."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.documents.fences import ROOT

PAGE = ROOT / "docs/guides/troubleshooting.md"
CODE = ("learner", "server", "proto", "dashboard", "forecast")
QUOTED = re.compile(r"`([^`]+)`")
QUOTES = [quote for line in PAGE.read_text().splitlines() if line.startswith("### ") for quote in QUOTED.findall(line)]


def test_the_page_explains_messages():
    assert len(QUOTES) > 40


@pytest.mark.parametrize("quote", QUOTES)
def test_a_message_that_is_explained_is_one_that_atoll_prints(quote: str):
    parts = [part.strip(" :;,\"'()") for part in re.split(r"\.\.\.|\d+(?:\.\d+)?", quote)]
    texts = code_texts()
    missing = [part for part in parts if len(part) > 3 and part not in texts]
    assert not missing, f"not in the code: {missing}"


@cache
def code_texts() -> str:
    """All string literals of the product, with their values of format fields left out."""
    paths = [path for top in CODE for path in sorted((ROOT / top).rglob("*.py"))]
    return "\n".join(text for path in paths for text in literals(path))


def literals(path: Path) -> list[str]:
    """A module's texts; what lies between the fields of an f-string is joined by an ellipsis."""
    found = list[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values))
    return found
