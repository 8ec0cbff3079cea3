"""The body of a completion request."""

from jaxscale.inference.server.schema.body import Items
from jaxscale.inference.server.schema.generation import GenerationBody


class Completion(GenerationBody):
    """The body of ``/v1/completions``."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    add_special_tokens: bool | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    suffix: str | None = None
