"""docker/certs.py issues the demo's certificates, and keeps those that are still good."""

from __future__ import annotations

import importlib.util
import stat
from pathlib import Path

import pytest
import yaml
from atoll_server.access.certificate_authority import issue
from atoll_wire.security.certificate import Role, read_certificate

from tests.compose.stack import ROOT

SPEC = importlib.util.spec_from_file_location("demo_certificates", ROOT / "docker/certs.py")
assert SPEC is not None
assert SPEC.loader is not None
certs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(certs)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("authority", "home", "operator", "viewer", "dashboard", *certs.REGIONS):  # the volumes
        (tmp_path / name).mkdir(mode=0o750)
    certs.make(tmp_path)
    return tmp_path


def _serials(root: Path) -> dict[str, str]:
    return {folder: read_certificate(root / folder).serial for folder, *_ in certs.WANTED}


def test_a_second_start_changes_no_file(root):
    """`docker compose up core` also runs this script, while other processes use their certificates."""
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()}
    certs.make(root)
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("fault", ["missing", "near its end", "other hosts", "another authority"])
def test_only_a_certificate_with_a_fault_is_issued_again(root, fault):
    before = _serials(root)
    folder = root / "home"
    if fault == "missing":
        (folder / "key.pem").unlink()
    elif fault == "another authority":
        (folder / "ca.pem").write_bytes((folder / "cert.pem").read_bytes())
    else:
        hosts, days = (certs.CORE, 29.0) if fault == "near its end" else (["core"], 365.0)
        made = issue(root / "authority", Role.CORE, "home", hosts, days)
        for file in ("cert.pem", "key.pem"):
            (folder / file).write_bytes((made / file).read_bytes())
    certs.make(root)
    after = _serials(root)
    assert {name for name in before if before[name] != after[name]} == {"home"}
    found = read_certificate(folder)
    assert found.days_left > 360
    assert set(found.hosts) == set(certs.CORE)


def test_renew_issues_all_certificates_again_and_keeps_the_token(root):
    before, token = _serials(root), (root / "operator/token").read_text()
    certs.make(root, renew=True)
    assert not set(before.values()) & set(_serials(root).values())
    assert (root / "operator/token").read_text() == token


def test_the_cores_containers_can_only_show_the_run(root):
    """They mount `viewer`, which has no certificate or token with which a command changes the run."""
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    mounting = {name for name, each in services.items() for volume in each.get("volumes", ()) if "operator:" in volume}
    assert mounting == {"certs", "operator", "operator-token"}
    for folder in ("viewer", "dashboard"):
        assert read_certificate(root / folder).identity.startswith("viewer/")
    token = (root / "operator/token").read_text().strip()
    assert not any(token in path.read_text() for path in (root / "viewer").iterdir())
    assert services["core"]["environment"]["ATOLL_TLS"] == "/etc/atoll/viewer"


def test_a_changed_list_of_revoked_certificates_reaches_cores_and_fronts(root):
    (root / "authority/revoked").write_text("ab12\n")
    certs.make(root)
    assert {(root / folder / "revoked").read_text() for folder in certs.WITH_REVOKED} == {"ab12\n"}


def test_a_revoked_certificate_is_added_to_the_list(root):
    (root / "authority/revoked").write_text("ab12\n")
    certs.make(root, revoke="7F:03")
    certs.make(root)
    assert {(root / folder / "revoked").read_text() for folder in certs.WITH_REVOKED} == {"ab12\n7F:03\n"}


def test_services_can_read_their_files_but_not_the_authoritys_key(root):
    """In the image, the script has a user of its own, and the services' group. A service has no volume with the key."""
    assert stat.S_IMODE((root / "authority/ca-key.pem").stat().st_mode) == 0o600
    for folder, *_ in certs.WANTED:
        for file in ("ca.pem", "cert.pem", "key.pem"):
            assert stat.S_IMODE((root / folder / file).stat().st_mode) == 0o640
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    with_key = [name for name, each in services.items() if any("authority:" in one for one in each.get("volumes", ()))]
    assert with_key == ["certs"]
    image = (ROOT / "docker/Dockerfile").read_text().partition(" AS certs\n")[2]
    assert "USER 10002:10001" in image
    assert "-m 700 /certs/authority" in image
