"""Python in the documents: each block parses, and what it imports of Atoll is there."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (f"{path.relative_to(ROOT)}:{number}", block)
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    for number, block in enumerate(BLOCK.findall(path.read_text()), 1)
]


@pytest.mark.parametrize("block", [block for _, block in BLOCKS], ids=[place for place, _ in BLOCKS])
def test_what_a_document_imports_is_there(block: str):
    body = "    ...\n" if block.rstrip().endswith(":") else ""  # the reader's own loop goes there
    for node in ast.walk(ast.parse(block + body)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0].startswith("atoll"):
            module = importlib.import_module(node.module or "")
            missing = [each.name for each in node.names if not hasattr(module, each.name)]
            assert not missing, f"{node.module} has no {missing}"
