"""Fleets' certificates, revoked certificates and evicted members, at a core and through a front."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from atoll_server.access.certificate_authority import issue
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.contract import LearnerState
from atoll_wire.security.certificate import Role, read_certificate
from atoll_wire.security.transport import TransportSecurity
from safetensors.torch import save_file

from benchmarks.process_state import metrics
from tests.end_to_end.test_refusals import Hand, request, taken_over
from tests.end_to_end.test_strangers import AWAY, DENIED, Papers, audited, calling, refused
from tests.end_to_end.world import Core, Front, core, eventually, free_port, front, small_model

WAIT_S = 60


@dataclass
class Region:
    """A core and a front with the same list of revoked certificates."""

    papers: Papers
    revoked: Path
    home: Core
    eu: Front
    core_port: int

    def fleet(self, name: str, *others: str) -> Path:
        return issue(self.papers.place, Role.LEARNER, name, (), 1, others)

    def at(self, where: str) -> str:
        return self.home.address if where == "core" else self.eu.address

    def counts(self, where: str) -> tuple[float, float]:
        """Returns the number of entries in the list, and of refusals."""
        read, infix = (metrics(self.core_port), "") if where == "core" else (self.eu.metrics(), "front_")
        return (
            read.total(f"atoll_{infix}revoked_certificates"),
            read.total(f"atoll_{infix}limited_total", limit="revoked"),
        )

    @contextlib.contextmanager
    def listed(self, *entries: str) -> Iterator[None]:
        """Context manager in which both processes know that these certificates are revoked."""
        self._list(entries)
        yield
        self._list(())

    def _list(self, entries: tuple[str, ...]) -> None:
        self.revoked.write_text("".join(f"{entry}\n" for entry in entries))
        for where in ("core", "front"):
            eventually(lambda where=where: self.counts(where)[0] == len(entries), WAIT_S)


@pytest.fixture(scope="module")
def region(tmp_path_factory):
    place, port = tmp_path_factory.mktemp("region"), free_port()
    papers, revoked = Papers(place / "papers"), place / "revoked"
    revoked.write_text("# certificates that are no longer valid\n")
    given, scraped = ("--revoked", str(revoked)), ("--metrics-listen", f"127.0.0.1:{port}")
    init = place / "model.safetensors"
    save_file(small_model().state_dict(), init)
    with (
        core(place / "home", "--tls", str(papers.core), *given, "--init", str(init), *scraped) as home,
        front(place / "eu", home.address, "--tls", str(papers.front), *given) as eu,
    ):
        home.security = TransportSecurity(papers.operator)
        yield Region(papers, revoked, home, eu, port)


def join(address: str, tls: Path, asked: pb.JoinRequest) -> pb.JoinReply:
    with calling(address, TransportSecurity(tls)) as stub:
        return stub.Join(asked, timeout=WAIT_S)


def test_a_fleets_certificate_is_for_its_names_only(region):
    listed = region.fleet("list.a", "list.b")
    for where in ("core", "front"):
        for name in ("list.a", "list.b"):
            assert join(region.at(where), listed, request(name)).token
        error = refused(lambda where=where: join(region.at(where), listed, request("list.c")))
        assert error.code() is DENIED
        assert error.details() == (
            'the certificate of learner "list.a list.b" is not for learner "list.c": '
            "give each learner its own certificate (atoll certs issue learner NAME)"
        )


@pytest.mark.parametrize(("where", "kind"), [("core", "fingerprint"), ("front", "serial")])
def test_a_revoked_certificate_ends_open_calls_and_starts_none(region, where, kind):
    stolen = region.fleet(f"{where}.*")
    entry = getattr(read_certificate(stolen), kind)
    own = TransportSecurity(region.papers.learner(f"{where}-honest"))
    with calling(region.at(where), TransportSecurity(stolen)) as stub, calling(region.at(where), own) as other:
        thief, honest = Hand(stub, f"{where}.thief"), Hand(other, f"{where}-honest")
        follows = [each.stub.Follow(pb.FollowRequest(session=each.session), timeout=WAIT_S) for each in (thief, honest)]
        for follow in follows:
            next(follow)
        before = region.counts(where)[1]
        with region.listed(entry):
            error = refused(lambda: list(follows[0]))
            assert error.code() is DENIED
            assert f'the certificate of learner "{where}.*" is revoked' in error.details()
            assert refused(thief.push).code() is DENIED
            assert refused(lambda: stub.Join(request(f"{where}.other"), timeout=WAIT_S)).code() is DENIED
            assert region.counts(where)[1] == before + 3
            assert follows[1].is_active()
            renewed = region.fleet(f"{where}.*")
            assert join(region.at(where), renewed, request(f"{where}.thief")).token, "a renewed certificate is another"
        assert stub.Join(request(f"{where}.thief"), timeout=WAIT_S).token, "no longer in the list"
    if where == "core":
        assert any("is revoked" in act.get("detail", "") for act in audited(region.home))


def test_the_learners_behind_a_revoked_front_wait_for_another_front(region):
    honest = region.papers.learner("b")
    with region.listed(read_certificate(region.papers.front).serial):
        assert refused(lambda: join(region.eu.address, honest, request("b"))).code() is AWAY
        assert join(region.home.address, honest, request("b")).token
        eventually(lambda: "the core refuses this front's reports" in region.eu.child.log.read_text(), WAIT_S)
    assert join(region.eu.address, honest, request("b")).token


def test_a_core_does_not_start_with_an_invalid_list(region, tmp_path):
    (tmp_path / "revoked").write_text("thief\n")
    with pytest.raises(Exception, match="line 1"), core(tmp_path, "--revoked", str(tmp_path / "revoked")):
        pass


def test_an_evicted_member_does_not_come_back_under_another_name_of_its_fleet(region):
    fleet, others = region.fleet("us.*"), region.fleet("us.honest", "us.away")
    for name in ("us.gone", "us.honest", "us.away"):
        assert join(region.home.address, fleet, request(name)).token
    with region.home.operator() as operator:
        operator.Evict(pb.EvictRequest(learner="us.gone", reason="wrong values"), timeout=WAIT_S)
    for restarted in (False, True):
        if restarted:
            region.home.stop()
            region.home.start()
        for number, where in enumerate(("core", "front")):
            new = 1000 + 10 * restarted + number  # a nonce
            with calling(region.at(where), TransportSecurity(fleet)) as stub:
                for asked in (request(f"us.{where}", fleet=""), request("us.away", nonce=new, fleet="us.honest")):
                    eventually(lambda asked=asked, stub=stub: denied(stub, asked), WAIT_S)
                    error = refused(lambda asked=asked, stub=stub: stub.Join(asked, timeout=WAIT_S))
                    assert error.code() is DENIED, error.details()
                    assert error.details() == (
                        f'the certificate "us.*" is not for new processes such as "{asked.learner}", since it is also '
                        'for the evicted learner "us.gone": issue a certificate without this name, or readmit the '
                        "learner (atoll evict us.gone --undo)"
                    )
                again = stub.Join(request("us.honest"), timeout=WAIT_S)
                assert again.state == pb.JoinReply.STATE_READY, "the fleet's other processes continue"
                assert refused(lambda stub=stub: stub.Join(request("us.gone"), timeout=WAIT_S)).code() is not DENIED
            with calling(region.at(where), TransportSecurity(others)) as stub:
                again = taken_over(stub, request("us.away", nonce=new))
                assert again.state == pb.JoinReply.STATE_READY, "the evicted learner lacks this certificate"
    own = region.papers.learner("us.core")
    assert join(region.home.address, own, request("us.core")).token, "its own certificate is not the fleet's"
    with region.home.operator() as operator:
        operator.Evict(pb.EvictRequest(learner="us.gone", reason=""), timeout=WAIT_S)
    assert join(region.eu.address, fleet, request("us.front")).token
    with calling(region.eu.address, TransportSecurity(fleet)) as stub:
        assert taken_over(stub, request("us.away", nonce=2000)).state == pb.JoinReply.STATE_READY


def test_a_dead_member_is_written_off_and_its_fleet_goes_on(region):
    """Rounds and alerts forget the dead process, and new processes of its fleet can join."""
    fleet = region.fleet("ap.*")
    assert join(region.home.address, fleet, request("ap.dead")).token
    with region.home.operator() as operator:
        end = pb.EvictRequest(learner="ap.dead", gone=True)
        error = refused(lambda: operator.Evict(end, timeout=WAIT_S))
        assert "stop its process first, or evict the learner" in error.details()
        eventually(lambda: not refuses(lambda: operator.Evict(end, timeout=WAIT_S)), WAIT_S)
        assert refuses(lambda: operator.Evict(pb.EvictRequest(learner="ap.absent", gone=True), timeout=WAIT_S))
    assert {each.learner: each.state for each in region.home.status().learners}["ap.dead"] == LearnerState.LEFT
    assert join(region.home.address, fleet, request("ap.next")).token
    assert join(region.home.address, fleet, request("ap.dead", nonce=7)).token


def test_status_names_processes_that_could_not_join(region):
    fleet = region.fleet("sa.*")
    assert join(region.home.address, fleet, request("sa.bad")).token
    with region.home.operator() as operator:
        operator.Evict(pb.EvictRequest(learner="sa.bad", reason="wrong values"), timeout=WAIT_S)
        for name in ("sa.one", "sa.two"):
            assert refuses(lambda name=name: join(region.home.address, fleet, request(name)))
        (told,) = [each for each in region.home.status().troubles if "cannot join" in each]
        assert re.match(r'"sa.two" \(and \d more\) cannot join: the certificate "sa.\*" is not for new processes', told)
        operator.Evict(pb.EvictRequest(learner="sa.bad", reason=""), timeout=WAIT_S)
    for name in ("sa.one", "sa.two"):
        assert join(region.home.address, fleet, request(name)).token
    assert not any('"sa.' in each for each in region.home.status().troubles)


def refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except grpc.RpcError:
        return True
    return False


def denied(stub: rpc.OuterStub, asked: pb.JoinRequest) -> bool:
    """Returns whether a Join is refused, and not only prevented by a process that starts."""
    try:
        stub.Join(asked, timeout=WAIT_S)
    except grpc.RpcError as error:
        return error.code() is not AWAY
    return True
