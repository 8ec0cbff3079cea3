"""Bodies of chat requests."""

from typing import Any, ClassVar, Literal

import pydantic

from jaxscale.inference.server.schema.body import Body, Items, Part
from jaxscale.inference.server.schema.generation import GenerationBody


class Message(pydantic.BaseModel):
    """A message; what else it has is for the template."""

    model_config = pydantic.ConfigDict(extra="allow")

    role: str
    content: str | Items[dict[str, Any]] | None = None


class NamedFunction(Part):
    """The name of a function."""

    name: str


class NamedTool(Part):
    """The tool that the model must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class Chat(GenerationBody):
    """The body of ``/v1/chat/completions``."""

    IGNORED: ClassVar[frozenset[str]] = GenerationBody.IGNORED | {
        "function_call",
        "functions",
        "modalities",
        "prediction",
        "verbosity",
    }

    messages: Items[Message]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    tools: Items[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    """For the template, as ``chat_template_kwargs``; ignored by one that has no use
    for it."""
    top_logprobs: int | None = None
    include_reasoning: bool | None = None
    """False leaves the reasoning of the model out of the answer."""
    separate_reasoning: bool | None = None
    """False leaves the reasoning where it is, in the text."""
    stream_reasoning: bool | None = None
    """Ignored: reasoning is streamed like all else."""


class Tokenize(Body):
    """The body of ``/tokenize``: a prompt, or messages."""

    prompt: str | None = None
    messages: Items[Message] | None = None
    tools: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


class Detokenize(Body):
    """The body of ``/detokenize``."""

    tokens: Items[int]
