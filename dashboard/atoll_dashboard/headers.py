"""What every answer over HTTP says about itself, and by which names the dashboard may be asked for."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
    """hosts: names in the Host header that are answered; "*" among them: any. Another site's name may lead here too."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        self._app, self._hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if "*" not in self._hosts and _host(scope) not in self._hosts:
            text = "this dashboard is not known by that name: start it with --host NAME\n"
            await PlainTextResponse(text, 421)(scope, receive, send)
            return

        async def say(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SAID.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        await self._app(scope, receive, say)


def _host(scope: Scope) -> str:
    """Without the port."""
    said = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    return said.rpartition("]")[0] + "]" if said.startswith("[") else said.partition(":")[0]
