"""The body of ``/v1/responses``, and the conversation that it is."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import pydantic

from jaxscale.inference.request import InvalidRequest
from jaxscale.inference.server.schema.body import Body, Items, Part
from jaxscale.inference.server.schema.chat import Chat


_AS_THEY_ARE = (
    *("cache_salt", "chat_template_kwargs", "ignore_eos", "min_p", "min_tokens"),
    *("parallel_tool_calls", "priority", "repetition_penalty", "seed", "stop"),
    *("temperature", "timeout", "top_k", "top_p"),
)
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class TextFormat(Part):
    """What the text must be."""

    model_config = pydantic.ConfigDict(populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = pydantic.Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Part):
    """Options of the text."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat | None = None


class ReasoningOptions(Part):
    """Options of the reasoning."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"generate_summary", "summary"})

    effort: str | None = None
    """For the template, as ``reasoning_effort``."""


class NamedFunctionTool(Part):
    """The tool that the model must call."""

    type: Literal["function"]
    name: str


class Responses(Body):
    """The body of ``/v1/responses``."""

    TAKEN: ClassVar[frozenset[str]] = Body.TAKEN | {
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            *("background_options", "context_management", "include"),
            *("max_tool_calls", "prompt_cache_options", "stream_options"),
        }
    )

    input: str | Items[dict[str, Any]]
    background: Literal[False] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning: ReasoningOptions | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    """False: no later request may continue this one."""
    stream: bool | None = None
    temperature: float | None = None
    text: TextOptions | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    tools: Items[dict[str, Any]] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """``auto`` leaves out the beginning of a conversation that is too long."""
    # Not of OpenAI's API.
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    priority: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    timeout: float | None = None
    top_k: int | None = None

    @property
    def ignored(self) -> list[str]:
        """Names of the given parameters that are ignored."""
        parts = {"text": self.text, "reasoning": self.reasoning}
        inside = [
            f"{name}.{each}"
            for name, part in parts.items()
            if part is not None
            for each in part.ignored
        ]
        return [*super().ignored, *inside]

    def messages(self) -> list[dict[str, Any]]:
        """The messages that the request adds to a conversation.

        Raises:
            InvalidRequest: an item is none that is understood.
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return messages_of(self.input)

    def chat(self, before: Sequence[dict[str, Any]]) -> Chat:
        """The same request as a chat completion.

        Args:
            before: Messages of earlier requests.

        Raises:
            InvalidRequest: the request is invalid.
        """
        messages = [*before, *self.messages()]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        fields = {name: getattr(self, name) for name in _AS_THEY_ARE}
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunctionTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        form = None if self.text is None else self.text.format
        if form is not None:
            given = form.model_dump(by_alias=True, exclude_none=True)
            kind = given.pop("type")
            fields["response_format"] = {"type": kind}
            if kind == "json_schema":
                fields["response_format"]["json_schema"] = given
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.top_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        tools = [_tool(i, tool) for i, tool in enumerate(self.tools or ())]
        return Chat.model_validate(
            {
                "messages": messages,
                "tools": tools or None,
                "tool_choice": choice if tools else None,
                "max_completion_tokens": self.max_output_tokens,
                "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
                **fields,
            }
        )


def messages_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as messages; those of one turn of the assistant are one message.

    Raises:
        InvalidRequest: an item is none that is understood.
    """
    messages: list[dict[str, Any]] = []

    def turn() -> dict[str, Any]:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item.get("type", "message"):
            case "message" if isinstance(item.get("role"), str):
                text = _text(where, item.get("content"))
                if item["role"] == "assistant":
                    turn()["content"] += text
                else:
                    messages.append({"role": item["role"], "content": text})
            case "reasoning":
                parts = item.get("content") or item.get("summary") or []
                turn()["reasoning_content"] = _text(where, parts)
            case "function_call":
                function = {k: item.get(k) or "" for k in ("name", "arguments")}
                call = {"type": "function", "id": item.get("call_id")}
                calls = turn().setdefault("tool_calls", [])
                calls.append({**call, "function": function})
            case "function_call_output":
                output = _text(where, item.get("output"))
                message = {"role": "tool", "content": output}
                messages.append({**message, "tool_call_id": item.get("call_id")})
            case kind:
                raise InvalidRequest(
                    f"{where} is of type {kind!r}, expected a message with a role, "
                    "reasoning, function_call or function_call_output"
                )
    return messages


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type", "text") not in _TEXTS:
            raise InvalidRequest(f"{where} has a part that is no text; only text is")
        texts.append(text)
    return "".join(texts)


def _tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise InvalidRequest(
            f"tools[{index}] is of type {tool.get('type')!r}, expected a function with "
            "a name: there are no other tools here"
        )
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}
