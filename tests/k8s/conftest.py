"""The chart's output, rendered once for all tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.k8s import engine
from tests.k8s.cases import CASES


@pytest.fixture(scope="session")
def rendered() -> dict[str, dict[str, Any]]:
    """Returns for each case: error, manifest, notes, objects, and the errors in the objects."""
    try:
        return engine.render(CASES)
    except engine.NoPythonError as error:
        pytest.fail(str(error), pytrace=False)
