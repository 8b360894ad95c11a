"""Creates a run's own certificate authority and issues certificates for the run's processes.

A certificate contains its owner's identity as a URI, `atoll://ROLE/NAME`, and the owner's host names. The certificate
of a fleet of learners has one URI per learner, or a URI that ends in * for all names with a prefix.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll_wire.errors import ExitStatus
from atoll_wire.security.certificate import (
    ANY,
    MOST_NAMES,
    NAME,
    SCHEME,
    CertificateError,
    CertificateInfo,
    Role,
    certificate_info,
    read_certificate,
)
from atoll_wire.security.transport import AUTHORITY, CERTIFICATE, KEY
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_KEY = "ca-key.pem"
ISSUED = "issued.jsonl"  # record of the certificates that the authority has issued, one JSON object per line
ANY_FILE = "+"  # replaces ANY in a directory's name, since a shell would expand ANY; no name contains "+"
AUTHORITY_DAYS = 3650
EARLIER = datetime.timedelta(
    minutes=5
)  # certificates are valid from this long before their creation, since other machines' clocks may be slow
LONGEST = 64  # limit on the characters of a common name
HOST = re.compile(r"(\*\.)?[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")
SERVES, CALLS = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
USES = {
    Role.LEARNER: [CALLS],
    Role.READER: [CALLS],
    Role.OPERATOR: [CALLS],
    Role.VIEWER: [CALLS],
    Role.FRONT: [SERVES, CALLS],
    Role.CORE: [SERVES, CALLS],
}


def init(directory: Path) -> Path:
    """Creates a certificate authority: `ca.pem`, which every process needs, and `ca-key.pem`, which must stay secret.

    Returns the path of `ca.pem`. Raises CertificateError if `directory` already contains an authority or cannot be
    written.
    """
    if (directory / AUTHORITY_KEY).exists():
        raise CertificateError(
            f"--dir {directory} already contains a certificate authority: use this authority, or give another --dir"
        )
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "atoll")])
    builder = (
        _builder(name, name, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    _write(directory, {AUTHORITY_KEY: _key_pem(key), AUTHORITY: _pem(builder.sign(key, hashes.SHA256()))})
    return directory / AUTHORITY


def issue(
    directory: Path, role: Role, name: str, hosts: Sequence[str], days: float, others: Sequence[str] = ()
) -> Path:
    """Creates or renews a process's certificate directory. Returns the directory's path.

    hosts: the host names and addresses at which the process may serve. days: validity in days. others: the other names
    of a fleet of learners that shares the certificate. Raises CertificateError if an argument is invalid or `directory`
    contains no readable authority.
    """
    _check_names(role, name, others)
    if hosts and SERVES not in USES[role]:
        raise CertificateError(f"--host is for cores and fronts, but the role is {role.value}: omit --host")
    if not hosts and SERVES in USES[role]:
        raise CertificateError(f"a {role.value} needs at least one host name: give each name with --host")
    try:
        trusted = (directory / AUTHORITY).read_bytes()
        signer = serialization.load_pem_private_key((directory / AUTHORITY_KEY).read_bytes(), None)
    except (OSError, ValueError) as error:
        raise CertificateError(
            f"--dir {directory} contains no readable certificate authority: correct --dir, or use `atoll certs init`"
        ) from error
    assert isinstance(signer, ec.EllipticCurvePrivateKey), "made by init"
    signers = [each for each in x509.load_pem_x509_certificates(trusted) if each.public_key() == signer.public_key()]
    if not signers:
        raise CertificateError(
            f"{directory / AUTHORITY_KEY} does not match a certificate in {AUTHORITY}: add the key's certificate to it"
        )
    authority = signers[0]
    key, subject = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:LONGEST])]),
    )
    own = [f"{role.value}/{each}" for each in dict.fromkeys((name, *others))]
    names = [*(x509.UniformResourceIdentifier(SCHEME + each) for each in own), *map(_host, hosts)]
    builder = (
        _builder(subject, authority.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(USES[role]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    certificate = builder.sign(signer, hashes.SHA256())
    fleet = f"{ANY_FILE}{len(own) - 1}" if others else ""
    out = directory / f"{role.value}-{name.replace(ANY, ANY_FILE)}{fleet}"
    if fleet and (out / CERTIFICATE).exists() and read_certificate(out).identity != " ".join(own):
        text = f"{out} has the certificate of other learners: name another learner first, or move the directory away"
        raise CertificateError(text)
    _record(directory, certificate_info(certificate))
    _write(out, {KEY: _key_pem(key), CERTIFICATE: _pem(certificate), AUTHORITY: trusted})
    return out


def issued(directory: Path) -> list[dict[str, Any]]:
    """Returns the certificates that an authority has issued, oldest first.

    Each object contains: identity, begins, ends, serial, fingerprint. Raises CertificateError if the record cannot be
    read.
    """
    path = directory / ISSUED
    if not (directory / AUTHORITY).exists():
        raise CertificateError(
            f"--dir {directory} contains no certificate authority: correct --dir, or use `atoll certs init`"
        )
    try:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    except (OSError, ValueError) as error:
        raise CertificateError(
            f"{path} cannot be read ({error}): repair the file, which must contain one JSON object per line"
        ) from error


def _record(directory: Path, cert: CertificateInfo) -> None:
    """Adds a certificate to the record. Called before the certificate is written, so that it can always be revoked."""
    line = json.dumps(
        {
            "identity": cert.identity,
            "begins": cert.begins.timestamp(),
            "ends": cert.ends.timestamp(),
            "serial": cert.serial,
            "fingerprint": cert.fingerprint,
        }
    )
    try:
        with (directory / ISSUED).open("a") as file:
            file.write(line + "\n")
    except OSError as error:
        text = f"{directory / ISSUED} cannot be written ({error.strerror}): give a directory that you may write to"
        raise CertificateError(text) from error


def _check_names(role: Role, name: str, others: Sequence[str]) -> None:
    """Raises CertificateError unless the names are allowed."""
    text = "a learner's name may end in * to cover all names with that prefix"
    if others:
        text = "a certificate has several names, or one name that ends in *"
        if role is not Role.LEARNER:
            raise CertificateError(
                f"a {role.value} has one name, but {1 + len(others)} are given: give one name", ExitStatus.USAGE
            )
        if len({name, *others}) > MOST_NAMES:
            fix = "issue several certificates, or one for a prefix, such as us.*"
            raise CertificateError(
                f"a certificate has at most {MOST_NAMES} names, but {1 + len(others)} are given: {fix}",
                ExitStatus.USAGE,
            )
    for each in (name, *others):
        if not NAME.fullmatch(each.removesuffix(ANY) if role is Role.LEARNER and not others else each):
            fix = f'use 1 to 64 letters, digits, ".", "_" or "-"; {text}'
            raise CertificateError(f'name "{each}" is not allowed: {fix}', ExitStatus.USAGE)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + datetime.timedelta(days=days)) - EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        try:
            if not HOST.fullmatch(host):
                raise ValueError
            return x509.DNSName(host)
        except ValueError as error:
            raise CertificateError(
                f"--host {host} is neither a host name nor an IP address: give one without a scheme or port"
            ) from error


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(directory: Path, files: dict[str, bytes]) -> None:
    """Replaces each file atomically, since processes may be reading it. Only the files' owner can read private keys."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, content in files.items():
            part = directory / (name + ".part")
            part.unlink(missing_ok=True)
            secret = name in {KEY, AUTHORITY_KEY}
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            part.replace(directory / name)
    except OSError as error:
        raise CertificateError(
            f"{directory} cannot be written ({error.strerror}): give a directory that you may write to"
        ) from error
