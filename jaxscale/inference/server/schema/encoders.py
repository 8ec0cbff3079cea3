"""Bodies of requests to encoders."""

from typing import Any, Literal

from jaxscale.inference.server.schema.body import Body, Items


class Embedding(Body):
    """The body of ``/v1/embeddings``."""

    input: str | Items[str] | Items[int] | Items[Items[int]]
    dimensions: int | None = None
    """Numbers of each vector that are kept, the first ones; it is normalized again."""
    encoding_format: Literal["float", "base64"] | None = None
    truncate: bool | None = None


class Score(Body):
    """The body of ``/v1/score``."""

    text_1: str | Items[str]
    text_2: str | Items[str]
    truncate: bool | None = None


class Rerank(Body):
    """The body of ``/v1/rerank``, as Jina and Cohere have it."""

    query: str
    documents: Items[str | dict[str, Any]]
    top_n: int | None = None
    """Most documents of the answer, the best first; None is all."""
    return_documents: bool | None = None
    truncate: bool | None = None
