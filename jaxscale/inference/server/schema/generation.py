"""What completions and chat completions have in common."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic

from jaxscale.inference.request import Guide, SamplingParams
from jaxscale.inference.schemas import lenient
from jaxscale.inference.server.schema.body import Body, Items, Part
from jaxscale.models.tokenizer import Tokenizer


class StreamOptions(Part):
    """Of a call whose answer is streamed."""

    include_usage: bool | None = None
    """Send the token usage at the end."""
    continuous_usage_stats: bool | None = None
    """Send it in each chunk too, of the tokens so far."""
    include_obfuscation: bool | None = None
    """Ignored."""


class JsonSchema(Part):
    """The schema of a ``response_format``."""

    model_config = pydantic.ConfigDict(populate_by_name=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = pydantic.Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Part):
    """What the text must be, as vLLM writes it."""

    model_config = pydantic.ConfigDict(populate_by_name=True)

    json_: dict[str, Any] | str | None = pydantic.Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    """JSON without spaces and line breaks between its parts."""


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    TAKEN: ClassVar[frozenset[str]] = Body.TAKEN | {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset({"prompt_cache_options"})

    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    n: int | None = None
    presence_penalty: float | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    response_format: ResponseFormat | None = None
    safety_identifier: str | None = None
    seed: int | None = None
    service_tier: str | None = None
    stop: str | Items[str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Not of OpenAI's API.
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    cache_salt: str | None = None
    guided_choice: Items[str] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    priority: int | None = None
    repetition_penalty: float | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: Items[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    timeout: float | None = None
    top_k: int | None = None
    truncate_prompt_tokens: int | None = None
    """Last tokens of the prompt that are kept; -1 keeps what there is room for."""
    # What vllm-router adds to every call.
    no_stop_trim: Literal[False] | None = None
    return_hidden_states: Literal[False] | None = None

    def guide(self, *, strict: bool = False) -> Guide | None:
        """The constraint on the text; what it does not enforce counts as ignored.

        Args:
            strict: Leave schemas as they are, so that those are refused of which
                something cannot be enforced.

        Raises:
            ValueError: there are several.
        """
        given = self.structured_outputs or StructuredOutputs.model_validate({})
        found: list[tuple[Any, ...]] = []
        form = self.response_format
        if form is not None and form.type == "json_schema":
            if form.json_schema is None:
                raise ValueError("response_format json_schema lacks its json_schema")
            found.append(("json_schema", form.json_schema.schema_))
        if given.json_object or (form is not None and form.type == "json_object"):
            found.append(("json_object",))
        for kind, values in (
            ("json_schema", (self.guided_json, given.json_)),
            ("regex", (self.guided_regex, given.regex)),
            ("choice", (self.guided_choice, given.choice)),
        ):
            found += [(kind, value) for value in values if value is not None]
        if len(found) > 1:
            raise ValueError(
                "response_format, structured_outputs, guided_json, guided_regex and "
                "guided_choice exclude each other; give one"
            )
        if not found:
            return None
        compact = bool(given.disable_any_whitespace)
        match found[0]:
            case ("json_schema", schema):
                text = self._schema_text(schema, strict)
                return Guide(kind="json_schema", text=text, compact=compact)
            case ("choice", choices):
                return Guide(kind="choice", choices=choices)
            case ("regex", pattern):
                return Guide(kind="regex", text=pattern)
        return Guide(kind="json_object", compact=compact)

    def _schema_text(self, schema: Any, strict: bool) -> str:
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                return schema  # the grammar says what is wrong with it
        if not strict:
            schema, ignored = lenient(schema)
            self._ignored += ignored
        return json.dumps(schema)

    def sampling_params(
        self, defaults: Mapping[str, Any], tokenizer: Tokenizer, **more: Any
    ) -> SamplingParams:
        """The sampling parameters of the completions."""
        # As other servers take them: nothing but the likeliest, and all tokens.
        greedy = self.top_p == 0
        named = {
            "temperature": 0.0 if greedy else self.temperature,
            "top_k": self.top_k,
            "top_p": 1.0 if greedy else self.top_p,
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
            "allowed_token_ids": self.allowed_token_ids,
            "bad_token_ids": _bad_tokens(self.bad_words, tokenizer),
            **more,
        }
        given = {k: v for k, v in named.items() if v is not None}
        given = {**defaults, **given}
        if given.get("top_k") in (0, -1):
            del given["top_k"]
        return SamplingParams(**given)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """Whether all parts of a stream have them."""
        options = self.stream_options
        return self.wants_usage and bool(options and options.continuous_usage_stats)

    def check_stream(self) -> None:
        """Raise where there are options of a stream, but none."""
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream true; leave them out")

    def kept_tokens(self, room: int, max_tokens: int | None) -> int | None:
        """Last tokens of the prompt that are kept, None for all.

        Raises:
            ValueError: it is no number of tokens.
        """
        most = self.truncate_prompt_tokens
        if most is not None and most != -1 and most < 1:
            raise ValueError(
                f"truncate_prompt_tokens {most} must be at least 1, or -1 for as many "
                "as there is room for"
            )
        return max(1, room - (max_tokens or 1)) if most == -1 else most


def _biases(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(f"logit_bias holds {key!r:.40}, which is no token id")
    return {int(key): bias for key, bias in given.items()}


def _bad_tokens(
    words: list[str] | None, tokenizer: Tokenizer
) -> list[tuple[int, ...]] | None:
    """The tokens of words, at the beginning of a text and behind a space."""
    if words is None:
        return None
    if not all(words):
        raise ValueError("bad_words holds an empty one; leave it out")
    both = [form for word in words for form in (word, f" {word.lstrip()}")]
    return list(dict.fromkeys(tuple(tokenizer.encode(form)) for form in both))
