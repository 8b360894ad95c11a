"""What a certificate says of who has it: `atoll://ROLE/NAME`, beside the host names that it serves under."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from atoll_wire.access import AUTHORITY, CERTIFICATE
from atoll_wire.errors import UserError

SCHEME = "atoll://"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ANY = "*"  # at the end of a learner's: any name that begins so, for fleets whose members nobody knows beforehand


class Role(Enum):
    """What a certificate is for."""

    LEARNER = "learner"
    FRONT = "front"
    CORE = "core"
    OPERATOR = "operator"


class CertificateError(UserError):
    """What cannot be issued or shown; one line, with the remedy."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a certificate says. identity: role and name, or why it is none."""

    identity: str
    hosts: tuple[str, ...]
    issuer: str
    begins: datetime.datetime
    ends: datetime.datetime
    fingerprint: str

    @property
    def days_left(self) -> float:
        """Until it is not valid any more; negative after that."""
        return (self.ends - datetime.datetime.now(datetime.UTC)).total_seconds() / 86_400


def show(path: Path) -> Shown:
    """What a certificate says; path: the file, or the directory that has it."""
    file = path / CERTIFICATE if path.is_dir() and (path / CERTIFICATE).exists() else path
    file = file / AUTHORITY if file.is_dir() else file
    try:
        found = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CertificateError(f"{file} is no certificate that can be read: give a .pem file or its folder") from error
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    said = [uri.removeprefix(SCHEME) for uri in names.get_values_for_type(x509.UniformResourceIdentifier)]
    hosts = (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))
    authority = "an authority" if found.subject == found.issuer else "nobody that Atoll knows"
    return Shown(
        " ".join(said) or authority,
        hosts,
        found.issuer.rfc4514_string(),
        found.not_valid_before_utc,
        found.not_valid_after_utc,
        found.fingerprint(hashes.SHA256()).hex(":"),
    )


def may_be(said: str, name: str) -> bool:
    """Whether a learner whose certificate says this may join under a name."""
    return name.startswith(said[:-1]) if said.endswith(ANY) else said == name


def check_role(directory: Path | None, role: Role, name: str = "") -> None:
    """Raises CertificateError for a directory that is somebody else's. One without a word of Atoll is left to TLS."""
    if directory is None:
        return
    found, wanted = show(directory).identity, f"{role.value}/{name}"
    if "/" in found and not (may_be(found, wanted) if name else found.startswith(wanted)):
        text = f"--tls {directory}: this is the certificate of {found}, and a {role.value}'s is needed here"
        raise CertificateError(f"{text}: atoll certs issue {role.value} {name or 'NAME'}")
