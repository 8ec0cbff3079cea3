"""Routes about the model, and those that compute."""

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxscale.inference.request import InvalidRequest
from jaxscale.inference.server import (
    chat_completions,
    completions,
    embeddings,
    messages,
    responses,
    scores,
)
from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.calls import Caller, check_length, prepared
from jaxscale.inference.server.response_store import ResponseStore
from jaxscale.inference.server.schema.chat import Chat, Detokenize, Tokenize
from jaxscale.inference.server.schema.completions import Completion
from jaxscale.inference.server.schema.encoders import Embedding, Rerank, Score
from jaxscale.inference.server.schema.messages import Messages
from jaxscale.inference.server.schema.responses import Responses
from jaxscale.inference.server.service import Served, Service
from jaxscale.inference.server.stream import attended
from jaxscale.inference.server.tokens import COUNTED, tokenized


def add_models(app: FastAPI, service: Service) -> None:
    """Routes about the model."""

    @app.get("/v1/models")
    async def models() -> Response:
        """The model that is served."""
        served = service.served()
        names = (served.name, *served.aliases)
        cards = [_card(served, name) for name in names]
        return JSONResponse({"object": "list", "data": cards})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The model of this name."""
        return JSONResponse(_card(service.served(name), name))

    @app.post("/tokenize")
    async def tokenize(body: Tokenize, http: Request) -> Response:
        """The token ids of a prompt or of messages."""
        model = service.decoder(body.model)
        work = prepared(_caller(http), tokenized, body, model)
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
        check_length(len(body.tokens), max(COUNTED, config.longest))
        if any(not 0 <= token < config.vocab_size for token in body.tokens):
            raise InvalidRequest(
                f"tokens holds ids outside the vocabulary of {config.vocab_size}"
            )
        work = prepared(_caller(http), model.tokenizer.decode, body.tokens)
        text = await attended(http.receive, work)
        return JSONResponse({"prompt": text})


def add_generation(app: FastAPI, service: Service) -> None:
    """Routes of decoders."""
    kept = ResponseStore()

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

    @app.post("/v1/responses")
    async def respond(body: Responses, http: Request) -> Response:
        """Answer a conversation with items."""
        model, caller = service.decoder(body.model), _caller(http)
        return await responses.respond(body, model, caller, http.receive, kept)

    @app.post("/v1/messages")
    async def message(body: Messages, http: Request) -> Response:
        """Answer a conversation, in the form of Anthropic's API."""
        model, caller = service.decoder(body.model), _caller(http)
        return await messages.answer_messages(body, model, caller, http.receive)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: Messages, http: Request) -> Response:
        """The number of tokens of a conversation."""
        model, caller = service.decoder(body.model), _caller(http)
        return await messages.count_tokens(body, model, caller, http.receive)


def add_encoders(app: FastAPI, service: Service) -> None:
    """Routes of encoders."""

    @app.post("/v1/embeddings")
    async def embed(body: Embedding, http: Request) -> Response:
        """Embed texts."""
        model = service.encoder(body.model)
        work = embeddings.embed(body, model, _caller(http))
        return JSONResponse(await attended(http.receive, work))

    @app.post("/v1/score")
    async def score(body: Score, http: Request) -> Response:
        """Compare texts."""
        model = service.encoder(body.model)
        work = scores.score(body, model, _caller(http))
        return JSONResponse(await attended(http.receive, work))

    @app.post("/v1/rerank")
    async def rerank(body: Rerank, http: Request) -> Response:
        """Order documents by how well they go with a query."""
        model = service.encoder(body.model)
        work = scores.rerank(body, model, _caller(http))
        return JSONResponse(await attended(http.receive, work))


def _caller(http: Request) -> Caller:
    return http.state.caller


def _card(model: Served, name: str) -> dict[str, Any]:
    """What ``/v1/models`` says of a model by one of its names."""
    if isinstance(model, TextModel):
        longest = model.backend.config.longest
    else:
        longest = model.encoder.max_length
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "jaxscale",
        "max_model_len": longest,
        **({} if name == model.name else {"root": model.name}),
    }
