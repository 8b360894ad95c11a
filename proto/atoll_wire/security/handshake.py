"""Says whether a failed connection failed because of TLS, which gRPC's own messages do not say reliably."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from atoll_wire.security.transport import AUTHORITY, CERTIFICATE, KEY, TransportSecurity

WAIT_S = 3.0


def tls_fault(address: str, security: TransportSecurity) -> str:
    """Returns why TLS prevents a connection to HOST:PORT, with the fix; empty if TLS is not the cause.

    Connects to the address, and waits for at most a few seconds.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if address.startswith("unix:") or not port.isdigit():
        return ""
    try:
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw:
            return _plain(address, raw) if security.tls is None else _encrypted(address, host, raw, security.tls)
    except OSError:
        return ""  # nothing listens there, or it did not answer


def _plain(address: str, raw: socket.socket) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(raw).close()
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):  # a server of plain text sends something else
            return ""
    return f"{address} accepts only TLS: give --tls DIR with a certificate of this run (see atoll certs)"


def _encrypted(address: str, host: str, raw: socket.socket, tls: Path) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(tls / AUTHORITY)
    context.load_cert_chain(tls / CERTIFICATE, tls / KEY)
    context.set_alpn_protocols(["h2"])
    refused = f"{address} refused the certificate in --tls {tls}"
    fix = "issue it again with the run's authority (atoll certs issue)"
    try:
        wrapped = context.wrap_socket(raw, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        look = "check the address, both clocks, and both certificates (atoll certs show)"
        return f"{address} has a certificate that --tls {tls} does not trust ({error.verify_message}): {look}"
    except ssl.SSLError as error:
        return f"{address} does not answer with TLS ({_words(error)}): correct the address, or omit --tls"
    with wrapped:
        try:
            ended = not wrapped.recv(1)  # a server judges the client's certificate only after the client's handshake
        except ssl.SSLError as error:
            return f"{refused} ({_words(error)}): {fix}"
        except ConnectionError:
            ended = True
    return f"{refused} (it closed the connection): {fix}" if ended else ""


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
