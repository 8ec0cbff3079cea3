"""``/v1/score`` and ``/v1/rerank``: how well texts go together."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from jaxscale.inference.request import InvalidRequest
from jaxscale.inference.server.calls import Caller, prepared
from jaxscale.inference.server.schema.encoders import Rerank, Score
from jaxscale.inference.server.served_encoder import ServedEncoder
from jaxscale.inference.server.stream import attended


async def score(
    body: Score, model: ServedEncoder, caller: Caller, receive: Receive
) -> Response:
    """Answer ``/v1/score``.

    Raises:
        InvalidRequest: the texts do not make pairs.
    """
    first, second = (
        [texts] if isinstance(texts, str) else texts
        for texts in (body.text_1, body.text_2)
    )
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidRequest(
            f"text_1 has {len(first)} texts and text_2 {len(second)}; give one to "
            "compare with all, or as many"
        )
    _check_number("text_2", second, caller)
    run = _scores(first, second, model, caller, bool(body.truncate))
    scores, tokens = await attended(receive, run)
    content = {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
        "data": [
            {"object": "score", "index": i, "score": float(value)}
            for i, value in enumerate(scores)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return JSONResponse(content)


async def rerank(
    body: Rerank, model: ServedEncoder, caller: Caller, receive: Receive
) -> Response:
    """Answer ``/v1/rerank``: the documents that go best with a query, the best first.

    Raises:
        InvalidRequest: there are none, or one has no text.
    """
    if body.top_n is not None and body.top_n < 1:
        raise InvalidRequest(f"top_n {body.top_n} must be at least 1")
    _check_number("documents", body.documents, caller)
    texts = [_text(i, document) for i, document in enumerate(body.documents)]
    queries = [body.query] * len(texts)
    run = _scores(queries, texts, model, caller, bool(body.truncate))
    scores, tokens = await attended(receive, run)
    best = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
    shown = body.return_documents is not False
    content = {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": model.name,
        "results": [
            {
                "index": i,
                "relevance_score": float(scores[i]),
                **({"document": {"text": texts[i]}} if shown else {}),
            }
            for i in best
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return JSONResponse(content)


async def _scores(
    first: Sequence[str],
    second: Sequence[str],
    model: ServedEncoder,
    caller: Caller,
    truncate: bool,
) -> tuple[np.ndarray, int]:
    """A score of each pair, and the tokens that were read.

    A model whose head gives one number scores each pair, between 0 and 1; of any other
    it is the cosine of the embeddings.
    """
    if model.scores_pairs:
        pairs = list(zip(first, second, strict=True))
        kept, tokens = await prepared(caller, model.counted, pairs, truncate, caller)
        logits = await model.compute("predict", kept, caller)
        return 1 / (1 + np.exp(-logits[:, 0].astype(np.float64))), tokens
    places: dict[str, int] = {}  # what comes several times is read once
    for text in (*first, *second):
        places.setdefault(text, len(places))
    kept, tokens = await prepared(caller, model.counted, [*places], truncate, caller)
    rows = await model.compute("encode", kept, caller)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    left, right = (rows[[places[text] for text in texts]] for texts in (first, second))
    return (left * right).sum(axis=1), tokens


def _text(index: int, document: str | dict[str, Any]) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(
            f"documents[{index}] must be a text, or an object with a text"
        )
    return text


def _check_number(name: str, texts: Sequence[Any], caller: Caller) -> None:
    most = caller.config.max_prompts
    if not 1 <= len(texts) <= most:
        raise InvalidRequest(f"{name} has {len(texts)} texts, expected 1 to {most}")
