"""Routes about the model, and those that compute."""

import dataclasses
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.calls import Caller
from jaxscale.inference.server.endpoints import (
    chat_completions,
    completions,
    embeddings,
    messages,
    responses,
    scores,
    tokens,
)
from jaxscale.inference.server.endpoints.bodies import received
from jaxscale.inference.server.endpoints.response_store import ResponseStore
from jaxscale.inference.server.schema.body import Body
from jaxscale.inference.server.schema.chat import Chat, Detokenize, Tokenize
from jaxscale.inference.server.schema.completions import Completion
from jaxscale.inference.server.schema.encoders import Embedding, Rerank, Score
from jaxscale.inference.server.schema.messages import Messages
from jaxscale.inference.server.schema.responses import Responses
from jaxscale.inference.server.served_encoder import ServedEncoder
from jaxscale.inference.server.service import Served, Service


_REFS = "#/components/schemas/{model}"


@dataclasses.dataclass(frozen=True)
class _Call[B: Body, M: Served]:
    """A route that computes."""

    path: str
    form: type[B]
    """Schema of its body."""
    answer: Callable[[B, M, Caller, Receive], Awaitable[Response]]
    """Handles a request."""
    about: str
    """Description, for the OpenAPI schema."""


def _of_decoders() -> tuple[_Call[Any, TextModel], ...]:
    respond = functools.partial(responses.respond, store=ResponseStore())
    return (
        _Call("/v1/completions", Completion, completions.complete, "Continue prompts."),
        _Call(
            "/v1/chat/completions",
            Chat,
            chat_completions.chat,
            "Answer a conversation.",
        ),
        _Call(
            "/v1/completions/render",
            Completion,
            completions.render,
            "The token ids of prompts, for gateways.",
        ),
        _Call(
            "/v1/chat/completions/render",
            Chat,
            chat_completions.render,
            "The token ids of a conversation, for gateways.",
        ),
        _Call("/v1/responses", Responses, respond, "Answer a conversation with items."),
        _Call(
            "/v1/messages",
            Messages,
            messages.answer_messages,
            "Answer a conversation, in the form of Anthropic's API.",
        ),
        _Call(
            "/v1/messages/count_tokens",
            Messages,
            messages.count_tokens,
            "The number of tokens of a conversation.",
        ),
        _Call(
            "/tokenize",
            Tokenize,
            tokens.tokenize,
            "The token ids of a prompt or of messages.",
        ),
        _Call("/detokenize", Detokenize, tokens.detokenize, "The text of token ids."),
    )


_OF_ENCODERS: tuple[_Call[Any, ServedEncoder], ...] = (
    _Call("/v1/embeddings", Embedding, embeddings.embed, "Embed texts."),
    _Call("/v1/score", Score, scores.score, "Compare texts."),
    _Call(
        "/v1/rerank",
        Rerank,
        scores.rerank,
        "Order documents by how well they go with a query.",
    ),
)


def add_calls(app: FastAPI, service: Service) -> None:
    """Routes that compute, and the schemas of their bodies for OpenAPI."""
    decoders = _of_decoders()
    for call in decoders:
        _add(app, call, service.decoder)
    for call in _OF_ENCODERS:
        _add(app, call, service.encoder)
    forms = {call.form for call in (*decoders, *_OF_ENCODERS)}
    _, described = models_json_schema(
        [
            (form, "validation")
            for form in sorted(forms, key=lambda form: form.__name__)
        ],
        ref_template=_REFS,
    )
    parts = app.openapi().setdefault("components", {}).setdefault("schemas", {})
    parts |= described["$defs"]


def _add[B: Body, M: Served](
    app: FastAPI, call: _Call[B, M], model_of: Callable[[str | None], M]
) -> None:
    """A route to the model that `model_of` finds by its name."""
    schema = {"$ref": _REFS.format(model=call.form.__name__)}
    content = {"application/json": {"schema": schema}}
    name = call.path.strip("/").replace("/", "_")

    @app.post(
        call.path,
        name=name,
        description=call.about,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    async def answer(http: Request) -> Response:
        body = await received(http, call.form)
        model = model_of(body.model)
        return await call.answer(body, model, http.state.caller, http.receive)


def add_models(app: FastAPI, service: Service) -> None:
    """Routes about the model."""

    @app.get("/v1/models")
    async def models() -> Response:
        """The model that is served."""
        served = service.served()
        names = [served.name, *served.aliases]
        if isinstance(served, TextModel):
            names += served.adapters
        cards = [_card(service.served(name), name) for name in names]
        return JSONResponse({"object": "list", "data": cards})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The model of this name."""
        return JSONResponse(_card(service.served(name), name))


def _card(model: Served, name: str) -> dict[str, Any]:
    """What ``/v1/models`` says of a model by one of its names."""
    origin = {} if name == model.name else {"root": model.name}
    if isinstance(model, TextModel) and model.parent is not None:
        origin = {"root": model.adapters[name], "parent": model.parent}
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "jaxscale",
        "max_model_len": model.longest,
        **origin,
    }
