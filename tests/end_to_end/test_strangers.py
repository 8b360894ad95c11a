"""Callers with a wrong identity are refused, and the run continues.

`docs/concepts/threat-model.md` lists these cases.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from atoll_server.access import certificate_authority as certificates
from atoll_server.access.certificate_authority import init, issue
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.security.certificate import Role
from atoll_wire.security.transport import TransportSecurity, TransportSecurityError
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from tests.end_to_end.test_refusals import Hand, request
from tests.end_to_end.world import Trainee, core, eventually, front, train

HERE = ("127.0.0.1", "localhost")
DENIED, AWAY = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE


class Papers:
    """An authority and its certificates. other: an authority that no process trusts."""

    def __init__(self, place: Path) -> None:
        self.place, self.other = place, place / "other"
        init(place), init(self.other)
        self.core = issue(place, Role.CORE, "home", HERE, 1)
        self.front = issue(place, Role.FRONT, "eu", HERE, 1)
        self.operator = issue(place, Role.OPERATOR, "alice", (), 1)

    def learner(self, name: str) -> Path:
        return issue(self.place, Role.LEARNER, name, (), 100)

    def expired(self, name: str) -> Path:
        return issue(self.place, Role.LEARNER, name, (), -1)

    def future(self, name: str, monkeypatch) -> Path:
        """Returns a certificate that becomes valid tomorrow."""
        monkeypatch.setattr(certificates, "EARLIER", datetime.timedelta(days=-1))
        try:
            return issue(self.place, Role.LEARNER, name, (), 2)
        finally:
            monkeypatch.undo()

    def without_role(self) -> Path:
        """Returns a certificate without an Atoll role, as a company's own authority may issue."""
        out = self.learner("nobody")
        authority = x509.load_pem_x509_certificate((self.place / "ca.pem").read_bytes())
        signer = certificates.serialization.load_pem_private_key((self.place / "ca-key.pem").read_bytes(), None)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "nobody")])
        builder = certificates._builder(name, authority.subject, key, 1)
        (out / "cert.pem").write_bytes(certificates._pem(builder.sign(signer, hashes.SHA256())))
        (out / "key.pem").write_bytes(certificates._key_pem(key))
        return out


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    return Papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def home(tmp_path_factory, papers):
    with core(tmp_path_factory.mktemp("home"), "--tls", str(papers.core)) as it:
        it.security = TransportSecurity(papers.operator)
        train(it.address, "a", steps=40, tls=papers.learner("a"))
        yield it


@pytest.fixture(scope="module")
def eu(tmp_path_factory, papers, home):
    with front(tmp_path_factory.mktemp("eu"), home.address, "--tls", str(papers.front)) as it:
        yield it


@contextlib.contextmanager
def calling(address: str, security: TransportSecurity):
    with security.dial_and_wait(address) as channel:
        yield rpc.OuterStub(channel)


def refused(call) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def audited(home) -> list[dict]:
    path = home.directory / "audit.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_learners_with_certificates_train_through_a_front_and_at_the_core(home, eu, papers):
    trainees = [
        Trainee(address, name, lambda t: len(t.losses) >= 60, tls=papers.learner(name))
        for name, address in (("b", eu.address), ("c", home.address))
    ]
    trainees += [
        Trainee(address, name, lambda t: len(t.losses) >= 60, tls=papers.learner("fleet-*"))
        for name, address in (("fleet-1", eu.address), ("fleet-2", home.address))
    ]
    for trainee in trainees:
        trainee.start()
    for trainee in trainees:
        trainee.done()
    joined = [act for act in audited(home) if act["act"] == "joined"]
    assert {act["learner"] for act in joined} >= {"a", "b", "c", "fleet-1", "fleet-2"}
    assert any(act["learner"] == "b" and act["by"].startswith("front eu at ") for act in joined)


def test_only_a_fronts_certificate_announces_a_front(home, eu, papers):
    eventually(lambda: "eu" in {link.name for link in home.status().links if link.front})  # from its certificate
    for stranger in (papers.learner("a"), papers.operator, papers.core):
        with TransportSecurity(stranger).dial_and_wait(home.address) as channel:
            error = refused(lambda: list(rpc.FrontsStub(channel).Announce(iter([pb.FrontReport(nonce=1)]), timeout=20)))
        assert error.code() is DENIED, error.details()
    assert [link.name for link in home.status().links if link.front] == ["eu"]


HANDSHAKES = {
    "no TLS": lambda papers, _: TransportSecurity(),
    "no certificate": lambda papers, _: None,
    "another authority's": lambda papers, _: TransportSecurity(_of_another_authority(papers)),
    "expired": lambda papers, _: TransportSecurity(papers.expired("old")),
    "not valid yet": lambda papers, monkeypatch: TransportSecurity(papers.future("early", monkeypatch)),
}


def _of_another_authority(papers: Papers) -> Path:
    """Returns another authority's certificate, in a directory that trusts this core's authority."""
    out = issue(papers.other, Role.LEARNER, "a", (), 1)
    (out / "ca.pem").write_bytes((papers.place / "ca.pem").read_bytes())
    return out


@pytest.mark.parametrize("who", HANDSHAKES)
@pytest.mark.parametrize("where", ["core", "front"])
def test_a_handshake_without_a_good_certificate_fails(who, where, home, eu, papers, monkeypatch):
    address = home.address if where == "core" else eu.address
    security = HANDSHAKES[who](papers, monkeypatch)
    if security is None:
        credentials = grpc.ssl_channel_credentials((papers.place / "ca.pem").read_bytes())
        with grpc.secure_channel(address, credentials) as channel:
            error = refused(lambda: rpc.OuterStub(channel).Join(request("a"), timeout=20))
    else:
        with calling(address, security) as stub:
            error = refused(lambda: stub.Join(request("a"), timeout=20))
    assert error.code() is AWAY, error.details()


@pytest.mark.parametrize("where", ["core", "front"])
def test_a_cores_certificate_may_call_but_speaks_for_no_learner(where, home, eu, papers):
    with calling(home.address if where == "core" else eu.address, TransportSecurity(papers.core)) as stub:
        error = refused(lambda: stub.Join(request("a"), timeout=20))
    assert error.code() is DENIED


def test_a_server_with_a_wrong_identity_is_not_called(tmp_path, papers):
    """The server's certificate is for another host."""
    elsewhere = issue(papers.place, Role.CORE, "elsewhere", ["core.example"], 1)
    with (
        core(tmp_path, "--tls", str(elsewhere)) as it,
        calling(it.address, TransportSecurity(papers.learner("a"))) as stub,
    ):
        error = refused(lambda: stub.Join(request("a"), timeout=20))
    assert error.code() is AWAY


def test_a_learners_certificate_cannot_serve(papers):
    """This holds even with the right host name, because a learner's certificate is only for calling."""
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(())
    port = server.add_secure_port("127.0.0.1:0", TransportSecurity(papers.learner("thief")).serving())
    server.start()
    try:
        with calling(f"127.0.0.1:{port}", TransportSecurity(papers.learner("a"))) as stub:
            error = refused(lambda: stub.Join(request("a"), timeout=20))
    finally:
        server.stop(0)
    assert error.code() is AWAY


@pytest.mark.ci
def test_a_process_does_not_start_with_another_names_certificate(papers, tmp_path):
    for words, mine, wanted in (
        (["core", "--dir", str(tmp_path)], papers.learner("a"), "certificate of core/NAME is needed"),
        (["front", "--core", "127.0.0.1:1"], papers.core, "certificate of front/NAME is needed"),
        (["learner", "--name", "b", "--server", "127.0.0.1:1"], papers.learner("a"), "of learner/b is needed"),
        (["learner", "--name", "b", "--server", "127.0.0.1:1"], papers.core, "of learner/b is needed"),
        (["learner", "--name", "b", "--server", "core.example:1"], None, "--insecure-plaintext"),
        (["core", "--dir", str(tmp_path), "--listen", "0.0.0.0:0"], None, "--insecure-plaintext"),
        (["front", "--core", "core.example:1"], None, "--insecure-plaintext"),
        (["front", "--core", "127.0.0.1:1"], tmp_path / "nothing", "ca.pem cannot be read"),
    ):
        command = [sys.executable, "-m", "atoll.cli", *words, *(["--tls", str(mine)] if mine else [])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1, words
        [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert wanted in line, line
        assert "Traceback" not in done.stderr


WRONG_ROLES = {
    "an operator's": lambda papers: papers.operator,
    "of another name": lambda papers: papers.learner("another"),
    "of a fleet with other names": lambda papers: papers.learner("fleet-*"),
    "without a role": lambda papers: papers.without_role(),
}


@pytest.mark.parametrize("who", WRONG_ROLES)
@pytest.mark.parametrize("where", ["core", "front"])
def test_a_certificate_counts_for_its_role_and_name_only(who, where, home, eu, papers):
    address = home.address if where == "core" else eu.address
    with calling(address, TransportSecurity(WRONG_ROLES[who](papers))) as stub:
        error = refused(lambda: stub.Join(request("a"), timeout=20))
    assert error.code() is DENIED, error.details()
    assert "atoll certs issue" in error.details()


def test_a_front_does_not_serve_fronts(eu, papers):
    with calling(eu.address, TransportSecurity(papers.front)) as stub:
        assert refused(lambda: stub.Join(request("a"), timeout=20)).code() is DENIED


STOLEN = {
    "Follow": lambda stub, s: list(stub.Follow(pb.FollowRequest(session=s), timeout=20)),
    "Push": lambda stub, s: list(stub.Push(iter([pb.PushRequest(header=pb.PushHeader(session=s))]), timeout=20)),
    "Fetch": lambda stub, s: list(stub.Fetch(pb.FetchRequest(session=s, whole=True), timeout=20)),
    "Report": lambda stub, s: stub.Report(iter([pb.Progress(session=s)]), timeout=20),
    "LeaseUnits": lambda stub, s: stub.LeaseUnits(pb.LeaseUnitsRequest(session=s), timeout=20),
    "Leave": lambda stub, s: stub.Leave(pb.LeaveRequest(session=s), timeout=20),
    "Initialise": lambda stub, s: stub.Initialise(
        iter([pb.InitialiseRequest(header=pb.InitialiseHeader(session=s))]), timeout=20
    ),
}


@pytest.mark.parametrize("call", STOLEN)
@pytest.mark.parametrize("where", ["core", "front"])
def test_a_session_that_was_stolen_is_of_no_use(call, where, home, eu, papers):
    """The token is valid, but the thief's certificate has a different name."""
    with calling(home.address, TransportSecurity(papers.learner("victim"))) as stub:
        session = Hand(stub, "victim").session
    address = home.address if where == "core" else eu.address
    with calling(address, TransportSecurity(papers.learner("thief"))) as stub:
        error = refused(lambda: STOLEN[call](stub, session))
    assert error.code() is DENIED, error.details()


def operators(home, security: TransportSecurity, *metadata: tuple[str, str]):
    with security.dial_and_wait(home.address) as channel:
        return rpc.OperatorStub(channel).Status(pb.StatusRequest(), timeout=20, metadata=metadata)


def test_operators_are_told_by_their_certificate(home, papers):
    assert operators(home, TransportSecurity(papers.operator)).run
    for other in (papers.learner("a"), papers.front):
        error = refused(lambda other=other: operators(home, TransportSecurity(other)))
        assert error.code() is DENIED
        assert "give a viewer's certificate" in error.details()
    assert any(act["act"] == "operator refused" for act in audited(home))


READS = {  # the calls of operators that viewers may make
    "Status": pb.StatusRequest(),
    "ListReceipts": pb.ListReceiptsRequest(limit=1),
    "ListRounds": pb.ListRoundsRequest(last=1),
    "ListEvents": pb.ListEventsRequest(),
    "ListCheckpoints": pb.ListCheckpointsRequest(),
}
ACTIONS = {
    "TakeCheckpoint": pb.TakeCheckpointRequest(),
    "ExportCheckpoint": pb.ExportCheckpointRequest(initial=True),
    "Evict": pb.EvictRequest(learner="absent"),
    "Pause": pb.PauseRequest(),
}


@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.value)
def test_a_viewer_only_reads_and_only_an_operator_acts(home, papers, role):
    assert READS.keys() | ACTIONS.keys() == {m.name for m in pb.DESCRIPTOR.services_by_name["Operator"].methods}
    own = issue(papers.place, role, "each", HERE if role in {Role.CORE, Role.FRONT} else (), 1)
    may = READS.keys() if role is Role.VIEWER else READS.keys() | ACTIONS.keys() if role is Role.OPERATOR else set()
    with TransportSecurity(own).dial_and_wait(home.address) as channel:
        for method, asked in (READS | ACTIONS).items():
            said = _refusal(rpc.OperatorStub(channel), method, asked)
            assert (said is None) == (method in may), method
            if said is not None and role is Role.VIEWER:
                assert said == (
                    'the certificate of viewer "each" allows only calls that show the run, but this call is for '
                    "operators: give an operator's certificate (atoll certs issue operator NAME)"
                )
            elif method in READS and said is not None:
                fix = "give a viewer's certificate (atoll certs issue viewer NAME)"
                assert said == f"this call is for viewers and operators: {fix}"


def _refusal(stub: rpc.OperatorStub, method: str, asked) -> str | None:
    """Returns the reason with which a call was denied, or None if its caller may make it."""
    try:
        found = getattr(stub, method)(asked, timeout=20)
        if method == "ExportCheckpoint":
            list(found)
    except grpc.RpcError as error:
        return error.details() if error.code() is DENIED else None
    return None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("no TLS", "{0} accepts only TLS: give --tls DIR"),
        ("another authority's", r"{0} refused the TLS certificate in --tls .* \(.*\): issue it again"),
        ("expired", r"{0} refused the TLS certificate in --tls .* \(it expired on .*\): issue it again"),
        ("its own authority's", r"the TLS certificate of {0} is from another authority than ca.pem in --tls .*: use a"),
    ],
)
def test_a_tls_failure_of_a_command_names_its_fix_and_does_not_ask_for_another_core(home, papers, given, said):
    made = HANDSHAKES.get(given, lambda papers, _: TransportSecurity(issue(papers.other, Role.OPERATOR, "zoe", (), 1)))
    strange = made(papers, None).tls
    with_tls = ["--tls", str(strange)] if strange else []
    command = [sys.executable, "-m", "atoll.cli", "status", "--server", home.address, *with_tls]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.search(f"^error: {said.format(home.address)}.*\n$", done.stderr, re.MULTILINE), done.stderr


def test_a_command_with_tls_names_a_core_without_it(tmp_path, papers):
    with core(tmp_path) as plain:
        command = [
            sys.executable,
            "-m",
            "atoll.cli",
            "status",
            "--server",
            plain.address,
            "--tls",
            str(papers.operator),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"error: {plain.address} does not answer with TLS (" in done.stderr


def test_operator_actions_are_recorded(home, papers):
    command = [sys.executable, "-m", "atoll.cli", "evict", "nobody-yet", "--yes", "--server", home.address]
    done = subprocess.run([*command, "--tls", str(papers.operator)], capture_output=True, text=True, timeout=60)
    assert "no learner" in done.stderr
    eventually(lambda: any(act["act"] == "evict" and act["operator"] == "alice" for act in audited(home)))


def test_tokens(tmp_path):
    tokens = tmp_path / "tokens"
    make = [sys.executable, "-m", "atoll.cli", "token", "--file", str(tokens)]
    alice, bob = (subprocess.run([*make, n], capture_output=True, text=True, check=True).stdout.strip() for n in "ab")
    with core(tmp_path, "--operator-tokens", str(tokens)) as it:
        with_token = lambda token: operators(it, TransportSecurity(), ("authorization", f"Bearer {token}"))  # noqa: E731
        assert with_token(alice).run
        assert refused(lambda: operators(it, TransportSecurity())).code() is DENIED
        assert refused(lambda: with_token("guessed")).code() is grpc.StatusCode.UNAUTHENTICATED
        tokens.write_text("".join(line + "\n" for line in tokens.read_text().splitlines() if line.startswith("b ")))
        assert refused(lambda: with_token(alice)).code() is grpc.StatusCode.UNAUTHENTICATED, "removed at run time"
        assert with_token(bob).run
        (tmp_path / "bob").write_text(bob + "\n")
        for given, code in ((["--token", bob], 0), (["--token-file", str(tmp_path / "bob")], 0), ([], 4)):
            shown = subprocess.run(
                [sys.executable, "-m", "atoll.cli", "status", "--server", it.address, *given],
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert shown.returncode == code, shown.stderr
    assert alice not in tokens.read_text()


def test_an_open_core_is_not_open_to_a_fronts_network(tmp_path):
    """A core on loopback allows all actions to all callers. This must not extend to a front's network."""
    with (
        core(tmp_path / "home") as it,
        front(tmp_path / "eu", it.address, "--listen", "0.0.0.0:0", "--insecure-plaintext") as eu,
    ):
        assert operators(it, TransportSecurity()).run == it.status().run
        for metadata in ((), (("authorization", "Bearer guessed"),)):
            error = refused(lambda metadata=metadata: operators(eu, TransportSecurity(), *metadata))
            assert error.code() in {DENIED, grpc.StatusCode.UNAUTHENTICATED}
    with core(tmp_path / "near") as it, front(tmp_path / "us", it.address) as us:
        assert operators(us, TransportSecurity()).run == it.status().run


def test_certificates_are_replaced_without_a_restart(tmp_path, papers):
    """Core, front and learner continue with new certificates from another authority, without a restart."""
    place = tmp_path / "own"
    own = Papers(place)
    mine = own.learner("a")
    with (
        core(tmp_path / "home", "--tls", str(own.core)) as it,
        front(tmp_path / "eu", it.address, "--tls", str(own.front)) as eu,
    ):
        it.security = TransportSecurity(own.operator)
        trainee = Trainee(eu.address, "a", lambda t: t.learner.stats().merged > 40, tls=mine)
        trainee.start()
        eventually(lambda: it.status().contributions.merged > 2)
        init(place / "next")
        both = (place / "ca.pem").read_bytes() + (place / "next" / "ca.pem").read_bytes()
        (own.front / "key.pem").write_bytes(b"half of a k")  # as if the file were being replaced
        eventually(lambda: "new certificates cannot be used" in eu.child.log.read_text())
        for directory in (own.core, own.front, mine, own.operator):  # first, every process trusts both authorities
            (directory / "ca.pem").write_bytes(both)
        for directory, role, name, hosts in (
            (own.core, Role.CORE, "home", HERE), (own.front, Role.FRONT, "eu", HERE), (mine, Role.LEARNER, "a", ()),
        ):  # fmt: skip
            new = issue(place / "next", role, name, hosts, 1)
            for file in ("key.pem", "cert.pem"):
                (directory / file).write_bytes((new / file).read_bytes())
        for process in (eu, it):
            eventually(lambda process=process: "using new certificates" in process.child.log.read_text())
        eventually(lambda: "the certificates have changed: reconnecting" in eu.child.log.read_text())
        merged = it.status().contributions.merged
        eventually(lambda: it.status().contributions.merged > merged + 2, timeout_s=60)
        eventually(lambda: trainee.learner.stats().connected)
        trainee.done(120)


def test_files_and_addresses_that_cannot_be_used(tmp_path, papers):
    with pytest.raises(TransportSecurityError, match=r"ca.pem cannot be read"):
        TransportSecurity(tmp_path).check([])
    mixed = papers.learner("mixed")
    (mixed / "key.pem").write_bytes((papers.learner("other") / "key.pem").read_bytes())
    with pytest.raises(TransportSecurityError, match="issue them again"):
        TransportSecurity(mixed).check([])
    for address in ("10.0.0.1:7070", "core.example:7070"):
        with pytest.raises(TransportSecurityError, match="--insecure-plaintext"):
            TransportSecurity().check([address])
    TransportSecurity(plaintext=True).check(["10.0.0.1:7070"])
    TransportSecurity().check(["127.0.0.1:1", "localhost:1", "unix:/tmp/x"])
