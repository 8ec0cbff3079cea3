"""``/v1/embeddings``: texts to vectors."""

import asyncio
import base64

import numpy as np
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive

from jaxscale.inference.encoder.texts import Text
from jaxscale.inference.request import InvalidRequest
from jaxscale.inference.server.calls import Caller, prepared
from jaxscale.inference.server.schema.encoders import Embedding
from jaxscale.inference.server.served_encoder import ServedEncoder
from jaxscale.inference.server.stream import attended
from jaxscale.models.tokenizer import EncodedText


async def embed(
    body: Embedding, model: ServedEncoder, caller: Caller, receive: Receive
) -> Response:
    """Answer ``/v1/embeddings``.

    Raises:
        InvalidRequest: the request is invalid.
    """
    width = model.encoder.model.config.d_model
    if body.dimensions is not None and not 1 <= body.dimensions <= width:
        raise InvalidRequest(
            f"dimensions {body.dimensions} must be at least 1 and at most {width}, "
            "those of the model"
        )
    return await attended(receive, _embedded(body, model, caller))


async def _embedded(body: Embedding, model: ServedEncoder, caller: Caller) -> Response:
    kept, tokens = await prepared(caller, _counted, body, model, caller)
    rows = await model.compute("encode", kept, caller)
    # Writing thousands of vectors takes as long as reading their texts.
    return await asyncio.to_thread(_answer, body, model.name, rows, tokens)


def _counted(
    body: Embedding, model: ServedEncoder, caller: Caller
) -> tuple[list[EncodedText], int]:
    """What is to be embedded, and its tokens."""
    texts, most = _inputs(body), caller.config.max_inputs
    if not 1 <= len(texts) <= most:
        raise InvalidRequest(f"input has {len(texts)} texts, expected 1 to {most}")
    return model.counted(texts, bool(body.truncate), caller)


def _answer(body: Embedding, name: str, rows: np.ndarray, tokens: int) -> Response:
    if not np.isfinite(rows).all():
        raise FloatingPointError("embeddings were not finite")
    if body.dimensions is not None:
        rows = rows[:, : body.dimensions]
        # To length 1, whether the whole vectors have it or not, as OpenAI's.
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        rows = rows / np.maximum(norms, 1e-12)
    as_text = body.encoding_format == "base64"

    def vector(row: np.ndarray) -> str | list[float]:
        if as_text:
            return base64.b64encode(row.astype("<f4").tobytes()).decode()
        return row.tolist()

    content = {
        "object": "list",
        "model": name,
        "data": [
            {"object": "embedding", "index": i, "embedding": vector(row)}
            for i, row in enumerate(rows)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    # Ten times as fast as json, and no other thread runs meanwhile.
    return Response(to_json(content), media_type="application/json")


def _inputs(body: Embedding) -> list[Text]:
    """Texts, or the token ids of texts, which are taken as they are."""
    given = body.input
    if isinstance(given, str):
        return [given]
    ids = [token for token in given if isinstance(token, int)]
    # Of one kind, as the body was checked.
    return [ids] if ids else [text for text in given if not isinstance(text, int)]
