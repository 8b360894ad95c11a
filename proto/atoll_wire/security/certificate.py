"""Reads a certificate: identity (`atoll://ROLE/NAME`), hosts and validity.

A learner's certificate may be valid for a fleet: its name ends in *, which marks a prefix, or it contains several
identities. In text, several identities or names are separated by spaces.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from atoll_wire.errors import UserError
from atoll_wire.security.transport import AUTHORITY, CERTIFICATE

SCHEME = "atoll://"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST_NAMES = 100  # limit on the names in a certificate, which a peer sends in each handshake
ANY = "*"  # last character of a certificate's name if the certificate is valid for all names with a prefix


class Role(Enum):
    """The role of a certificate's owner in a run."""

    LEARNER = "learner"
    FRONT = "front"
    CORE = "core"
    OPERATOR = "operator"
    VIEWER = "viewer"  # makes only those calls of operators that change nothing
    READER = "reader"


class CertificateError(UserError):
    """A certificate cannot be issued, read or used. The message is one line with the fix."""


@dataclass(frozen=True, slots=True)
class CertificateInfo:
    """The contents of a certificate. identity: "role/name", or a description of the owner. begins, ends: times in UTC.

    serial: the serial number in hexadecimal digits, as OpenSSL shows it. fingerprint: SHA-256, in pairs of digits.
    """

    identity: str
    hosts: tuple[str, ...]
    issuer: str
    begins: datetime.datetime
    ends: datetime.datetime
    serial: str
    fingerprint: str

    @property
    def days_left(self) -> float:
        """Days until the certificate expires. Negative after that."""
        return (self.ends - datetime.datetime.now(datetime.UTC)).total_seconds() / 86_400

    @property
    def issue_command(self) -> str:
        """The command that issues the certificate again, on the authority's machine."""
        role, _, names = self.identity.partition("/")
        owner = (role, names.replace(f" {role}/", " ")) if names else ("ROLE", "NAME")
        return " ".join(("atoll certs issue", *owner, *(f"--host {host}" for host in self.hosts)))


def read_certificate(path: Path) -> CertificateInfo:
    """Reads a certificate. path: the file, or a directory that `atoll certs` created. Raises CertificateError."""
    file = path / CERTIFICATE if path.is_dir() and (path / CERTIFICATE).exists() else path
    file = file / AUTHORITY if file.is_dir() else file
    try:
        found = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CertificateError(f"{file} is not a readable certificate: give a .pem file or its folder") from error
    return certificate_info(found)


def certificate_info(found: x509.Certificate) -> CertificateInfo:
    """Returns the contents of a certificate."""
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    said = [uri.removeprefix(SCHEME) for uri in names.get_values_for_type(x509.UniformResourceIdentifier)]
    hosts = (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))
    authority = "an authority" if found.subject == found.issuer else "an owner without an Atoll identity"
    return CertificateInfo(
        " ".join(said) or authority,
        hosts,
        found.issuer.rfc4514_string(),
        found.not_valid_before_utc,
        found.not_valid_after_utc,
        found.serial_number.to_bytes(max(1, (found.serial_number.bit_length() + 7) // 8)).hex().upper(),
        found.fingerprint(hashes.SHA256()).hex(":"),
    )


def owner_of(uris: Iterable[str]) -> tuple[Role, str] | None:
    """Returns a certificate's role and name, or None if a role or name is invalid. uris: the certificate's URIs.

    Only a learner's certificate may contain several names. They are then returned as one string, separated by spaces.
    """
    own = [uri.removeprefix(SCHEME).partition("/") for uri in uris if uri.startswith(SCHEME)]
    roles, names = {role for role, _, _ in own}, [name for _, _, name in own]
    if len(roles) != 1 or not roles <= {each.value for each in Role}:
        return None
    role = Role(roles.pop())
    if len(names) > 1:
        valid = role is Role.LEARNER and len(names) <= MOST_NAMES and all(map(NAME.fullmatch, names))
    else:
        valid = NAME.fullmatch(names[0].removesuffix(ANY)) is not None
    return (role, " ".join(names)) if valid else None


def allows_name(said: str, name: str) -> bool:
    """Returns whether a certificate is valid for a name. said: the certificate's names, or its identities."""
    return any(name.startswith(each[:-1]) if each.endswith(ANY) else each == name for each in said.split())


def is_fleet(said: str) -> bool:
    """Returns whether a certificate is for several learners. said: the certificate's names."""
    return said.endswith(ANY) or " " in said


def brief(said: str) -> str:
    """Returns text for a message that shows at most three of a certificate's names. said: the certificate's names."""
    names = said.split()
    return said if len(names) <= 3 else f"{' '.join(names[:3])} and {len(names) - 3} more"


def check_role(directory: Path | None, role: Role, name: str = "") -> None:
    """Raises CertificateError if a directory's certificate has a different role or name.

    Accepts certificates without an Atoll identity.
    """
    if directory is None:
        return
    found, wanted = read_certificate(directory).identity, f"{role.value}/{name}"
    if "/" in found and not (allows_name(found, wanted) if name else found.startswith(wanted)):
        needed = name or "NAME"
        text = (
            f"--tls {directory} has the certificate of {found}, but the certificate of {role.value}/{needed} is needed"
        )
        raise CertificateError(f"{text}: create it with `atoll certs issue {role.value} {needed}`")
