"""The generated parts of the reference equal the output of `make reference`."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.documents.fences import ROOT, all_fences
from tests.k8s.cases import leaves

SPEC = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
assert SPEC is not None
assert SPEC.loader is not None
hooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hooks)


@pytest.mark.parametrize("page", list(hooks.GENERATED))
def test_a_generated_part_is_up_to_date(page: str):
    assert (ROOT / "docs" / page).read_text() == hooks.generated(page), "run `make reference`"


def test_the_table_of_the_chart_has_every_value_with_a_meaning():
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \| (.*) \|$", hooks.generated("reference/chart.md"), re.MULTILINE)
    paths = {path for path, *_ in rows}
    assert len(rows) == len(paths) > 100
    assert [path for path, _, meaning in rows if not meaning] == [], "add a comment to values.yaml"
    missing = [leaf for leaf in leaves() if not any(leaf == path or leaf.startswith(f"{path}.") for path in paths)]
    assert missing == []


def test_values_that_the_pages_set_exist():
    texts = [fence.text for fence in all_fences("bash") if "helm " in fence.text]
    given = {path for text in texts for path in re.findall(r"--set ([\w.]+)=", text)}
    assert len(given) > 4
    assert given <= set(leaves())
