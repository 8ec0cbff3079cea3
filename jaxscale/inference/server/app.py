"""The application: OpenAI-compatible routes, and those for operators."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from jaxscale import __version__
from jaxscale.inference.request import Draining, EngineDead, InvalidRequest, Overloaded
from jaxscale.inference.server.calls import IGNORED_HEADER
from jaxscale.inference.server.config import ServerConfig
from jaxscale.inference.server.endpoints.routes import add_calls, add_models
from jaxscale.inference.server.errors import api_error, validation_error
from jaxscale.inference.server.gate import Gate
from jaxscale.inference.server.inflate import Inflate
from jaxscale.inference.server.live import PAGE
from jaxscale.inference.server.metrics import CONTENT_TYPE
from jaxscale.inference.server.service import Served, Service
from jaxscale.inference.server.stream import EventStream
from jaxscale.inference.server.trace import add_trace


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": about}
    for status, about in {
        400: "The call asks for what there is not.",
        401: "It shows no valid key.",
        403: "The Host of the call is no name of this server.",
        404: "The model is another one.",
        408: "The body came too slowly.",
        413: "The body is too long.",
        415: "The body comes in a form that is not known.",
        429: "Too many wait; Retry-After says when to come again.",
        500: "The server failed.",
        503: "The server is loading, shutting down or dead.",
        504: "The time of the request is over.",
    }.items()
}
# Only what the page itself holds may run in it.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'",
    "x-content-type-options": "nosniff",
}


def create_app(config: ServerConfig, load: Callable[[], Served]) -> FastAPI:
    """The ASGI application that serves a model.

    Its lifespan loads the model on another thread; until that is done, ``/ready`` and
    all requests are answered with 503. It can be run by any ASGI server;
    `jaxscale.inference.server.serve` also bounds connections and drains.

    Args:
        config: Settings.
        load: Loads the model.

    Returns:
        The application; `Service` is in its ``state.service``.
    """
    service = Service(config, load)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="jaxscale",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        responses=_ERRORS,
    )
    app.state.service = service
    _add_errors(app)
    _add_operations(app, service)
    add_models(app, service)
    add_trace(app, service)
    add_calls(app, service)  # which completes the description of all
    _describe(app)
    paths = {
        path: frozenset(method.upper() for method in operations)
        for path, operations in app.openapi()["paths"].items()
    }
    app.add_middleware(Inflate, most=config.max_body_bytes)
    app.add_middleware(Gate, service=service, paths=paths)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", IGNORED_HEADER),
        )
    return app


def _add_errors(app: FastAPI) -> None:
    """Answer all errors in one form."""

    async def answer(_: Request, error: Exception) -> Response:
        return api_error(error).response()

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_error(error.errors()).response()

    known = (HTTPException, InvalidRequest, Overloaded, Draining, EngineDead)
    for kind in known:
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(RequestValidationError, invalid)


def _describe(app: FastAPI) -> None:
    """Leave FastAPI's own error format out of the OpenAPI schema."""
    described = app.openapi()
    for path in described["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        described.get("components", {}).get("schemas", {}).pop(name, None)


def _add_operations(app: FastAPI, service: Service) -> None:
    """Routes for those who run the server."""

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine lives, 503 once it is dead."""
        dead = service.state == "dead"
        return JSONResponse({"status": service.state}, 503 if dead else 200)

    @app.get("/ready")
    async def ready() -> Response:
        """200 while requests are accepted, 503 while loading, draining or dead.

        They are before all programs are compiled: larger ones stand in for those that
        are not. While the model is loaded, ``programs`` are those that are waited for.
        """
        state = service.state
        body: dict[str, Any] = {"status": state}
        if state in ("ready", "loading"):
            body |= service.progress
        return JSONResponse(body, 200 if state == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """What Prometheus reads."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def version() -> Response:
        """The version of jaxscale."""
        return JSONResponse({"version": __version__})

    @app.get("/live")
    async def live() -> Response:
        """A page that shows the batch, or the calls to an encoder."""
        return HTMLResponse(PAGE.read_text(), headers=_PAGE_HEADERS)

    @app.get("/live/events")
    async def live_events() -> Response:
        """What the page shows: ten frames a second, after those of the last minute."""
        service.served()
        assert service.recorder is not None
        frames = service.recorder.watch()
        return EventStream(frames, service.config, frames.aclose)
