"""The body of a completion request."""

from jaxscale.inference.server.schema.generation import GenerationBody


class Completion(GenerationBody):
    """The body of ``/v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    add_special_tokens: bool | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    suffix: str | None = None
