"""Conversations as requests to the engine: the part that all chat routes share."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.inference.chat import ChatTemplate
from jaxscale.inference.reasoning import ReasoningFormat
from jaxscale.inference.request import InvalidRequest, Request
from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.calls import Caller, check_choices
from jaxscale.inference.server.schema.chat import Chat, Message, NamedTool
from jaxscale.inference.tools import ToolFormat, forced_call


# Names in texts that mean something, and are left out where they are control tokens.
_TAGS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "llama": (),
    None: (),
}
_THINK = ("<think>", "</think>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation, ready to be answered."""

    model: TextModel
    request: Request
    format: ToolFormat | None
    """Format of tool calls in the text; None where there are none."""
    reasoning: ReasoningFormat | None
    """Format of the reasoning in it; None where it is not parsed."""
    schemas: Mapping[str, Any]
    """JSON schemas of the arguments of tool calls, by the name of the function."""
    forced: bool
    """Whether the text is one tool call."""
    one_tool: bool
    """Whether only the first tool call counts."""
    hides_reasoning: bool
    """Whether the reasoning is left out of the answer."""
    prompt_end: str
    """Text of the last tokens of the prompt, or of the message that goes on."""
    ignored: Sequence[str]
    """What was requested and is ignored."""


def template(model: TextModel) -> ChatTemplate:
    """The chat template of a model.

    Raises:
        InvalidRequest: it has none.
    """
    if model.chat is None:
        raise InvalidRequest(
            f"the model {model.name!r} has no chat template; send prompts to "
            "/v1/completions, or start the server with --chat-template"
        )
    return model.chat


def dumped(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the template takes them."""
    return [message.model_dump(exclude_unset=True) for message in messages]


def prepare(body: Chat, model: TextModel, caller: Caller) -> Conversation:
    """Check and render; templates and large prompts take a while.

    Raises:
        ValueError: the request is invalid.
    """
    body.check_stream()
    template(model)  # where there is none, nothing else matters
    tools = body.tools or []
    choice = _tool_choice(body)
    forced, unenforced = forced_call(tools, choice)
    guide = body.guide(strict=caller.config.strict_schemas)
    if forced is not None and guide is not None:
        raise InvalidRequest(
            f"tool_choice {choice!r} asks for a call, and the call for a guided text; "
            "give one of them"
        )
    if forced is not None and unenforced and caller.config.strict_schemas:
        raise InvalidRequest(
            f"tools have {', '.join(unenforced)}, which cannot be enforced; leave it "
            "out"
        )
    found = _tool_format(model) if tools and choice == "auto" else None
    # A guided text is an answer from its first token on.
    thinks = forced is None and guide is None and body.separate_reasoning is not False
    reasoning = model.reasoning_format if thinks else None
    tags = _TAGS[found] + (_THINK if reasoning else ())
    shown = any(tag in model.tokenizer.control_tokens for tag in tags) or None
    params = body.sampling_params(
        model.defaults,
        model.tokenizer,
        max_tokens=_max_tokens(body),
        logprobs=_logprobs(body),
        guided=forced or guide,
        **({"skip_special_tokens": False} if shown else {}),
    )
    check_choices(1, params.n, caller.config)
    prompt, end = _laid_out(body, model, caller, tools, choice, params.max_tokens)
    return Conversation(
        model=model,
        request=caller.request(body, prompt, params, model),
        format="llama" if forced is not None else found,
        reasoning=reasoning,
        schemas={t["function"]["name"]: t["function"].get("parameters") for t in tools},
        forced=forced is not None,
        one_tool=body.parallel_tool_calls is False,
        hides_reasoning=body.include_reasoning is False,
        prompt_end=end,
        ignored=[*body.ignored, *unenforced, *_not_asked_for(body, model)],
    )


def _laid_out(
    body: Chat,
    model: TextModel,
    caller: Caller,
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    max_tokens: int | None,
) -> tuple[list[int], str]:
    """The prompt, and the text of its end."""
    messages = dumped(body.messages)
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other; give "
            "one"
        )
    room = model.backend.config.longest
    kept = body.kept_tokens(room, max_tokens)
    bound = model.bound(caller.gone)
    prompt = template(model).encode(
        messages,
        tools=tools,
        tool_choice=choice,
        add_generation_prompt=body.add_generation_prompt is not False and not goes_on,
        continue_final_message=goes_on,
        variables=_variables(body),
        check=bound.check if kept is None else bound.check_characters,
    )
    if kept is not None:
        prompt = prompt[-kept:]
    if goes_on:
        end = messages[-1].get("content") or ""
        return prompt, end if isinstance(end, str) else ""
    return prompt, model.prompt_end(prompt)


def _variables(body: Chat) -> dict[str, Any]:
    """What the template may ask for besides the conversation."""
    effort = body.reasoning_effort
    given = {} if effort is None else {"reasoning_effort": effort}
    return {**given, **(body.chat_template_kwargs or {})}


def _not_asked_for(body: Chat, model: TextModel) -> list[str]:
    """Parameters for the template that it has no use for."""
    name = "reasoning_effort"
    return (
        [] if body.reasoning_effort is None or template(model).knows(name) else [name]
    )


def _tool_format(model: TextModel) -> ToolFormat:
    if model.tool_format is None:
        raise InvalidRequest(
            "the chat template of the model shows no format of calls, so those in its "
            "answers cannot be found; start the server with --tool-format, or set "
            "tool_choice to required or to a function, which works with any model"
        )
    return model.tool_format


def _tool_choice(body: Chat) -> str:
    if isinstance(body.tool_choice, NamedTool):
        return body.tool_choice.function.name
    if body.tool_choice is None:
        return "auto" if body.tools else "none"
    if body.tool_choice != "none" and not body.tools:
        raise InvalidRequest(
            f"tool_choice {body.tool_choice!r} needs tools; give some, or leave it out"
        )
    return body.tool_choice


def _max_tokens(body: Chat) -> int | None:
    both = (body.max_completion_tokens, body.max_tokens)
    if None not in both and both[0] != both[1]:
        raise InvalidRequest(
            f"max_completion_tokens {both[0]} and max_tokens {both[1]} differ; give one"
        )
    return both[1] if both[0] is None else both[0]


def _logprobs(body: Chat) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs need logprobs true")
    return (body.top_logprobs or 0) if body.logprobs else None
