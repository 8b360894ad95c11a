"""Connections and servers with TLS, or with plain text on loopback and trusted networks.

A directory from `atoll certs issue` contains `ca.pem` (the trusted authority), `cert.pem` and `key.pem` (the process's
identity). If the files change while a process runs, its next connections use the new files.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
import structlog

from atoll_wire.errors import ExitStatus, UserError

log = structlog.get_logger()

Stamp: TypeAlias = tuple[int, ...]  # modification times and inodes of the three files; empty: a file is missing
AUTHORITY = "ca.pem"
CERTIFICATE = "cert.pem"
KEY = "key.pem"


class TransportSecurityError(UserError):
    """Certificates cannot be used, or plain text would leave the machine. The message is one line with the fix."""


class AddressError(TransportSecurityError):
    """An address is not HOST:PORT. The message is one line with the fix."""

    exit_status = ExitStatus.USAGE


def check_address(address: str) -> None:
    """Raises AddressError if an address is neither HOST:PORT nor unix:PATH. An IPv6 address needs brackets."""
    if address.startswith("unix:"):
        return
    if "://" in address:
        raise AddressError(
            f'"{address}" is a URL: give HOST:PORT, such as {address.partition("://")[2] or "localhost:7070"}'
        )
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        example = f"localhost:{address}" if address.isdigit() else f"{address or 'localhost'}:7070"
        raise AddressError(f'"{address}" has no port: give HOST:PORT, such as {example}')
    if ":" in host and not host.startswith("["):
        raise AddressError(f'"{address}" is an IPv6 address without brackets: give [ADDRESS]:PORT, such as [::1]:7070')
    if not host or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise AddressError(f'"{address}" is not HOST:PORT: give an address such as {host or "localhost"}:7070')


def on_loopback(addresses: Iterable[str]) -> bool:
    """Returns whether all these addresses (HOST:PORT or unix:PATH) are on this machine."""
    return all(address.startswith("unix:") or _is_loopback(address.rpartition(":")[0]) for address in addresses)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """The contents of a directory's three PEM files."""

    authority: bytes
    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class TransportSecurity:
    """Opens connections and returns server credentials, with TLS or in plain text.

    tls: directory of certificates; None for plain text. plaintext: whether plain text beyond loopback is allowed.
    """

    tls: Path | None = None
    plaintext: bool = False

    def check(self, addresses: Collection[str]) -> None:
        """Raises TransportSecurityError for unusable certificates, and for plain text beyond loopback.

        Raises AddressError for an address that is not HOST:PORT.
        """
        for address in addresses:
            check_address(address)
        if self.tls is not None:
            read(self.tls)
            return
        for address in addresses:
            if not self.plaintext and not on_loopback([address]):
                raise TransportSecurityError(
                    f"{address} is not loopback: give --tls DIR (see atoll certs), or --insecure-plaintext on a "
                    "trusted network (in Python: tls= or insecure_plaintext=True)"
                )

    def stamp(self) -> Stamp:
        """Returns a value that changes when new valid certificate files appear."""
        return () if self.tls is None else _newest(self.tls).stamp

    def files(self) -> CertificateFiles | None:
        """Returns the certificate files in use, or None for plain text. Raises TransportSecurityError."""
        return None if self.tls is None else _newest(self.tls).pem

    def dial(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """Returns an asyncio channel to an address. Raises TransportSecurityError if the files cannot be used."""
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, _channel_credentials(self.tls), options=options)

    def dial_and_wait(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        """Returns a blocking channel to an address. Raises TransportSecurityError if the files cannot be used."""
        if self.tls is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, _channel_credentials(self.tls), options=options)

    def serving(self) -> grpc.ServerCredentials | None:
        """Returns credentials for a server that requires client certificates, or None for plain text.

        Raises TransportSecurityError if the files cannot be used.
        """
        return None if self.tls is None else _server_credentials(self.tls)


LOCAL = TransportSecurity()  # plain text, on this machine


def read(directory: Path) -> CertificateFiles:
    """Reads a directory. Raises TransportSecurityError if files are missing or malformed, or do not match."""
    try:
        authority, certificate, key = (directory / name for name in (AUTHORITY, CERTIFICATE, KEY))
        found = CertificateFiles(authority.read_bytes(), certificate.read_bytes(), key.read_bytes())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        text = f"--tls {directory}: certificate and key cannot be used ({reason}): issue them again"
        raise TransportSecurityError(text) from error
    except OSError as error:
        name = Path(error.filename).name if error.filename else AUTHORITY
        raise TransportSecurityError(
            f"--tls {directory}: {name} cannot be read ({error.strerror}): create it with `atoll certs issue`, "
            "or let this user read it"
        ) from error
    return found


@dataclass(slots=True)
class _Known:
    """The last valid contents of a directory. stamp: stamp of these contents. seen: stamp of the newest files read."""

    pem: CertificateFiles
    stamp: Stamp
    seen: Stamp


_KNOWN: dict[Path, _Known] = {}


def _newest(directory: Path) -> _Known:
    """Returns the newest valid contents, or the old contents while files are being replaced.

    Raises TransportSecurityError if there are none.
    """
    now, known = _look(directory), _KNOWN.get(directory)
    if known is not None and now == known.seen:
        return known
    try:
        pem = read(directory)
        if _look(directory) != now:
            raise TransportSecurityError(f"--tls {directory}: the files changed while they were read: try again")
    except TransportSecurityError as error:
        if known is None:
            raise
        known.seen = now
        log.warning("the new certificates cannot be used: keeping the old certificates", error=str(error))
        return known
    if known is not None:
        log.info("using new certificates", directory=str(directory))
    _KNOWN[directory] = known = _Known(pem, now, now)
    return known


def _look(directory: Path) -> Stamp:
    found = []
    for name in (AUTHORITY, CERTIFICATE, KEY):
        try:
            stat = (directory / name).stat()
        except OSError:
            return ()  # the file is missing, for example while it is being replaced
        found += [stat.st_mtime_ns, stat.st_ino]
    return tuple(found)


def _channel_credentials(directory: Path) -> grpc.ChannelCredentials:
    pem = _newest(directory).pem
    return grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)


def _server_credentials(directory: Path) -> grpc.ServerCredentials:
    """Returns credentials that use the newest valid certificate and require a certificate from each client."""
    shown = _newest(directory)

    def fetch() -> grpc.ServerCertificateConfiguration | None:  # None, which the stubs do not allow, means unchanged
        nonlocal shown
        before, shown = shown, _newest(directory)
        return None if shown.stamp == before.stamp else _configuration(shown.pem)

    first, newer = _configuration(shown.pem), cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch)
    return grpc.dynamic_ssl_server_credentials(first, newer, require_client_authentication=True)


def _configuration(pem: CertificateFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.authority)
