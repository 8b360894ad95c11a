"""PURE: reads a caller's identity from its certificate, and checks which learners the caller may act for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll_wire.security.certificate import ANY, NAME, SCHEME, Role, allows_name

from atoll_server.access.refusals import Refused, Status


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a call.

    role: None without TLS, since callers then have no certificates. peer: the sender's address.
    """

    role: Role | None
    name: str
    peer: str

    def __str__(self) -> str:
        return f"{self.role.value} {self.name} at {self.peer}" if self.role is not None else self.peer

    def speaks_for(self, learner: str) -> None:
        """Raises Refused unless the caller may use this learner's name.

        A front may use any learner's name, and so may any caller without TLS.
        """
        if self.role in {None, Role.FRONT} or (self.role is Role.LEARNER and allows_name(self.name, learner)):
            return
        assert self.role is not None
        mine = f'{self.role.value} "{self.name}"'
        fix = "give each learner its own certificate (atoll certs issue learner NAME)"
        raise Refused(Status.PERMISSION_DENIED, f'the certificate of {mine} is not for learner "{learner[:80]}": {fix}')


def caller(context: Any) -> Caller:  # noqa: ANN401 - gRPC's context
    """Returns the identity of a call's sender. Raises Refused for a certificate without a role."""
    said = context.auth_context()
    if b"ssl" not in said.get("transport_security_type", ()):
        return Caller(None, "", context.peer())
    for uri in said.get("x509_subject_alternative_name", ()):
        text = uri.decode(errors="replace")
        role, _, name = text.removeprefix(SCHEME).partition("/")
        if text.startswith(SCHEME) and role in {each.value for each in Role} and NAME.fullmatch(name.removesuffix(ANY)):
            return Caller(Role(role), name, context.peer())
    text = "the certificate has no role: issue one with `atoll certs issue ROLE NAME`"
    raise Refused(Status.PERMISSION_DENIED, text)
