"""What operators are told of a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from atoll_server.status import merged_tokens, trained_tokens


@pytest.mark.parametrize(("reported", "merged", "told"), [(84_480, 86_141.25, 86_142), (90_000, 86_141.25, 90_000)])
def test_never_are_more_tokens_merged_than_trained_though_a_learner_died_before_it_reported(reported, merged, told):
    parameters = 100
    account = SimpleNamespace(merged_token_parameters=merged * parameters)
    roster = SimpleNamespace(tokens=lambda: reported, entries={"a": SimpleNamespace(account=account)})
    engine = SimpleNamespace(layout=SimpleNamespace(parameters=parameters))
    core = SimpleNamespace(roster=roster, engine=engine)
    assert merged_tokens(core) == merged
    assert trained_tokens(core) == told
    assert trained_tokens(SimpleNamespace(roster=roster, engine=None)) == reported
