"""The HTTP application: the page, the JSON API and the runbooks."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
from atoll_wire.connections.calls import LinkLost
from atoll_wire.security.transport import TransportSecurityError
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles

from atoll_dashboard.feed.run_feed import RunFeed, explained
from atoll_dashboard.web import action_routes, read_routes
from atoll_dashboard.web.headers import Headers
from atoll_dashboard.web.runbooks import runbooks_page

PAGE = Path(__file__).parent.parent / "page"


def application(feed: RunFeed, hosts: tuple[str, ...]) -> FastAPI:
    """Returns the ASGI application. hosts: allowed host names, in addition to IP addresses."""

    app = FastAPI(
        title="Atoll",
        description="The state of an Atoll run, and operator actions.",
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(Headers, hosts=hosts)
    app.add_exception_handler(grpc.aio.AioRpcError, _core_said(feed))
    app.add_exception_handler(TransportSecurityError, _core_said(feed))
    app.add_exception_handler(LinkLost, _core_said(feed))
    app.add_exception_handler(RequestValidationError, _not_asked_well)
    app.state.feed = feed
    app.state.tickets = action_routes.Tickets()
    app.include_router(read_routes.router, prefix="/api")
    app.include_router(action_routes.router, prefix="/api")
    app.mount("/page", StaticFiles(directory=PAGE))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @app.get("/runbooks", include_in_schema=False)
    def runbooks() -> HTMLResponse:
        try:
            return HTMLResponse(runbooks_page())
        except FileNotFoundError as error:
            raise HTTPException(404, str(error)) from error

    @app.get("/livez", include_in_schema=False)
    async def alive() -> str:
        return "yes"

    return app


HTTP = {
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.INVALID_ARGUMENT: 422,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 507,
}


async def _not_asked_well(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), "registered for this error only"
    first = error.errors()[0]
    if first["loc"] == ("body",):
        detail = "the body must be a JSON object, sent as Content-Type: application/json; see api/openapi.json"
    else:
        detail = f"{first['loc'][-1]}: {first['msg'].lower()}; see api/openapi.json"
    return JSONResponse({"detail": detail}, 422)


def _core_said(feed: RunFeed):  # type: ignore[no-untyped-def]  # noqa: ANN202 - the signature that starlette requires
    async def answer(_request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, grpc.aio.AioRpcError) and error.code() in HTTP:
            return JSONResponse({"detail": error.details()}, HTTP[error.code()])
        return JSONResponse({"detail": await explained(error, feed.core)}, 503)

    return answer
