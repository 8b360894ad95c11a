"""Reads a certificate: identity (`atoll://ROLE/NAME`), hosts and validity."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from atoll_wire.errors import UserError
from atoll_wire.security.transport import AUTHORITY, CERTIFICATE

SCHEME = "atoll://"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ANY = "*"  # at the end of a certificate's name: the certificate is valid for all names with this prefix


class Role(Enum):
    """The role of a certificate's owner in a run."""

    LEARNER = "learner"
    FRONT = "front"
    CORE = "core"
    OPERATOR = "operator"
    READER = "reader"


class CertificateError(UserError):
    """A certificate cannot be issued, read or used. The message is one line with the fix."""


@dataclass(frozen=True, slots=True)
class CertificateInfo:
    """The contents of a certificate. identity: "role/name", or a description of the owner. begins, ends: in UTC."""

    identity: str
    hosts: tuple[str, ...]
    issuer: str
    begins: datetime.datetime
    ends: datetime.datetime
    fingerprint: str

    @property
    def days_left(self) -> float:
        """Days until the certificate expires. Negative after that."""
        return (self.ends - datetime.datetime.now(datetime.UTC)).total_seconds() / 86_400


def read_certificate(path: Path) -> CertificateInfo:
    """Reads a certificate. path: the file, or a directory that `atoll certs` created. Raises CertificateError."""
    file = path / CERTIFICATE if path.is_dir() and (path / CERTIFICATE).exists() else path
    file = file / AUTHORITY if file.is_dir() else file
    try:
        found = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CertificateError(f"{file} is not a readable certificate: give a .pem file or its folder") from error
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
        found.fingerprint(hashes.SHA256()).hex(":"),
    )


def allows_name(said: str, name: str) -> bool:
    """Returns whether a certificate is valid for a name. said: the certificate's name, which may end with ANY."""
    return name.startswith(said[:-1]) if said.endswith(ANY) else said == name


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
