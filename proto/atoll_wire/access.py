"""How an address may be called or offered: with the certificates of a directory, or in plain text where that is safe.

A directory of `atoll certs issue` has `ca.pem` (whom to trust), `cert.pem` and `key.pem` (who one is). Files that
change while a process runs count for its next connections.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
import structlog

from atoll_wire.errors import UserError

log = structlog.get_logger()

Stamp: TypeAlias = tuple[int, ...]  # of files
AUTHORITY = "ca.pem"
CERTIFICATE = "cert.pem"
KEY = "key.pem"


class AccessError(UserError):
    """Certificates that cannot be used, or plain text where somebody may listen; one line, with the remedy."""


def on_loopback(addresses: Iterable[str]) -> bool:
    """Whether nobody but this machine is behind any of these."""
    return all(address.startswith("unix:") or _is_loopback(address.rpartition(":")[0]) for address in addresses)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class Pem:
    """What the files of a directory say."""

    authority: bytes
    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Access:
    """tls: a directory of certificates; plaintext: also beyond loopback."""

    tls: Path | None = None
    plaintext: bool = False

    def check(self, addresses: Iterable[str]) -> None:
        """Raises AccessError for certificates that cannot be used, and for plain text where somebody may listen."""
        if self.tls is not None:
            read(self.tls)
            return
        for address in addresses:
            if not self.plaintext and not on_loopback([address]):
                raise AccessError(
                    f"{address} is not loopback: give --tls DIR (see atoll certs), or say --insecure-plaintext "
                    "on a network where nobody else listens"
                )

    def stamp(self) -> Stamp:
        """Changes when there are other files that can be used."""
        return () if self.tls is None else _newest(self.tls).stamp

    def dial(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel to an address. Raises AccessError when the files cannot be used."""
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, _channel_credentials(self.tls), options=options)

    def dial_and_wait(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        """The same for a program that does one thing after the other."""
        if self.tls is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, _channel_credentials(self.tls), options=options)

    def serving(self) -> grpc.ServerCredentials | None:
        """What a server shows and demands of whoever calls; None: plain text. Raises AccessError."""
        return None if self.tls is None else _server_credentials(self.tls)


LOCAL = Access()  # plain text, on this machine


def read(directory: Path) -> Pem:
    """Raises AccessError for files that are missing, are none, or do not fit each other."""
    try:
        authority, certificate, key = (directory / name for name in (AUTHORITY, CERTIFICATE, KEY))
        found = Pem(authority.read_bytes(), certificate.read_bytes(), key.read_bytes())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        text = f"--tls {directory}: certificate and key cannot be used ({reason}): issue them again"
        raise AccessError(text) from error
    except OSError as error:
        name = Path(error.filename).name if error.filename else AUTHORITY
        raise AccessError(
            f"--tls {directory}: {name} cannot be read ({error.strerror}): make it with `atoll certs issue`"
        ) from error
    return found


@dataclass(slots=True)
class _Known:
    """What a directory had when it could be used last. seen: the files that were looked at last."""

    pem: Pem
    stamp: Stamp
    seen: Stamp


_KNOWN: dict[Path, _Known] = {}


def _newest(directory: Path) -> _Known:
    """The newest that can be used; while files are being replaced, those before. Raises AccessError when none can."""
    now, known = _look(directory), _KNOWN.get(directory)
    if known is not None and now == known.seen:
        return known
    try:
        pem = read(directory)
        if _look(directory) != now:
            raise AccessError(f"--tls {directory}: the files are being replaced: try again")
    except AccessError as error:
        if known is None:
            raise
        known.seen = now
        log.warning("new certificates are not taken", error=str(error))
        return known
    if known is not None:
        log.info("new certificates are taken", directory=str(directory))
    _KNOWN[directory] = known = _Known(pem, now, now)
    return known


def _look(directory: Path) -> Stamp:
    found = []
    for name in (AUTHORITY, CERTIFICATE, KEY):
        try:
            stat = (directory / name).stat()
        except OSError:
            return ()  # being replaced
        found += [stat.st_mtime_ns, stat.st_ino]
    return tuple(found)


def _channel_credentials(directory: Path) -> grpc.ChannelCredentials:
    pem = _newest(directory).pem
    return grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)


def _server_credentials(directory: Path) -> grpc.ServerCredentials:
    """Every connection is shown the newest certificate that can be used, and has to show one itself."""
    shown = _newest(directory)

    def fetch() -> grpc.ServerCertificateConfiguration | None:  # None: as it was, whatever the types say
        nonlocal shown
        before, shown = shown, _newest(directory)
        return None if shown.stamp == before.stamp else _configuration(shown.pem)

    first, newer = _configuration(shown.pem), cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch)
    return grpc.dynamic_ssl_server_credentials(first, newer, require_client_authentication=True)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.authority)
