"""Bodies of calls, in the form of OpenAI's API and with vLLM's names for what it lacks.

A field that is unknown is an error, as it is there: a misspelled one would otherwise be
ignored without a word. Null means that a field is left out.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

import pydantic

from jaxscale.inference.request import Guide, SamplingParams


class Body(pydantic.BaseModel):
    """The body of a call."""

    model_config = pydantic.ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    model: str | None = None
    """Name of the model, if it is given that which is served."""
    user: str | None = None
    """Means nothing here."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def check_text(cls, body: Any) -> Any:
        """Refuse halves of surrogate pairs, which JSON can write and no text has."""
        if not isinstance(body, dict):
            return body
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a string holds half of a surrogate pair") from error
        return body


class StreamOptions(pydantic.BaseModel):
    """Of a call whose answer is streamed."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    """Say at the end how many tokens there were."""
    include_obfuscation: bool | None = None
    """Means nothing here."""


class JsonSchema(pydantic.BaseModel):
    """The schema of a ``response_format``."""

    model_config = pydantic.ConfigDict(
        extra="forbid", strict=True, populate_by_name=True
    )

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = pydantic.Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(pydantic.BaseModel):
    """What the text must be."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationBody(Body):
    """What completions and conversations have in common."""

    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    n: int | None = None
    presence_penalty: float | None = None
    prompt_cache_key: str | None = None
    response_format: ResponseFormat | None = None
    safety_identifier: str | None = None
    seed: int | None = None
    service_tier: str | None = None
    stop: str | list[str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Not of OpenAI's API.
    cache_salt: str | None = None
    guided_choice: list[str] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    priority: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: list[int] | None = None
    timeout: float | None = None
    top_k: int | None = None
    # What vllm-router adds to every call.
    no_stop_trim: Literal[False] | None = None
    return_hidden_states: Literal[False] | None = None

    def guide(self) -> Guide | None:
        """The constraint on the text.

        Raises:
            ValueError: there are several.
        """
        found = []
        form = self.response_format
        if form is not None and form.type == "json_object":
            found.append(Guide(kind="json_object"))
        if form is not None and form.type == "json_schema":
            if form.json_schema is None:
                raise ValueError("response_format json_schema lacks its json_schema")
            text = json.dumps(form.json_schema.schema_)
            found.append(Guide(kind="json_schema", text=text))
        if self.guided_json is not None:
            schema = self.guided_json
            text = schema if isinstance(schema, str) else json.dumps(schema)
            found.append(Guide(kind="json_schema", text=text))
        if self.guided_regex is not None:
            found.append(Guide(kind="regex", text=self.guided_regex))
        if self.guided_choice is not None:
            found.append(Guide(kind="choice", choices=self.guided_choice))
        if len(found) > 1:
            raise ValueError(
                "response_format, guided_json, guided_regex and guided_choice exclude "
                "each other; give one"
            )
        return found[0] if found else None

    def sampling_params(self, **more: Any) -> SamplingParams:
        """The settings of the continuations, with those that the call decides."""
        named = {
            "temperature": self.temperature,
            "top_k": None if self.top_k == -1 else self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": _biases(self.logit_bias),
            "seed": self.seed,
            "n": self.n,
            "min_tokens": self.min_tokens,
            "stop": self.stop,
            "include_stop": self.include_stop_str_in_output,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            **more,
        }
        return SamplingParams(**{k: v for k, v in named.items() if v is not None})

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_stream(self) -> None:
        """Raise where there are options of a stream, but none."""
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream true; leave them out")


def _biases(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(f"logit_bias holds {key!r:.40}, which is no token id")
    return {int(key): bias for key, bias in given.items()}


class Completion(GenerationBody):
    """The body of ``/v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    add_special_tokens: bool | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    suffix: str | None = None


class Message(pydantic.BaseModel):
    """A message; what else it has is for the template."""

    model_config = pydantic.ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


class NamedFunction(pydantic.BaseModel):
    """The name of a function."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    name: str


class NamedTool(pydantic.BaseModel):
    """The tool that the model must call."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    type: Literal["function"] = "function"
    function: NamedFunction


class Chat(GenerationBody):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int | None = None
    # What vllm-router adds; the reasoning of a model is part of its text here.
    continue_final_message: Literal[False] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None


class Tokenize(Body):
    """The body of ``/tokenize``: a prompt, or messages."""

    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Literal[False] | None = None


class Detokenize(Body):
    """The body of ``/detokenize``."""

    tokens: list[int]


class Embedding(Body):
    """The body of ``/v1/embeddings``."""

    input: str | list[str] | list[int] | list[list[int]]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate: bool | None = None


class Score(Body):
    """The body of ``/v1/score``."""

    text_1: str | list[str]
    text_2: str | list[str]
    truncate: bool | None = None
