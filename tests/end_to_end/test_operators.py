"""Operator queries and actions: receipts and evictions."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import grpc
import pytest
from atoll.demo.processes import free_port
from atoll.errors import LearnerError
from atoll_server.access.certificate_authority import init, issue
from atoll_wire import outer_pb2 as pb
from atoll_wire.errors import ExitStatus
from atoll_wire.security.certificate import Role

from tests.end_to_end.test_refusals import Hand, _rescale, _set
from tests.end_to_end.world import Trainee, core, eventually, front, train


def atoll(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "atoll.cli", *arguments], capture_output=True, text=True, timeout=60)


def receipts(*arguments: str) -> list[dict]:
    done = atoll("receipts", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    found: list[dict] = json.loads(done.stdout)
    return found


@pytest.mark.ci
def test_receipts_list_every_contribution_newest_first_also_from_the_directory(tmp_path):
    with core(tmp_path) as running:
        train(running.address, "a", "b", steps=80)
        eventually(lambda: running.status().contributions.pending == 0)
        counts = running.status().contributions
        told = receipts("--server", running.address, "--last", "10000")
        assert len(told) == counts.accepted == counts.merged
        assert [each["number"] for each in told] == sorted((each["number"] for each in told), reverse=True)
        for each in told:
            assert each["receipt"]["fate"] == "merged"
            assert 0 < each["receipt"]["weight"] <= 1
            assert each["receipt"]["version"] > each["base_version"]
        assert receipts("--dir", str(running.directory), "--last", "10000") == told
        mine = receipts("--server", running.address, "--learner", "a", "--last", "3")
        assert mine == [each for each in told if each["receipt"]["learner"] == "a"][:3]
        assert receipts("--server", running.address, "--fate", "refused") == []
        assert receipts("--server", running.address, "--learner", "a", "--fate", "refused") == []
        for place in (["--server", running.address], ["--dir", str(running.directory)]):
            unknown = atoll("receipts", *place, "--learner", "nosuch")
            assert unknown.returncode == 2
            assert unknown.stderr == 'error: the run has no learner "nosuch": its learners are a, b\n'
        shown = atoll("receipts", "--server", running.address, "--last", "5").stdout
        assert shown.count("merged") == 5
    wrong = atoll("receipts", "--dir", str(running.directory), "--fate", "eaten")
    assert wrong.stderr == 'error: --fate "eaten" is invalid: give pending, merged or refused\n'


def test_a_command_through_a_front_without_its_core_names_the_link_to_check(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    with front(tmp_path, address) as alone:
        done = atoll("status", "--server", alone.address)
    assert done.returncode == 3
    assert done.stderr.startswith(
        f"error: the front at {alone.address} answers, but the core at {address} does not answer the front ("
    )
    assert done.stderr.endswith(f"): check the link between the front and {address}, and that the core runs there\n")


def test_a_wrong_core_certificate_is_not_reported_as_a_missing_core(tmp_path):
    init(tmp_path)
    directory = issue(tmp_path, Role.CORE, "home", ["127.0.0.1"], 1)
    done = atoll("status", "--server", f"127.0.0.1:{free_port()}", "--tls", str(directory))
    assert done.returncode == 1
    said = f"--tls {directory} has the certificate of core/home, not of an operator"
    assert done.stderr == f"error: {said}: use an operator's certificate (atoll certs issue operator NAME)\n"


def test_the_audit_log_has_the_outcome_of_an_action_that_failed(tmp_path):
    with core(tmp_path) as running:
        for early in (("take",), ("export", str(tmp_path / "model"))):
            assert "the run has no parameters yet" in atoll("checkpoint", *early, "--server", running.address).stderr
        assert atoll("evict", "z", "--yes", "--server", running.address).returncode == 2
        train(running.address, "a", steps=8)
        for command in (("checkpoint", "take"), ("evict", "a", "--yes")):
            assert atoll(*command, "--server", running.address).returncode == 0
        running.stop()
    lines = [json.loads(line) for line in (running.directory / "audit.jsonl").read_text().splitlines()]
    acted = [(line["act"], line.get("status"), line.get("detail")) for line in lines if "operator" in line]
    assert acted[:2] == [
        (act, "unavailable", "the run has no parameters yet: start a learner first")
        for act in ("take a checkpoint", "export the model")
    ]
    assert acted[2][:2] == ("evict", "not_found")
    assert acted[3:] == [("take a checkpoint", None, None), ("evict", None, None)]


def test_pages_of_receipts_have_no_gaps(tmp_path):
    with core(tmp_path) as running:
        train(running.address, "a", steps=60)
        eventually(lambda: running.status().contributions.pending == 0)
        with running.operator() as stub:
            everything = stub.ListReceipts(pb.ListReceiptsRequest()).receipts
            pages, before = [], ""
            while (page := stub.ListReceipts(pb.ListReceiptsRequest(limit=3, before=before))).receipts:
                pages += page.receipts
                before = page.next
        assert list(pages) == list(everything)


def test_a_contribution_with_a_nan_is_refused_with_a_receipt_that_states_why(tmp_path):
    with core(tmp_path) as running, running.outer() as stub:
        train(running.address, "a", steps=30)
        hand = Hand(stub)
        receipt = hand.push(lambda h, f: _rescale(h, f, 0x7FC0))
        assert (receipt.fate, receipt.drop_outstanding) == (pb.FATE_REFUSED, True)
        running.kill()
        running.start()
        (told,) = receipts("--server", running.address, "--fate", "refused")
        assert "NaN" in told["receipt"]["reason"]
        assert (told["receipt"]["learner"], told["norm"]) == ("hand", 0.0)
        assert running.status().contributions.refused == 1


@pytest.mark.ci
def test_an_evicted_learner_stops_with_one_line_and_returns_only_if_readmitted(tmp_path):
    with core(tmp_path) as running:
        stop = []
        stays, goes = (Trainee(running.address, name, lambda _: bool(stop)) for name in ("stays", "goes"))
        for trainee in (stays, goes):
            trainee.start()
        eventually(lambda: all(len(t.losses) > 30 for t in (stays, goes)))
        done = atoll("evict", "goes", "--yes", "--server", running.address, "--reason", "spoils the run")
        assert done.stdout == "goes was evicted: spoils the run\n"
        with pytest.raises(
            LearnerError,
            match=r"was evicted \(spoils the run\): an operator can readmit it with `atoll evict goes --undo`",
        ):
            goes.done()
        wanted = {"stays": "live", "goes": "evicted"}  # on a slow machine, one may not have reported yet
        eventually(lambda: {each.learner: each.state for each in running.status().learners} == wanted)
        running.kill()  # the eviction survives a restart
        running.start()
        again = Trainee(running.address, "goes", lambda t: len(t.losses) > 30, connect_timeout_s=10.0)
        again.start()
        with pytest.raises(LearnerError, match="spoils the run"):
            again.done()
        assert atoll("evict", "goes", "--undo", "--server", running.address).stdout == "goes may join again\n"
        train(running.address, "goes", steps=30)
        stop.append(True)
        stays.done()
        eventually(lambda: running.status().contributions.pending == 0)  # merged when all have left
        assert receipts("--dir", str(running.directory), "--fate", "pending") == []
    unknown = atoll("evict", "absent", "--yes", "--server", running.address)
    assert unknown.returncode == 3


@pytest.mark.ci
def test_a_process_of_an_evicted_learner_waits_for_sigterm_and_ends_with_its_own_status(tmp_path, unused_port):
    with core(tmp_path) as running:
        command = [sys.executable, "-m", "atoll.cli", "learner", "--name", "goes", "--server", running.address]
        subprocess.run([*command, "--max-steps", "2", "--drain-s", "1"], check=True, capture_output=True, timeout=100)
        assert atoll("evict", "goes", "--yes", "--server", running.address).returncode == 0
        waiting = subprocess.Popen(
            [*command, "--if-refused", "wait", "--metrics-listen", f"127.0.0.1:{unused_port}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with waiting:
            assert waiting.stdout is not None
            while "this process waits for SIGTERM" not in (line := waiting.stdout.readline()):
                assert line, "it ended"
            assert 'learner "goes" was evicted' in line
            assert waiting.poll() is None
            with pytest.raises(ConnectionRefusedError):  # its container is therefore unhealthy
                socket.create_connection(("127.0.0.1", unused_port), timeout=5)
            waiting.terminate()
            assert waiting.wait(20) == ExitStatus.REFUSED


def test_an_evicted_learners_pending_work_is_refused(tmp_path):
    with core(tmp_path, "--quorum", "3") as running, running.outer() as stub:
        stop = []
        trainee = Trainee(running.address, "a", lambda _: bool(stop))
        trainee.start()
        eventually(lambda: running.status().merges > 2)
        hand = Hand(stub)
        hand.push(_set(cycle=0))
        with running.operator() as operator:
            operator.Evict(pb.EvictRequest(learner="hand", reason="test"))
            with pytest.raises(grpc.RpcError, match="`atoll status` lists its learners"):
                operator.Evict(pb.EvictRequest(learner="unknown", reason="test"))
        with pytest.raises(grpc.RpcError, match=r"was evicted \(test\)") as caught:
            hand.push(seq=2)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        eventually(lambda: not receipts("--server", running.address, "--learner", "hand", "--fate", "pending"))
        (told,) = receipts("--server", running.address, "--learner", "hand")
        assert told["receipt"]["fate"] in {"merged", "refused"}
        if told["receipt"]["fate"] == "refused":
            assert told["receipt"]["reason"] == "its learner was evicted: test"
        stop.append(True)
        trainee.done()
