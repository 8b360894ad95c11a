"""The headers of all HTTP responses, and the check of each request's Host header and size."""

from __future__ import annotations

import ipaddress

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BYTES = 16 << 10  # largest body of a request; an action contains only a name and a reason
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAID = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Headers:
    """Middleware that sets headers, limits the size of requests, and refuses unknown host names.

    The check of host names prevents DNS rebinding.
    hosts: allowed names in the Host header, in addition to IP addresses.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        self._app = app
        self._hosts = frozenset(_plain(host) for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not self._known(_host(scope)):
            text = "this host name is not allowed: start the dashboard with --host NAME\n"
            await PlainTextResponse(text, 421)(scope, receive, send)
            return
        body = await _body(receive) if scope["method"] not in {"GET", "HEAD"} else []
        if body is None:
            await PlainTextResponse(f"the request exceeds {MAX_BYTES} bytes: send less\n", 413)(scope, receive, send)
            return

        async def read() -> Message:
            return body.pop(0) if body else await receive()

        async def say(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SAID.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        await self._app(scope, read, say)

    def _known(self, host: str) -> bool:
        """Returns whether a host is allowed. IP addresses are always allowed, because DNS rebinding needs a name."""
        return host in self._hosts or _address(host)


async def _body(receive: Receive) -> list[Message] | None:
    """Returns the messages of a request's body, read before any route runs, or None if the body is too large."""
    found, size = list[Message](), 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BYTES:
            return None
        found.append(message)
        if message["type"] != "http.request" or not message.get("more_body", False):
            return found


def _host(scope: Scope) -> str:
    """Returns the Host header without the port."""
    said = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    return _plain(said.rpartition("]")[0] + "]" if said.startswith("[") else said.partition(":")[0])


def _plain(host: str) -> str:
    return host.lower().rstrip(".")


def _address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
