"""`atoll doctor` reports successful checks, gives a fix for each problem, and changes nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from atoll.demo.processes import free_port
from atoll.doctor import LearnerToCheck, Severity, check_connection, check_disk, of_model
from atoll_wire import doctor
from atoll_wire.process.clock import SystemClock
from atoll_wire.security.transport import TransportSecurity
from torch import nn
from torch.optim import SGD

from tests.end_to_end.test_strangers import Papers
from tests.end_to_end.world import core, front, small_model, train


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    return Papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def home(tmp_path_factory, papers):
    with core(tmp_path_factory.mktemp("home"), "--tls", str(papers.core)) as it:
        it.security = TransportSecurity(papers.operator)
        train(it.address, "a", steps=20, tls=papers.learner("a"))
        yield it


@pytest.fixture(scope="module")
def eu(tmp_path_factory, papers, home):
    with front(tmp_path_factory.mktemp("eu"), home.address, "--tls", str(papers.front), "--region", "eu") as it:
        yield it


def bad(patient: LearnerToCheck) -> list[tuple[str, str]]:
    """Returns each problem and its remedy, but no slow links."""
    return [
        (f.what, f.remedy)
        for f in check_connection(patient)
        if f.verdict is not Severity.GOOD and "Mbit/s" not in f.what
    ]


def test_doctor_finds_no_problem_through_a_front(eu, papers, home):
    before = home.status()
    command = [sys.executable, "-m", "atoll.cli", "doctor", "--server", eu.address, "--name", "a"]
    done = subprocess.run(
        [*command, "--tls", str(papers.place / "learner-a")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("the core answers via eu", "port", "the certificate of learner/a is valid for", "clocks", "Mbit/s up",
                 "Mbit/s down", "messages of 528 KiB arrive", home.status().run):  # fmt: skip
        assert said in done.stdout, done.stdout
    assert home.status().contributions == before.contributions


def test_connection_problems_are_named_with_their_remedy(eu, papers):
    [(what, cure)] = bad(LearnerToCheck(f"127.0.0.1:{free_port()}", TransportSecurity()))
    assert "cannot be reached" in what
    assert "firewalls" in cure
    [(what, cure)] = bad(LearnerToCheck("no-such-host.invalid:7070", TransportSecurity(plaintext=True)))
    assert "cannot be resolved" in what
    assert cure == "correct the name, fix DNS on this machine, or start the front"  # Docker removes a dead front's name
    [(what, cure)] = bad(LearnerToCheck("core.example.com", TransportSecurity()))
    assert (what, cure) == ('"core.example.com" has no port', "give HOST:PORT, such as core.example.com:7070")
    [(what, _)] = bad(LearnerToCheck("core.example.com:0", TransportSecurity(plaintext=True)))
    assert "is not HOST:PORT" in what
    found = bad(LearnerToCheck(eu.address, TransportSecurity(papers.learner("a")), "b"))
    assert any(
        "the learner's name is b" in what and cure.endswith("atoll certs issue learner b") for what, cure in found
    )
    assert not bad(LearnerToCheck(eu.address, TransportSecurity(papers.learner("fleet.*")), "fleet.1"))
    found = bad(LearnerToCheck(eu.address, TransportSecurity(papers.expired("old"))))
    assert any("has expired" in what for what, _ in found)
    assert any("refused the TLS certificate" in what for what, _ in found)
    [(what, cure)] = bad(LearnerToCheck(eu.address, TransportSecurity()))
    assert what.endswith("accepts only TLS")
    assert "--tls" in cure
    (papers.learner("torn") / "cert.pem").unlink()
    [(what, _), *_] = bad(LearnerToCheck(eu.address, TransportSecurity(papers.place / "learner-torn")))
    assert "cert.pem cannot be read" in what


def test_doctor_distinguishes_a_front_without_its_core_from_another_server(tmp_path, papers):
    address = f"127.0.0.1:{free_port()}"
    with front(tmp_path, address, "--tls", str(papers.front)) as alone:
        [(what, cure)] = bad(LearnerToCheck(alone.address, TransportSecurity(papers.learner("a"))))
    assert what.startswith(
        f"the front at {alone.address} answers, but the core at {address} does not answer the front ("
    )
    assert cure == f"check the link between the front and {address}, and that the core runs there"


def test_doctor_compares_a_model_with_the_run(home, papers):
    security = TransportSecurity(papers.learner("a"))

    def found(model: nn.Module) -> list[str]:
        patient = LearnerToCheck(home.address, security, **of_model(model, SGD(model.parameters(), 0.1)))
        return [what for what, _ in bad(patient)]

    assert found(small_model()) == []
    assert found(nn.Linear(3, 3)) == ["the model's layout differs from the run's"]
    more = small_model()
    more[1].register_parameter("frozen", nn.Parameter(torch.ones(3), requires_grad=False))
    assert found(more) == ["the frozen parameters differ from the run's"]


class Ahead(SystemClock):
    """A clock whose time of day is 100 s ahead."""

    def wall(self) -> float:
        return super().wall() + 100.0


def test_doctor_finds_clocks_that_differ(home, papers, monkeypatch):
    monkeypatch.setattr(doctor, "SYSTEM", Ahead())
    found = bad(LearnerToCheck(home.address, TransportSecurity(papers.learner("a"))))
    assert any("clocks are 100" in what and "NTP" in cure for what, cure in found)


def test_doctor_checks_the_disk(tmp_path):
    assert Severity.BAD not in [finding.verdict for finding in check_disk(tmp_path / "new")]
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "file").touch()
    [finding] = check_disk(tmp_path / "file")
    assert finding.verdict is Severity.BAD
