"""Registrar, shards, front and learners with certificates: each may make only the calls of its role."""

from __future__ import annotations

import contextlib
from pathlib import Path

import grpc
import pytest
from atoll_server.access.certificate_authority import init, issue
from atoll_wire import shards_pb2 as sh
from atoll_wire import shards_pb2_grpc
from atoll_wire.contract import PROTOCOL
from atoll_wire.security.certificate import Role
from atoll_wire.security.transport import TransportSecurity

from tests.end_to_end.world import Sharded, Trainee, children, eventually, front, sharded, train

HERE = ("127.0.0.1", "localhost")

pytestmark = pytest.mark.ci  # each test starts several processes


class Papers:
    """An authority and its certificates. elsewhere: the certificate of a core at another host."""

    def __init__(self, place: Path) -> None:
        self.place = place
        init(place)
        self.core = issue(place, Role.CORE, "home", HERE, 1)
        self.elsewhere = issue(place, Role.CORE, "elsewhere", ["core.example"], 1)
        self.front = issue(place, Role.FRONT, "eu", HERE, 1)
        self.operator = issue(place, Role.OPERATOR, "alice", (), 1)

    def learner(self, name: str) -> Path:
        return issue(self.place, Role.LEARNER, name, (), 1)


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    return Papers(tmp_path_factory.mktemp("papers"))


@contextlib.contextmanager
def certified(place: Path, papers: Papers):
    with sharded(place, 2, common=["--tls", str(papers.core)]) as run:
        run.registrar.security = TransportSecurity(papers.operator)
        yield run


def attach(run: Sharded, certificate: Path) -> sh.FromRegistrar:
    """Attaches as shard 1, and returns the registrar's first message."""
    hello = sh.Hello(protocol=PROTOCOL, shard=1, shards=2, address="127.0.0.1:1", directory=b"another")
    with TransportSecurity(certificate).dial_and_wait(run.address) as channel:
        call = shards_pb2_grpc.RegistryStub(channel).Attach(iter([sh.FromShard(hello=hello)]), timeout=20)
        return next(iter(call))


def fetch_initial(run: Sharded, certificate: Path) -> sh.FetchInitialReply:
    with TransportSecurity(certificate).dial_and_wait(run.address) as channel:
        request = sh.FetchInitialRequest(shard=1, sha256=b"unknown")
        return next(iter(shards_pb2_grpc.RegistryStub(channel).FetchInitial(request, timeout=20)))


def test_learners_train_over_certified_shards_with_and_without_a_front(tmp_path, papers):
    with certified(tmp_path, papers) as run, front(tmp_path, run.address, "--tls", str(papers.front)) as eu:
        far = Trainee(eu.address, "far", lambda t: len(t.losses) >= 120, tls=papers.learner("far"))
        far.start()
        train(run.address, "near", steps=120, tls=papers.learner("near"))
        far.done()
        eventually(lambda: run.status().contributions.pending == 0)
        status = run.status()
    assert all(each.version > 3 for each in status.fragments), status.fragments
    assert status.contributions.accepted == status.contributions.merged + status.contributions.refused


@pytest.mark.parametrize("role", ["learner", "front", "operator"])
def test_only_cores_attach(tmp_path_factory, papers, role):
    with certified(tmp_path_factory.mktemp(role), papers) as run:
        train(run.address, "a", steps=10, tls=papers.learner("a"))
        certificate = papers.learner("a") if role == "learner" else getattr(papers, role)
        for call, core_gets in ((attach, grpc.StatusCode.ALREADY_EXISTS), (fetch_initial, grpc.StatusCode.UNAVAILABLE)):
            with pytest.raises(grpc.RpcError) as caught:
                call(run, certificate)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "only a shard of the run may make this call" in caught.value.details()
            assert "use a core's certificate" in caught.value.details()
            with pytest.raises(grpc.RpcError) as caught:
                call(run, papers.core)
            assert caught.value.code() is core_gets, "the same call must succeed with a core's certificate"


def test_a_shard_with_another_hosts_certificate_is_not_called(tmp_path, papers):
    """The shard may attach, because it proves its role. Learners refuse to connect to it, and report the reason."""
    with certified(tmp_path, papers) as run, children(tmp_path / "logs") as group:
        over: list[bool] = []
        trainee = Trainee(run.address, "a", lambda _: bool(over), tls=papers.learner("a"))
        trainee.start()
        eventually(lambda: hasattr(trainee, "learner") and trainee.learner.stats().merged > 2)
        shard = run.shards[1]
        shard.kill()
        options = ["--shard", "1/2", "--registrar", run.address, "--tls", str(papers.elsewhere)]
        impostor = group.launch_core("elsewhere", shard.directory, shard.address, options)
        group.serving(impostor)
        eventually(lambda: "Hostname Verification Check failed" in trainee.learner.stats().last_error)
        before = trainee.learner.stats().merged
        eventually(lambda: trainee.learner.stats().merged > before + 2)  # the other shard's fragments
        impostor.kill()
        shard.start()
        eventually(lambda: trainee.learner.stats().connected)
        over.append(True)
        trainee.done()
