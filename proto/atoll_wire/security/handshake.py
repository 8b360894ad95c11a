"""Finds out whether a connection failed because of TLS, which gRPC's own messages do not state reliably."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from atoll_wire.security.certificate import CertificateError, read_certificate
from atoll_wire.security.transport import AUTHORITY, CERTIFICATE, KEY, TransportSecurity

WAIT_S = 3.0
CLOCKS = "check both clocks"
STRANGE = (
    "is from another authority than ca.pem in --tls {tls}",
    "use a directory that the authority of this run issued (atoll certs issue)",
)
OTHER_HOST = (
    "does not name the host {host}",
    "use a host that it names (atoll certs show), or issue it again with --host {host}",
)
# OpenSSL's number of a failed check -> what is wrong with the server's certificate, and the fix.
UNTRUSTED = {
    9: ("is not valid yet", CLOCKS),
    10: ("has expired", f"issue the server's certificate again (atoll certs issue), and {CLOCKS}"),
    18: STRANGE,
    19: STRANGE,
    20: STRANGE,
    62: OTHER_HOST,
    64: OTHER_HOST,
}


def tls_fault(address: str, security: TransportSecurity) -> str:
    """Returns why TLS prevents a connection to HOST:PORT, with the fix; empty if TLS is not the cause.

    Connects to the address and waits for at most a few seconds.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if address.startswith("unix:") or not port.isdigit():
        return ""
    try:
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw:
            return _plain(address, raw) if security.tls is None else _encrypted(address, host, raw, security.tls)
    except (OSError, CertificateError):
        return ""  # no server listens there, it did not answer, or this process's certificate is being replaced


def _plain(address: str, raw: socket.socket) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(raw).close()
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):  # a plain-text server sends something else
            return ""
    return f"{address} accepts only TLS: give --tls DIR with a certificate of this run (see atoll certs)"


def _encrypted(address: str, host: str, raw: socket.socket, tls: Path) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(tls / AUTHORITY)
    context.load_cert_chain(tls / CERTIFICATE, tls / KEY)
    context.set_alpn_protocols(["h2"])
    try:
        wrapped = context.wrap_socket(raw, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        other = (f"cannot be used ({error.verify_message})", "check it with atoll certs show")
        fact, fix = (part.format(tls=tls, host=host) for part in UNTRUSTED.get(error.verify_code, other))
        return f"the TLS certificate of {address} {fact}: {fix}"
    except ssl.SSLEOFError:
        return ""  # as from a forwarder whose target does not answer
    except ssl.SSLError as error:
        return f"{address} does not answer with TLS ({_words(error)}): correct the address, or omit --tls"
    why = "it closed the connection"
    with wrapped:
        try:
            if wrapped.recv(1):  # a server judges the client's certificate only after the client's handshake
                return ""
        except ssl.SSLError as error:
            why = _words(error)
        except ConnectionError:
            pass
    mine = read_certificate(tls)
    if mine.days_left <= 0:
        why = f"it expired on {mine.ends:%Y-%m-%d}"
    fix = f"issue it again with the authority of this run ({mine.issue_command})"
    return f"{address} refused the TLS certificate in --tls {tls} ({why}): {fix}"


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
