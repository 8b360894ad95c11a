"""The names in certificates: of one learner, of a prefix, and of a list of learners."""

from __future__ import annotations

import json

import pytest
from atoll_server.access.certificate_authority import init, issue, issued
from atoll_server.access.identity import Caller, caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.learner_registry import LearnerRegistry
from atoll_server.run.joining import check_fleet
from atoll_wire.security.certificate import (
    MOST_NAMES,
    CertificateError,
    Role,
    allows_name,
    brief,
    check_role,
    owner_of,
    read_certificate,
)

FLEET = ("us.a", "us.b", "us.c", "us.d")


@pytest.fixture
def place(tmp_path):
    init(tmp_path)
    return tmp_path


class Shown:
    """gRPC's context of a call with a certificate."""

    def __init__(self, pem: bytes, *uris: str) -> None:
        self._said = {
            "transport_security_type": [b"ssl"],
            "x509_pem_cert": [pem],
            "x509_subject_alternative_name": [uri.encode() for uri in uris],
        }

    def auth_context(self):
        return self._said

    def peer(self):
        return "ipv4:192.0.2.1:5"


def test_a_fleets_certificate_is_for_the_listed_names(place):
    made = issue(place, Role.LEARNER, "us.a", (), 1, FLEET[1:])
    info, pem = read_certificate(made), (made / "cert.pem").read_bytes()
    assert made.name == "learner-us.a+3"
    assert info.identity == "learner/us.a learner/us.b learner/us.c learner/us.d"
    who = caller(Shown(pem, "dns.example", *(f"atoll://learner/{name}" for name in FLEET)))
    assert (who.role, who.name, who.fleet) == (Role.LEARNER, " ".join(FLEET), " ".join(FLEET))
    assert f"{who.serial:X}" == info.serial.lstrip("0")
    assert who.fingerprint == info.fingerprint.replace(":", "")
    assert str(who) == "learner us.a us.b us.c and 1 more at ipv4:192.0.2.1:5"
    for name in FLEET:
        who.speaks_for(name)
        check_role(made, Role.LEARNER, name)
    for name in ("us.", "us.e", "us.a us.b", "us.ab", "*"):
        with pytest.raises(Refused) as caught:
            who.speaks_for(name)
        assert "\n" not in caught.value.detail
        with pytest.raises(CertificateError):
            check_role(made, Role.LEARNER, name)


def test_the_record_lists_each_certificate_even_after_its_renewal(place):
    first = read_certificate(issue(place, Role.LEARNER, "us.*", (), 1))
    again = read_certificate(issue(place, Role.LEARNER, "us.*", (), 2))
    found = issued(place)
    assert [each["serial"] for each in found] == [first.serial, again.serial]
    assert [each["fingerprint"] for each in found] == [first.fingerprint, again.fingerprint]
    assert {each["identity"] for each in found} == {"learner/us.*"}
    (place / "issued.jsonl").write_text("{")
    with pytest.raises(CertificateError, match="repair the file"):
        issued(place)


def test_a_list_renews_its_own_certificate_only(place):
    issue(place, Role.LEARNER, "us.a", (), 1, ["us.b"])
    issue(place, Role.LEARNER, "us.a", (), 1, ["us.b"])
    with pytest.raises(CertificateError, match="has the certificate of other learners"):
        issue(place, Role.LEARNER, "us.a", (), 1, ["us.c"])
    assert len(issued(place)) == 2


@pytest.mark.parametrize(
    ("role", "name", "others", "said"),
    [
        (Role.LEARNER, "us.*", ["us.b"], r'name "us\.\*" is not allowed'),
        (Role.LEARNER, "us.a", ["us.*"], r'name "us\.\*" is not allowed'),
        (Role.LEARNER, "us.a", ["us b"], 'name "us b" is not allowed'),
        (Role.LEARNER, "us.a", ["x" * 65], "is not allowed"),
        (Role.LEARNER, "*", [], r'name "\*" is not allowed'),
        (Role.LEARNER, "u*s", [], "is not allowed"),
        (Role.READER, "us.*", [], "is not allowed"),
        (Role.READER, "a", ["b"], "a reader has one name, but 2 are given"),
        (Role.LEARNER, "us.0", [f"us.{n}" for n in range(1, MOST_NAMES + 1)], "at most 100 names, but 101 are given"),
    ],
)
def test_names_that_are_not_allowed(place, role, name, others, said):
    with pytest.raises(CertificateError, match=said) as caught:
        issue(place, role, name, (), 1, others)
    assert "\n" not in str(caught.value)
    assert issued(place) == []


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["https://learner/a"],
        ["atoll://thief/a"],
        ["atoll://learner/"],
        ["atoll://learner/*"],
        ["atoll://learner/a b"],
        ["atoll://learner/a", "atoll://learner/b*"],
        ["atoll://learner/a", "atoll://front/b"],
        ["atoll://front/a", "atoll://front/b"],
        [f"atoll://learner/{number}" for number in range(MOST_NAMES + 1)],
    ],
)
def test_certificates_whose_role_or_names_are_invalid(uris):
    assert owner_of(uris) is None
    with pytest.raises(Refused):
        caller(Shown(b"", *uris))


def test_only_learners_certificates_are_for_fleets():
    assert Caller(Role.LEARNER, "a", "").fleet == Caller(Role.FRONT, "eu", "").fleet == Caller(None, "", "").fleet == ""
    assert Caller(Role.LEARNER, "a*", "").fleet == "a*"
    assert not allows_name("", "a")
    assert brief("a b c") == "a b c"
    assert json.dumps(brief("a b c d e")) == '"a b c and 2 more"'


def test_a_fleets_certificate_is_not_for_new_processes_while_one_of_its_learners_is_evicted():
    registry = LearnerRegistry(100)
    for number, name in enumerate(("us.a", "us.b", "eu.a"), 1):
        registry.join(name, "", number, 0, 0.0, b"", b"", 0.0, 0.0)
    check_fleet(registry, "us.new", "us.*", 9)
    registry.evict(registry.entries["us.a"], "wrong values", 1.0)
    for name, fleet in (("us.new", "us.*"), ("us.new", "us.new us.a"), ("us.b", "us.*"), ("us.b", "us.a us.b")):
        with pytest.raises(Refused, match=r"atoll evict us\.a --undo") as caught:
            check_fleet(registry, name, fleet, 9)
        assert caught.value.status is Status.PERMISSION_DENIED
    check_fleet(registry, "us.b", "us.*", 2)  # the fleet's other processes continue
    check_fleet(registry, "us.b", "us.b us.c", 9)  # a certificate that the evicted learner lacks
    check_fleet(registry, "us.a", "us.*", 9)  # the registry refuses it with its own reason
    check_fleet(registry, "eu.new", "eu.*", 9)
    check_fleet(registry, "us.new", "", 9)
    registry.evict(registry.entries["us.a"], "", 2.0)
    for name in ("us.new", "us.b"):
        check_fleet(registry, name, "us.*", 9)
