"""What a run with several shards tells operators: metrics, dashboard, events, doctor and evictions cover all shards."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from atoll.demo.processes import children, free_port
from atoll.doctor import LearnerToCheck, Severity, check_connection
from atoll_server.checkpoints.restore import LEDGER
from atoll_server.ledger import run_ledger
from atoll_server.ledger.database import read_ledger
from atoll_wire import outer_pb2 as pb
from atoll_wire.security.transport import TransportSecurity

from benchmarks.process_state import Metrics, metrics
from tests.end_to_end.relay import relay
from tests.end_to_end.test_operators import atoll
from tests.end_to_end.test_refusals import Hand
from tests.end_to_end.test_restore import take
from tests.end_to_end.world import Core, Sharded, eventually, front, sharded, train

pytestmark = pytest.mark.ci  # each test starts several processes

OPTIONS = ["--fragments", "4", "--inner-steps", "4"]
LINK = "Mbit/s"  # rates depend on the machine


@dataclass
class Observed:
    """A registrar with shard 0, shard 1, and a dashboard. ports: of the two processes' metrics. url: of the page."""

    registrar: Core
    shard: Core
    ports: tuple[int, int]
    url: str

    def look(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/{path}", timeout=20) as answer:
            return json.loads(answer.read())

    def metrics(self) -> list[Metrics]:
        return [metrics(port) for port in self.ports]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Observed]:
    """A run that two learners have trained, and whose figures no longer change."""
    place: Path = tmp_path_factory.mktemp("observed")
    with children(place) as group:
        ports = free_port(), free_port()
        listen = [["--metrics-listen", f"127.0.0.1:{port}"] for port in ports]
        registrar = Core(group, place / "registrar", ["--shard", "0/2", *OPTIONS, *listen[0]], "registrar")
        attached = ["--shard", "1/2", "--registrar", registrar.address, *listen[1]]
        shard = Core(group, place / "shard1", attached, "shard1")
        _, url = group.start_dashboard("127.0.0.1:0", registrar.address)
        train(registrar.address, "a", "b", steps=100)
        it = Observed(registrar, shard, ports, url)

        def settled() -> bool:
            """Returns whether the status has the last figures of both processes, which it may get a second later."""
            status, read = registrar.status(), it.metrics()
            accepted = sum(each.total("atoll_contributions_total", fate="accepted") for each in read)
            decided = status.contributions.merged + status.contributions.refused
            return accepted == status.contributions.accepted == decided

        eventually(settled)
        yield it


def test_the_metrics_of_all_processes_add_up_to_the_run(run):
    status = run.registrar.status()
    owners = {index: each.shard for each in status.shards for index in each.fragments}
    tokens = pytest.approx(status.tokens_merged)  # of all fragments

    def sampled() -> bool:
        """Returns whether both processes have sampled their last figures, which they do each second."""
        own, other = run.metrics()
        merges = own.total("atoll_merges_total") + other.total("atoll_merges_total")
        return merges == status.merges and own.total("atoll_tokens_merged_total") == tokens

    eventually(sampled)
    read = run.metrics()
    assert {owners[each.fragment] for each in status.fragments} == {0, 1}
    for number, each in enumerate(read):
        mine = {int(sample.labels["fragment"]): sample.value for sample in each.samples("atoll_fragment_version")}
        assert mine == {f.fragment: f.version for f in status.fragments if owners[f.fragment] == number}
    for fate in ("accepted", "merged", "refused"):
        counted = sum(each.total("atoll_contributions_total", fate=fate) for each in read)
        assert counted == getattr(status.contributions, fate), "a sum over processes counts each contribution once"
    assert read[0].total("atoll_learners") == len(status.learners) == 2
    for name in ("atoll_tokens_merged_total", "atoll_tokens_trained_total", "atoll_goodput_ratio", "atoll_learners"):
        assert not list(read[1].samples(name)), f"only the registrar has {name}: a sum over processes would double it"


def test_the_dashboard_shows_the_fragments_rounds_receipts_and_events_of_all_shards(run):
    status = run.registrar.status()
    counts = status.contributions
    eventually(lambda: run.look("run")["contributions"]["merged"] == counts.merged)
    fragments = {each["fragment"]: each for each in run.look("fragments")["items"]}
    owners = {index: each.shard for each in status.shards for index in each.fragments}
    assert {index: each["shard"] for index, each in fragments.items()} == owners
    assert {index: each["version"] for index, each in fragments.items()} == {
        each.fragment: each.version for each in status.fragments
    }
    assert {each["fragment"] for each in run.look("rounds?last=20")} == {0, 1, 2, 3}
    page = run.look("receipts?limit=20")
    receipts = page["items"]
    while page["before"]:
        page = run.look(f"receipts?limit=20&before={page['before']}")
        receipts += page["items"]
    assert len({(each["shard"], each["number"]) for each in receipts}) == len(receipts) == counts.accepted
    assert {each["shard"] for each in receipts} == {0, 1}
    told = [each["text"] for each in run.look("events")]
    assert any(text.startswith("shard 1: the core started") for text in told), told


def problems(address: str) -> list[tuple[str, str]]:
    """Returns what the doctor finds wrong, and the fix."""
    findings = check_connection(LearnerToCheck(address, TransportSecurity()))
    bad = [each for each in findings if each.verdict is not Severity.GOOD and LINK not in each.what]
    return [(each.what, each.remedy) for each in bad]


def test_the_doctor_checks_the_way_to_each_shard(run, tmp_path):
    """A learner needs all shards, but joins only at the registrar."""
    said = atoll("doctor", "--server", run.registrar.address)
    assert said.returncode == 0, said.stdout + said.stderr
    assert f"the shard at {run.shard.address} answers" in said.stdout
    with front(tmp_path, run.registrar.address) as eu:
        through = atoll("doctor", "--server", eu.address)
        assert through.returncode == 0, through.stdout + through.stderr
        assert run.shard.address not in through.stdout, "a learner behind a front does not call the shard"
    assert problems(run.shard.address) == []
    run.shard.kill()
    try:
        [(what, fix)] = problems(run.registrar.address)
    finally:
        run.shard.start()
    assert what.startswith(f"port {run.shard.address.rpartition(':')[2]} of 127.0.0.1 cannot be reached")
    assert "start a core or front there" in fix


def follow(shard: Core, session: pb.Session) -> None:
    """Makes a learner's call to shard 1. Raises RpcError if the shard refuses it."""
    with shard.outer() as stub:
        call = stub.Follow(pb.FollowRequest(session=session, shard=1), timeout=20)
        next(call)
        call.cancel()


def evicted_at(core: Core) -> str | None:
    """Returns why a process's ledger says that the learner "hand" was evicted. None: it has no such learner."""
    with read_ledger(core.directory / LEDGER) as db:
        return next((row.evicted for row in run_ledger.learners(db) if row.name == "hand"), None)


def attached(run: Sharded) -> bool:
    return {each.shard: each.attached for each in run.status().shards}[1]


def test_an_eviction_reaches_a_shard_that_was_away_and_holds_there_without_the_registrar(tmp_path):
    with sharded(tmp_path, 2) as run:
        shard = run.shards[1]
        train(run.address, "a", steps=40)
        with run.registrar.outer() as stub:
            session = Hand(stub).session
        follow(shard, session)
        shard.kill()
        eventually(lambda: not attached(run))
        said = atoll("evict", "hand", "--yes", "--server", run.address, "--reason", "spoils the run")
        assert said.stdout == (
            "hand was evicted: spoils the run\nnot yet confirmed by shard 1, which will apply the change later\n"
        )
        shard.start()
        eventually(lambda: "spoils the run" in (evicted_at(shard) or ""))
        run.registrar.kill()
        shard.kill()
        shard.start()
        with pytest.raises(grpc.RpcError, match="was evicted") as refused:
            follow(shard, session)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        run.registrar.start()
        eventually(lambda: attached(run))
        assert atoll("evict", "hand", "--undo", "--server", run.address).stdout == "hand may join again\n"
        assert evicted_at(shard) == "", "the shard confirms only what its ledger has"
        with run.registrar.outer() as stub:
            follow(shard, Hand(stub).session)


def told_by_shard_1(registrar: Core) -> list[tuple[float, str]]:
    """Returns time and text of the registrar's events that came from shard 1."""
    with registrar.operator() as stub:
        events = stub.ListEvents(pb.ListEventsRequest(), timeout=20).events
    return [(each.at, each.text) for each in events if each.text.startswith("shard 1: ")]


def test_each_event_of_a_shard_reaches_the_registrar_once_although_the_link_is_cut(tmp_path):
    """A shard sends all its events again, since the registrar may be a new process that lacks them."""
    with children(tmp_path) as group:
        registrar = Core(group, tmp_path / "registrar", ["--shard", "0/2", *OPTIONS], "registrar")
        with relay(registrar.address) as link:
            shard = Core(group, tmp_path / "shard1", ["--shard", "1/2", "--registrar", link.address], "shard1")

            def snapshots() -> int:
                return sum("snapshot" in text for _, text in told_by_shard_1(registrar))

            def attached_again(calls: int) -> bool:
                return link.accepted > calls and all(each.attached for each in registrar.status().shards)

            train(registrar.address, "a", steps=40)
            take(registrar)
            eventually(lambda: snapshots() == 1)
            calls = link.accepted
            link.reset()
            eventually(lambda: attached_again(calls))
            take(registrar)
            eventually(lambda: "snapshot 2 is durable" in told_by_shard_1(registrar)[-1][1])
            told = told_by_shard_1(registrar)
            assert len(told) == len(set(told)), told
            shard.kill()
            shard.start()
            eventually(lambda: "shard 1: the core started: epoch 2" in dict(told_by_shard_1(registrar)).values())
            registrar.kill()
            registrar.start()
            eventually(lambda: told_by_shard_1(registrar) != [])
            assert "the core started: epoch 2" in told_by_shard_1(registrar)[0][1], "the new process has the events"
