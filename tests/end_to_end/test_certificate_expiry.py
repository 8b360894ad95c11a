"""Core, front and learner export when their certificates expire."""

from __future__ import annotations

from pathlib import Path

from atoll.demo.processes import free_port
from atoll_wire.security.certificate import read_certificate

from benchmarks.process_state import Metrics, metrics
from tests.end_to_end.test_strangers import Papers
from tests.end_to_end.world import Trainee, core, front

NAME = "atoll_certificate_expiry_timestamp_seconds"


def test_each_process_exports_the_ends_of_the_certificates_that_it_uses(tmp_path):
    papers, core_port, learner_port = Papers(tmp_path / "papers"), free_port(), free_port()
    learner, found = papers.learner("a"), list[Metrics]()

    def told(_: Trainee) -> bool:
        found.append(metrics(learner_port))
        return True

    (tmp_path / "eu").mkdir()
    with (
        core(tmp_path, "--tls", str(papers.core), "--metrics-listen", f"127.0.0.1:{core_port}") as home,
        front(tmp_path / "eu", home.address, "--tls", str(papers.front), "--region", "eu") as eu,
    ):
        place = f"127.0.0.1:{learner_port}"
        trainee = Trainee(eu.address, "a", told, tls=learner, metrics_listen=place, region="eu")
        trainee.start()
        trainee.done()
        found += [metrics(core_port), eu.metrics()]
    for directory, read in zip((learner, papers.core, papers.front), found, strict=True):
        assert read.total(NAME, file="cert.pem") == _ends(directory / "cert.pem")
        assert read.total(NAME, file="ca.pem") == _ends(directory / "ca.pem")
    assert found[0].total("atoll_local_connected", learner="a", region="eu") == 1
    assert found[2].total("atoll_front_core_up", region="eu") == 1


def _ends(path: Path) -> float:
    return read_certificate(path).ends.timestamp()
