"""If TLS prevents a connection, every caller says so and names the fix, and does not ask for another core."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import atoll
import grpc
import pytest
from atoll.doctor import LearnerToCheck, Severity, check_connection
from atoll.errors import LearnerError
from atoll.follower.follow_session import Source
from atoll.follower.pull import pull
from atoll_dashboard.feed.core_client import CoreClient
from atoll_dashboard.feed.run_feed import RunFeed
from atoll_server.access.certificate_authority import init, issue
from atoll_server.cli.operator_client import OperatorError, OperatorTarget, operator
from atoll_wire import outer_pb2 as pb
from atoll_wire.errors import ExitStatus, UserError
from atoll_wire.process.clock import SYSTEM
from atoll_wire.security.certificate import Role
from atoll_wire.security.handshake import tls_fault
from atoll_wire.security.transport import TransportSecurity
from torch.optim import SGD

from tests.end_to_end.world import eventually, front, small_model

HERE = ("127.0.0.1", "localhost")
START = re.compile(r"start (a|the|one|your) ?(core)?")


@dataclass(frozen=True, slots=True)
class Fault:
    """A way in which TLS can fail. server: which server is called. client: the client's kind of directory."""

    server: str
    client: str
    said: str


FAULTS = {
    "another authority": Fault(
        "good",
        "of another authority",
        r"the TLS certificate of {0} is from another authority than ca.pem in --tls .*: use",
    ),
    "certificate of another authority": Fault(
        "good",
        "mixed",
        r"{0} refused the TLS certificate in --tls .* \(.*\): issue it again .* \(atoll certs issue {1} me",
    ),
    "expired certificate": Fault(
        "good", "expired", r"{0} refused the TLS certificate in --tls .* \(it expired on 20.*\): issue it again"
    ),
    "expired server": Fault("expired", "good", r"the TLS certificate of {0} has expired: issue the server's .* clocks"),
    "wrong host name": Fault(
        "elsewhere",
        "good",
        r"the TLS certificate of {0} does not name the host 127.0.0.1: use a host .* --host 127.0.0.1",
    ),
    "no TLS": Fault("good", "none", r"{0} accepts only TLS: give --tls DIR"),
    "no TLS at the server": Fault(
        "plain", "good", r"{0} does not answer with TLS \(.*\): correct the address, or omit"
    ),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Servers that answer no call, by kind, and two authorities."""

    directory: Path
    addresses: dict[str, str]

    def certificate(self, kind: str, role: Role) -> Path | None:
        """Returns the directory of a client's certificate."""
        own, other = self.directory, self.directory / "other"
        hosts = HERE if role is Role.FRONT else ()
        match kind:
            case "none":
                return None
            case "of another authority":
                return issue(other, role, "me", hosts, 1)
            case "mixed":
                out = issue(other, role, "me-mixed", hosts, 1)
                (out / "ca.pem").write_bytes((own / "ca.pem").read_bytes())
                return out
            case "expired":
                return issue(own, role, "me-expired", hosts, -1)
            case _:
                return issue(own, role, "me", hosts, 1)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("papers")
    init(directory), init(directory / "other")
    kinds = {
        "good": issue(directory, Role.CORE, "home", HERE, 1),
        "expired": issue(directory, Role.CORE, "old", HERE, -1),
        "elsewhere": issue(directory, Role.CORE, "elsewhere", ("core.example.com",), 1),
        "plain": None,
    }
    servers, addresses = [], {}
    for kind, tls in kinds.items():
        servers.append(server := grpc.server(ThreadPoolExecutor(1)))
        credentials = TransportSecurity(tls).serving()
        at = "127.0.0.1:0"
        port = server.add_secure_port(at, credentials) if credentials else server.add_insecure_port(at)
        server.start()
        addresses[kind] = f"127.0.0.1:{port}"
    yield Place(directory, addresses)
    for server in servers:
        server.stop(None)


def status(address: str, security: TransportSecurity, _: Path) -> str:
    with pytest.raises(OperatorError) as caught, operator(OperatorTarget(address, security)) as stub:
        stub.Status(pb.StatusRequest(), timeout=10)
    assert caught.value.exit_status == 1
    return str(caught.value)


def doctor(address: str, security: TransportSecurity, _: Path) -> str:
    last = list(check_connection(LearnerToCheck(address, security)))[-1]
    assert last.verdict is Severity.BAD
    return f"{last.what}: {last.remedy}"


def learner(address: str, security: TransportSecurity, _: Path) -> str:
    name, model = "me" if security.tls is None else security.tls.name.removeprefix("learner-"), small_model()
    optimizer = SGD(model.parameters(), 0.1)
    with (
        pytest.raises(LearnerError) as caught,
        atoll.Learner(model, optimizer, address, name, tls=security.tls, connect_timeout_s=0.0),
    ):
        raise AssertionError("the learner joined")
    return str(caught.value)


def follower(address: str, security: TransportSecurity, directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        pull(directory / "model.safetensors", Source([address], 2.0, security), SYSTEM, None, print)
    return str(caught.value)


def dashboard(address: str, security: TransportSecurity, _: Path) -> str:
    async def problem() -> str:
        feed = RunFeed(CoreClient(address, security, ""), 0.0)
        await feed._look()
        await feed.core.close()
        return feed.problem

    return asyncio.run(problem())


CALLERS: dict[str, tuple[Role, Callable[[str, TransportSecurity, Path], str]]] = {
    "atoll status": (Role.OPERATOR, status),
    "atoll doctor": (Role.LEARNER, doctor),
    "a learner": (Role.LEARNER, learner),
    "atoll pull": (Role.READER, follower),
    "the dashboard": (Role.OPERATOR, dashboard),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("caller", CALLERS)
def test_a_caller_names_the_fault_and_its_fix(caller, fault, place, tmp_path):
    role, call = CALLERS[caller]
    wanted = FAULTS[fault]
    address = place.addresses[wanted.server]
    said = call(address, TransportSecurity(place.certificate(wanted.client, role)), tmp_path)
    assert re.search(wanted.said.format(re.escape(address), role.value), said), said
    assert not START.search(said), said


@pytest.mark.ci
@pytest.mark.parametrize("fault", ["expired server", "wrong host name", "no TLS at the server"])
def test_a_front_logs_the_fault_and_tells_its_callers(fault, place, tmp_path):
    wanted = FAULTS[fault]
    address = place.addresses[wanted.server]
    papers = place.certificate(wanted.client, Role.FRONT)
    pattern = re.compile(wanted.said.format(re.escape(address), "front"))
    with front(tmp_path, address, "--tls", str(papers), "--log-json") as here:
        eventually(lambda: pattern.search(here.child.log.read_text().replace("\\", "")))
        for call, role in ((status, Role.OPERATOR), (doctor, Role.LEARNER), (follower, Role.READER)):
            said = _behind(call, here.address, TransportSecurity(place.certificate("good", role)), tmp_path)
            assert pattern.search(said), said
            assert not START.search(said), said
        here.stop()
        log = here.child.log.read_text()
    assert "Traceback" not in log
    assert "never retrieved" not in log
    assert log.count("TLS prevents connections to the core") == 1


def test_a_process_with_an_expired_certificate_warns_at_its_start(place, tmp_path):
    papers = place.certificate("expired", Role.FRONT)
    with front(tmp_path, place.addresses["good"], "--tls", str(papers)) as here:
        assert "peers refuse this process, because a certificate has expired" in here.child.log.read_text()


def _behind(call: Callable[[str, TransportSecurity, Path], str], address: str, security: TransportSecurity,
            directory: Path) -> str:  # fmt: skip
    if call is not status:
        return call(address, security, directory)
    with pytest.raises(OperatorError) as caught, operator(OperatorTarget(address, security)) as stub:
        stub.Status(pb.StatusRequest(), timeout=10)
    return str(caught.value)


def test_a_forwarder_without_its_target_is_no_fault_of_tls(place):
    def hang_up(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with listening.accept()[0] as peer:
                    peer.recv(1)  # the beginning of the client's first message, as a forwarder does
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(4096):
                        pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=hang_up, args=(listening,), daemon=True).start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        security = TransportSecurity(place.certificate("good", Role.OPERATOR))
        assert not tls_fault(address, security)
        assert f"no core or front answers at {address}" in doctor(address, security, place.directory)
        with pytest.raises(OperatorError) as caught, operator(OperatorTarget(address, security)) as stub:
            stub.Status(pb.StatusRequest(), timeout=10)
        assert caught.value.exit_status == ExitStatus.UNREACHABLE, "a watch must go on"
        listening.shutdown(socket.SHUT_RDWR)
