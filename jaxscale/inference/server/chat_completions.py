"""``/v1/chat/completions``: conversations to answers, and calls of tools."""

import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from jaxscale.inference.chat import ChatTemplate
from jaxscale.inference.request import InvalidRequest, Output, Request, TokenLogprobs
from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.calls import Caller, check_choices, prepared, rendered
from jaxscale.inference.server.generation import Usage, collect, merged
from jaxscale.inference.server.schema import Chat, Message, NamedTool
from jaxscale.inference.server.stream import attended, event_stream
from jaxscale.inference.tools import (
    ToolCall,
    ToolFormat,
    ToolParser,
    forced_call,
    parse_calls,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """A call, ready to be run."""

    model: TextModel
    request: Request
    format: ToolFormat | None
    """How calls of tools are found in the text; None where there are none."""
    functions: frozenset[str]
    """Names that a call may have."""
    forced: bool
    """Whether the text is one call."""
    one_tool: bool
    """Whether only the first call counts."""
    id: str = dataclasses.field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        """What all parts of the answer have."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
        }


async def chat(
    body: Chat, model: TextModel, caller: Caller, receive: Receive
) -> Response:
    """Answer a call.

    Raises:
        ValueError: it asks for what there is not.
    """
    prepare = prepared(caller, _prepare, body, model, caller)
    call = await attended(receive, prepare)
    if body.stream:
        events = _events(call, caller, body.wants_usage)
        return await event_stream(events, caller.config)
    run = collect(model.backend, [call.request], caller.metrics)
    (found,), usage = await attended(receive, run)
    choices = [_choice(call, index, whole) for index, whole in enumerate(found)]
    head = call.head("chat.completion")
    return JSONResponse({**head, "choices": choices, "usage": usage.body()})


async def render(
    body: Chat, model: TextModel, caller: Caller, receive: Receive
) -> Response:
    """The token ids of a conversation, which is not answered.

    Raises:
        ValueError: it asks for what there is not.
    """
    prepare = prepared(caller, _prepare, body, model, caller)
    call = await attended(receive, prepare)
    return JSONResponse(rendered(call.request, model))


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


def _prepare(body: Chat, model: TextModel, caller: Caller) -> _Call:
    """Check and lay out; templates and large prompts take a while."""
    body.check_stream()
    lay = template(model)
    tools = body.tools or []
    choice = _tool_choice(body)
    forced = forced_call(tools, choice)
    guide = body.guide()
    if forced is not None and guide is not None:
        raise InvalidRequest(
            f"tool_choice {choice!r} asks for a call, and the call for a guided text; "
            "give one of them"
        )
    found: ToolFormat | None = None
    if tools and choice == "auto":
        found = lay.tool_format
        if found is None:
            raise InvalidRequest(
                "the chat template of the model shows no format of calls, so those in "
                "its answers cannot be found; set tool_choice to required or to a "
                "function, which works with any model"
            )
    params = body.sampling_params(
        max_tokens=_max_tokens(body), logprobs=_logprobs(body), guided=forced or guide
    )
    check_choices(1, params.n, caller.config)
    prompt = lay.encode(
        dumped(body.messages),
        tools=tools,
        tool_choice=choice,
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=body.chat_template_kwargs,
        check=model.bound(caller.gone).check,
    )
    return _Call(
        model=model,
        request=caller.request(body, prompt, params, model),
        format="llama" if forced is not None else found,
        functions=frozenset(tool["function"]["name"] for tool in tools),
        forced=forced is not None,
        one_tool=body.parallel_tool_calls is False,
    )


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


def _choice(call: _Call, index: int, whole: Output) -> dict[str, Any]:
    text, calls = whole.text, []
    if call.format is not None:
        text, calls = parse_calls(
            text, call.format, names=call.functions, forced=call.forced
        )
        calls = calls[:1] if call.one_tool else calls
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not text.strip() else text,
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = [_tool_call(one) for one in calls]
    return {
        "index": index,
        "message": message,
        "logprobs": _listed(call, whole.logprobs),
        "finish_reason": _finish(whole.finish, bool(calls)),
    }


def _finish(finish: str | None, called: bool) -> str | None:
    return "tool_calls" if finish == "stop" and called else finish


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _listed(
    call: _Call, items: Sequence[TokenLogprobs]
) -> Mapping[str, list[dict[str, Any]]] | None:
    """Tokens with their log-probabilities, as conversations list them."""
    if call.request.params.logprobs is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = call.model.token_text(token)
        # Where a token is part of a character its bytes are not known.
        known = "\N{REPLACEMENT CHARACTER}" not in text
        return {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode()) if known else None,
        }

    return {
        "content": [
            {
                **entry(item.token, item.logprob),
                "top_logprobs": [entry(token, value) for token, value in item.top],
            }
            for item in items
        ]
    }


async def _events(
    call: _Call, caller: Caller, wants_usage: bool
) -> AsyncGenerator[dict[str, Any]]:
    """The parts of a stream."""
    usage = Usage.of([call.request])
    last = call.head("chat.completion.chunk")
    head = {**last, **({"usage": None} if wants_usage else {})}
    parts = [_Part(call, index) for index in range(call.request.params.n)]
    run = merged(call.model.backend, [call.request], caller.metrics)
    async with contextlib.aclosing(run) as outputs:
        async for number, output in outputs:
            usage.add(number, output)
            for choice in parts[output.index].choices(output):
                yield {**head, "choices": [choice]}
    if wants_usage:
        yield {**last, "choices": [], "usage": usage.body()}


class _Part:
    """One continuation, as a stream sends it."""

    def __init__(self, call: _Call, index: int) -> None:
        self._call, self._index = call, index
        self._begun = False
        self._num_calls = 0
        self._parser = None
        if call.format is not None:
            self._parser = ToolParser(
                call.format, names=call.functions, forced=call.forced
            )

    def choices(self, output: Output) -> list[dict[str, Any]]:
        """What is to be sent now."""
        made = []
        if not self._begun:
            self._begun = True
            made.append(self._choice({"role": "assistant", "content": ""}))
        text, calls = self._parsed(output)
        if text or output.logprobs:
            listed = _listed(self._call, output.logprobs)
            made.append(self._choice({"content": text}, logprobs=listed))
        for one in calls:
            delta = {"index": self._num_calls, **_tool_call(one)}
            self._num_calls += 1
            made.append(self._choice({"tool_calls": [delta]}))
        if output.finish is not None:
            reason = _finish(output.finish, self._num_calls > 0)
            made.append(self._choice({}, finish_reason=reason))
        return made

    def _parsed(self, output: Output) -> tuple[str, list[ToolCall]]:
        if self._parser is None:
            return output.text, []
        text, calls = self._parser.add(output.text)
        if output.finish is not None:
            rest, more = self._parser.flush()
            text, calls = text + rest, calls + more
        if self._call.one_tool:
            calls = calls[: 1 - self._num_calls]
        return text, calls

    def _choice(self, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            **more,
        }
