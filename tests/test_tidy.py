"""What can be checked of the style by a machine."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = [
    path
    for folder in ("proto", "server", "learner", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name
]
LONGEST_FILE, LONGEST_FUNCTION = 300, 60
LONG_FILES: dict[str, str] = {}  # path: why it has one job all the same
MAY_PRINT = {"commands.py", "command.py", "__main__.py", "remote.py", "offline.py"}  # the command line
FORBIDDEN_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|manager|handler|processor|misc)(_|$)")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", CODE, ids=relative)
def test_a_file_is_short_says_what_it_is_and_swallows_nothing(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says in its first line what it is"
    if relative(path) not in LONG_FILES:
        assert text.count("\n") <= LONGEST_FILE, "a file has one job and is read in one sitting"
    assert not FORBIDDEN_NAMES.search(path.stem), "a name that says nothing"
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < LONGEST_FUNCTION, f"{node.name} is too long"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, "a bare except"
            assert not (len(node.body) == 1 and isinstance(node.body[0], ast.Pass) and _broad(node)), (
                "swallows everything"
            )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert path.name in MAY_PRINT, "only the command line prints"


def _broad(node: ast.ExceptHandler) -> bool:
    return isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"}


def test_nothing_committed_names_somebodys_machine():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    suspicious = re.compile(r"/(?:root|home/\w+|Users/\w+)/")
    for name in listed:
        if name == "tests/test_tidy.py" or not (ROOT / name).is_file():
            continue
        found = suspicious.search((ROOT / name).read_text(errors="replace"))
        assert found is None, f"{name} names {found[0]!r}"
