"""The generated parts of the reference equal the output of `make reference`."""

from __future__ import annotations

import importlib.util

import pytest

from tests.documents.fences import ROOT

SPEC = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
assert SPEC is not None
assert SPEC.loader is not None
hooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hooks)


@pytest.mark.parametrize("page", list(hooks.GENERATED))
def test_a_generated_part_is_up_to_date(page: str):
    assert (ROOT / "docs" / page).read_text() == hooks.generated(page), "run `make reference`"
