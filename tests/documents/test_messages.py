"""Messages that pages quote match the messages of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.documents.fences import FENCE, PAGES, ROOT

CODE = ("learner", "server", "proto", "dashboard", "forecast")
ELSEWHERE = re.compile(r"^.*\| (yes|no) \|$", re.MULTILINE)  # tests/end_to_end/test_bad_states.py checks these rows
QUOTED = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(
    r"(atoll|curl|docker|git|helm|kubectl|make|pip|python|sudo|ulimit|with|import|Authorization:) |.*[({]"
)
QUOTES = sorted(
    {
        quote
        for page in PAGES
        for quote in QUOTED.findall(ELSEWHERE.sub("", FENCE.sub("", page.read_text())))
        if len(quote.split()) > 3 and not COMMAND.match(quote) and page.name != "CHANGELOG.md"
    }
)


def test_the_pages_quote_messages():
    assert len(QUOTES) > 60


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_one_that_atoll_prints(quote: str):
    parts = [part.strip(" :;,\"'()") for part in re.split(r"\.\.\.|\d+(?:\.\d+)?", quote)]
    texts = code_texts()
    missing = [part for part in parts if len(part) > 3 and part not in texts]
    assert not missing, f"the code has no such messages: {missing}"


@cache
def code_texts() -> str:
    """Returns all string literals of the product, without the values of format fields."""
    paths = [path for top in CODE for path in sorted((ROOT / top).rglob("*.py"))]
    return "\n".join(text for path in paths for text in literals(path))


def literals(path: Path) -> list[str]:
    """Returns a module's string literals. Each field of an f-string becomes an ellipsis."""
    found = list[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values))
    return found
