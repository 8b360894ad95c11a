"""The metric of when certificates expire."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
from atoll_server.access import certificate_authority
from atoll_wire.process.certificate_expiry import CertificateExpiry, expiry_times
from atoll_wire.security.certificate import Role, read_certificate
from atoll_wire.security.transport import LOCAL, TransportSecurity
from prometheus_client import CollectorRegistry

NAME = "atoll_certificate_expiry_timestamp_seconds"


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    certificate_authority.init(tmp_path / "certs")
    return tmp_path / "certs"


def exported(directory: Path) -> tuple[CollectorRegistry, TransportSecurity]:
    registry, security = CollectorRegistry(), TransportSecurity(directory)
    registry.register(CertificateExpiry(partial(expiry_times, security)))
    return registry, security


def test_a_renewed_certificate_counts_without_a_restart(authority):
    directory = certificate_authority.issue(authority, Role.LEARNER, "eu-west", (), days=5)
    registry, _ = exported(directory)
    before = read_certificate(directory).ends.timestamp()
    assert registry.get_sample_value(NAME, {"file": "cert.pem"}) == before
    ends = read_certificate(authority / "ca.pem").ends.timestamp()
    assert registry.get_sample_value(NAME, {"file": "ca.pem"}) == ends
    certificate_authority.issue(authority, Role.LEARNER, "eu-west", (), days=90)
    after = read_certificate(directory).ends.timestamp()
    assert after > before + 80 * 86_400
    assert registry.get_sample_value(NAME, {"file": "cert.pem"}) == after


def test_a_file_that_cannot_be_used_does_not_count(authority):
    """The process keeps the old certificate, which still expires."""
    directory = certificate_authority.issue(authority, Role.LEARNER, "eu-west", (), days=5)
    registry, _ = exported(directory)
    before = registry.get_sample_value(NAME, {"file": "cert.pem"})
    other = certificate_authority.issue(authority, Role.LEARNER, "another", (), days=90)
    shutil.copy(other / "cert.pem", directory / "cert.pem")
    assert registry.get_sample_value(NAME, {"file": "cert.pem"}) == before


def test_without_tls_or_files_there_is_no_series_and_the_scrape_succeeds(tmp_path):
    assert expiry_times(LOCAL) == {}
    registry, _ = exported(tmp_path / "missing")
    assert registry.get_sample_value(NAME, {"file": "cert.pem"}) is None
