"""The shard that has a fragment."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from atoll_server.access.refusals import Refused, Status
from atoll_server.run.registrar import Registrar
from atoll_server.run.run_clock import RunClock
from atoll_server.settings import Limits
from atoll_server.telemetry.journal import Journal
from atoll_wire.layout.layout import MergeKind, TensorSpec, plan
from atoll_wire.process.clock import SYSTEM


def test_a_fragment_is_served_by_its_shard_and_a_caller_of_another_one_joins_again():
    run = Registrar(Limits(), RunClock(SYSTEM), Journal())
    with pytest.raises(Refused, match="no parameters yet"):
        run.shard(0)
    tensors = [TensorSpec(f"t{n}", (64, 64), "float32", MergeKind.AVERAGE, ()) for n in range(4)]
    layout = plan(tensors, 4)
    assert len(layout.fragments) == 4
    shards = [SimpleNamespace(fragments={0: "zero", 2: "two"}), SimpleNamespace(fragments={1: "one"})]
    run.runs(layout, shards)
    assert run.owner(2) == (shards[0], "two")
    assert run.owner(1) == (shards[1], "one")
    assert [list(each.fragments) for each in run.places()] == [[0, 2], [1]]
    for fragment, status in ((3, Status.UNAUTHENTICATED), (4, Status.INVALID_ARGUMENT)):
        with pytest.raises(Refused) as refused:
            run.owner(fragment)
        assert refused.value.status is status
    assert run.shard(1) is shards[1], "it is followed by the number that places gives it"
    with pytest.raises(Refused, match="shard 2 does not exist: the run has 2"):
        run.shard(2)
