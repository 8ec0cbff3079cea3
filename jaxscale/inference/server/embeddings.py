"""``/v1/embeddings``: texts to vectors."""

import base64
from typing import Any

import numpy as np

from jaxscale.inference.encoder.encoder import Text
from jaxscale.inference.request import InvalidRequest
from jaxscale.inference.server.calls import Caller, prepared
from jaxscale.inference.server.schema.encoders import Embedding
from jaxscale.inference.server.served_encoder import ServedEncoder


async def embed(
    body: Embedding, model: ServedEncoder, caller: Caller
) -> dict[str, Any]:
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
    texts, most = _inputs(body), caller.config.max_inputs
    if not 1 <= len(texts) <= most:
        raise InvalidRequest(f"input has {len(texts)} texts, expected 1 to {most}")
    truncate = bool(body.truncate)
    kept, tokens = await prepared(caller, model.counted, texts, truncate, caller)
    rows = await model.compute("encode", kept, truncate, tokens, caller.metrics)
    if body.dimensions is not None:
        rows = rows[:, : body.dimensions]
        # Their lengths are those that the whole vectors had.
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        rows = rows / np.maximum(norms, 1e-12)
    as_text = body.encoding_format == "base64"

    def vector(row: np.ndarray) -> str | list[float]:
        if as_text:
            return base64.b64encode(row.astype("<f4").tobytes()).decode()
        return row.tolist()

    return {
        "object": "list",
        "model": model.name,
        "data": [
            {"object": "embedding", "index": i, "embedding": vector(row)}
            for i, row in enumerate(rows)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _inputs(body: Embedding) -> list[Text]:
    """Texts, or the token ids of texts, which are taken as they are."""
    given = body.input
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [[int(token) for token in given]]  # type: ignore[arg-type]
    return list(given)  # type: ignore[arg-type]
