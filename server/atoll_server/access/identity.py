"""PURE: reads a caller's identity from its certificate and checks which learners the caller may act for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from atoll_wire.security.certificate import Role, allows_name, brief, is_fleet, owner_of
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from atoll_server.access.refusals import Refused, Status


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a call.

    role: the certificate's role; None without TLS, since callers then have no certificates. name: as in `owner_of`.
    peer: the sender's address. serial, fingerprint: the certificate's serial number and its SHA-256 sum in hex.
    """

    role: Role | None
    name: str
    peer: str
    serial: int = 0
    fingerprint: str = ""

    def __str__(self) -> str:
        return f"{self.role.value} {brief(self.name)} at {self.peer}" if self.role is not None else self.peer

    @property
    def fleet(self) -> str:
        """The name in a fleet certificate of learners; empty for any other caller."""
        return self.name if self.role is Role.LEARNER and is_fleet(self.name) else ""

    def speaks_for(self, learner: str) -> None:
        """Raises Refused unless the caller may use this learner's name.

        A front may use any learner's name. Without TLS, every caller may.
        """
        if self.role in {None, Role.FRONT} or (self.role is Role.LEARNER and allows_name(self.name, learner)):
            return
        assert self.role is not None
        mine = f'{self.role.value} "{brief(self.name)}"'
        fix = "give each learner its own certificate (atoll certs issue learner NAME)"
        raise Refused(Status.PERMISSION_DENIED, f'the certificate of {mine} is not for learner "{learner[:80]}": {fix}')


def caller(context: Any) -> Caller:  # noqa: ANN401 - gRPC's context
    """Returns the identity of a call's sender. Raises Refused if the certificate names no role."""
    said = context.auth_context()
    if b"ssl" not in said.get("transport_security_type", ()):
        return Caller(None, "", context.peer())
    uris = (uri.decode(errors="replace") for uri in said.get("x509_subject_alternative_name", ()))
    if (owner := owner_of(uris)) is None:
        text = "the certificate has no role, or invalid names: issue one with `atoll certs issue ROLE NAME`"
        raise Refused(Status.PERMISSION_DENIED, text)
    return Caller(*owner, context.peer(), *_fingerprints(said["x509_pem_cert"][0]))


def caller_or_peer(context: Any) -> Caller:  # noqa: ANN401 - gRPC's context
    """Returns the identity of a call's sender.

    A sender whose certificate names no role gets none; the service refuses it.
    """
    try:
        return caller(context)
    except Refused:
        return Caller(None, "", context.peer())


@lru_cache(maxsize=4096)
def _fingerprints(pem: bytes) -> tuple[int, str]:
    """Returns a certificate's serial number and SHA-256 fingerprint."""
    found = x509.load_pem_x509_certificate(pem)
    return found.serial_number, found.fingerprint(hashes.SHA256()).hex()
