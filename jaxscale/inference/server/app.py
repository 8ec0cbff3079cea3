"""The application: routes in the form of OpenAI's API, and those of operations."""

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
from jaxscale.inference.server import chat_completions, completions, encoders
from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.calls import Caller, check_length, prepared
from jaxscale.inference.server.config import ServerConfig
from jaxscale.inference.server.encoders import ServedEncoder
from jaxscale.inference.server.errors import api_error, validation_error
from jaxscale.inference.server.gate import Gate
from jaxscale.inference.server.live import PAGE
from jaxscale.inference.server.metrics import CONTENT_TYPE
from jaxscale.inference.server.schema import (
    Chat,
    Completion,
    Detokenize,
    Embedding,
    Score,
    Tokenize,
)
from jaxscale.inference.server.service import Served, Service
from jaxscale.inference.server.stream import EventStream, attended


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": about}
    for status, about in {
        400: "The call asks for what there is not.",
        401: "It shows no valid key.",
        403: "The Host of the call is no name of this server.",
        404: "The model is another one.",
        408: "The body came too slowly.",
        413: "The body is too long.",
        429: "Too many wait; Retry-After says when to come again.",
        500: "The server failed.",
        503: "The server is loading, shutting down or dead.",
        504: "The time of the request is over.",
    }.items()
}
# Characters that /tokenize takes, or this many times the tokens of the model.
_COUNTED, _COUNTED_SHARE = 2**20, 8
# Only what the page itself holds may run in it.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'",
    "x-content-type-options": "nosniff",
}


def create_app(config: ServerConfig, load: Callable[[], Served]) -> FastAPI:
    """The ASGI application that serves a model.

    Its lifespan loads the model on another thread; until it is there, ``/ready`` and
    all calls answer 503. It can be run by any ASGI server;
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
    _add_model_routes(app, service)
    _add_calls(app, service)
    _describe(app)
    paths = {
        path: frozenset(method.upper() for method in operations)
        for path, operations in app.openapi()["paths"].items()
    }
    app.add_middleware(Gate, service=service, paths=paths)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
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
    """Leave FastAPI's own form of errors out of the description."""
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
        """200 while calls are taken, 503 while loading, draining or dead.

        An encoder takes them before all sizes of rows are compiled, and says so.
        """
        is_ready = service.state == "ready"
        body: dict[str, Any] = {"status": service.state}
        if is_ready and isinstance(service.model, ServedEncoder):
            body["compiles_on_demand"] = True
        return JSONResponse(body, 200 if is_ready else 503)

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
        """A page that shows the batch."""
        return HTMLResponse(PAGE.read_text(), headers=_PAGE_HEADERS)

    @app.get("/live/events")
    async def live_events() -> Response:
        """What the page shows: ten frames a second, after those of the last minute."""
        service.decoder()
        assert service.recorder is not None
        frames = service.recorder.watch()
        return EventStream(frames, service.config, frames.aclose)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    """Routes about the model."""

    @app.get("/v1/models")
    async def models() -> Response:
        """The model that is served."""
        return JSONResponse({"object": "list", "data": [_card(service.served())]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The model of this name."""
        return JSONResponse(_card(service.served(name)))

    @app.post("/tokenize")
    async def tokenize(body: Tokenize, http: Request) -> Response:
        """The token ids of a prompt or of messages."""
        model = service.decoder(body.model)
        work = prepared(_caller(http), _tokenize, body, model)
        tokens = await attended(http.receive, work)
        longest = model.backend.config.longest
        return JSONResponse(
            {"tokens": tokens, "count": len(tokens), "max_model_len": longest}
        )

    @app.post("/detokenize")
    async def detokenize(body: Detokenize, http: Request) -> Response:
        """The text of token ids."""
        model = service.decoder(body.model)
        config = model.backend.config
        check_length(len(body.tokens), max(_COUNTED, config.longest))
        if any(not 0 <= token < config.vocab_size for token in body.tokens):
            raise InvalidRequest(
                f"tokens holds ids outside the vocabulary of {config.vocab_size}"
            )
        work = prepared(_caller(http), model.tokenizer.decode, body.tokens)
        text = await attended(http.receive, work)
        return JSONResponse({"prompt": text})


def _add_calls(app: FastAPI, service: Service) -> None:
    """Routes that compute."""

    @app.post("/v1/completions")
    async def complete(body: Completion, http: Request) -> Response:
        """Continue prompts."""
        model, caller = service.decoder(body.model), _caller(http)
        return await completions.complete(body, model, caller, http.receive)

    @app.post("/v1/chat/completions")
    async def chat(body: Chat, http: Request) -> Response:
        """Answer a conversation."""
        model, caller = service.decoder(body.model), _caller(http)
        return await chat_completions.chat(body, model, caller, http.receive)

    @app.post("/v1/completions/render")
    async def render(body: Completion, http: Request) -> Response:
        """The token ids of prompts, for gateways."""
        model = service.decoder(body.model)
        return await completions.render(body, model, _caller(http), http.receive)

    @app.post("/v1/chat/completions/render")
    async def render_chat(body: Chat, http: Request) -> Response:
        """The token ids of a conversation, for gateways."""
        model = service.decoder(body.model)
        caller = _caller(http)
        return await chat_completions.render(body, model, caller, http.receive)

    @app.post("/v1/embeddings")
    async def embed(body: Embedding, http: Request) -> Response:
        """Embed texts."""
        model = service.encoder(body.model)
        work = encoders.embed(body, model, _caller(http))
        return JSONResponse(await attended(http.receive, work))

    @app.post("/v1/score")
    async def score(body: Score, http: Request) -> Response:
        """Compare texts."""
        model = service.encoder(body.model)
        work = encoders.score(body, model, _caller(http))
        return JSONResponse(await attended(http.receive, work))


def _caller(http: Request) -> Caller:
    return http.state.caller


def _card(model: Served) -> dict[str, Any]:
    """What ``/v1/models`` says of a model."""
    if isinstance(model, TextModel):
        longest = model.backend.config.longest
    else:
        longest = model.encoder.max_length
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "jaxscale",
        "max_model_len": longest,
    }


def _tokenize(body: Tokenize, model: TextModel) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages")
    most = max(_COUNTED, _COUNTED_SHARE * model.backend.config.longest)

    def check(text: str) -> None:
        """Texts that do not fit are counted too, within limits."""
        if len(text) > most:
            raise InvalidRequest(
                f"a text of {len(text)} characters is too long to be counted: at most "
                f"{most} are; send it in parts"
            )

    if body.prompt is not None:
        check(body.prompt)
        special = body.add_special_tokens is not False
        return model.encode(body.prompt, add_special_tokens=special)
    return chat_completions.template(model).encode(
        chat_completions.dumped(body.messages or []),
        tools=body.tools or (),
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=body.chat_template_kwargs,
        check=check,
    )
