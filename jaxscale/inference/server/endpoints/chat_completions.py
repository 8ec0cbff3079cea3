"""``/v1/chat/completions``: conversations to answers, and tool calls."""

import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from jaxscale.inference.output import Output
from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.calls import Caller, noted, prepared, rendered
from jaxscale.inference.server.endpoints.answers import AnswerParser, Reasoning, answer
from jaxscale.inference.server.endpoints.conversation import Conversation, prepare
from jaxscale.inference.server.generation import Usage, collect, merged
from jaxscale.inference.server.logprobs import chat_logprobs
from jaxscale.inference.server.schema.chat import Chat
from jaxscale.inference.server.stream import attended, event_stream, varied
from jaxscale.inference.tool_parser import CallDelta, ToolCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """A request, ready to be run."""

    body: Chat
    conversation: Conversation
    id: str = dataclasses.field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        """What all parts of the answer have."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.conversation.model.name,
        }

    def prompt_ids(self) -> dict[str, Any]:
        """The tokens of the prompt, where they are asked for."""
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.conversation.request.prompt)}

    def ids(self, output: Output) -> dict[str, Any]:
        """The tokens of an output, where they are asked for."""
        return {"token_ids": [*output.tokens]} if self.body.return_token_ids else {}


async def chat(
    body: Chat, model: TextModel, caller: Caller, receive: Receive
) -> Response:
    """Answer a request.

    Raises:
        ValueError: the request is invalid.
    """
    made = await attended(receive, prepared(caller, prepare, body, model, caller))
    call = _Call(body=body, conversation=made)
    if body.stream:
        response = await event_stream(_events(call, caller), caller.config)
        return noted(response, made.ignored, caller)
    run = collect(model.backend, [made.request], caller.metrics)
    (found,), usage = await attended(receive, run)
    choices = [_choice(call, index, whole) for index, whole in enumerate(found)]
    content = {
        **call.head("chat.completion"),
        "choices": choices,
        "usage": usage.body(),
        **call.prompt_ids(),
    }
    return noted(JSONResponse(content), made.ignored, caller)


async def render(
    body: Chat, model: TextModel, caller: Caller, receive: Receive
) -> Response:
    """The token ids of a conversation, which is not answered.

    Raises:
        ValueError: the request is invalid.
    """
    made = await attended(receive, prepared(caller, prepare, body, model, caller))
    return JSONResponse(rendered(made.request, model))


def _choice(call: _Call, index: int, whole: Output) -> dict[str, Any]:
    found = answer(call.conversation, whole)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if found.calls and not found.content.strip() else found.content,
        "refusal": None,
    }
    if found.reasoning:
        message["reasoning_content"] = found.reasoning
    if found.calls:
        message["tool_calls"] = [_tool_call(one) for one in found.calls]
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(call.conversation, whole.logprobs),
        "finish_reason": found.finish,
        **call.ids(whole),
    }


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


async def _events(
    call: _Call, caller: Caller
) -> AsyncGenerator[dict[str, Any] | bytes]:
    """The parts of a stream."""
    request, body = call.conversation.request, call.body
    usage = Usage.of([request])
    last = call.head("chat.completion.chunk")
    head = {**last, **({"usage": None} if body.wants_usage else {})}
    parts = [_Part(call, index) for index in range(request.params.n)]
    run = merged(call.conversation.model.backend, [request], caller.metrics)
    always, first = body.wants_usage_always, call.prompt_ids()
    with_choices = varied({**head, **first}, "choices")
    async with contextlib.aclosing(run) as outputs:
        async for number, output in outputs:
            usage.add(number, output)
            if always:
                head["usage"] = usage.body()
                with_choices = varied({**head, **first}, "choices")
            for choice in parts[output.index].choices(output):
                yield with_choices([choice])
                if first:
                    first, with_choices = {}, varied(head, "choices")
    if body.wants_usage:
        yield {**last, "choices": [], "usage": usage.body()}


class _Part:
    """One completion, as a stream sends it."""

    def __init__(self, call: _Call, index: int) -> None:
        self._call, self._index = call, index
        self._begun = False
        self._parser = AnswerParser(call.conversation)

    def choices(self, output: Output) -> list[dict[str, Any]]:
        """What is to be sent now."""
        deltas: list[dict[str, Any]] = []
        for part in self._parser.add(output):
            match part:
                case str():
                    deltas.append({"content": part})
                case Reasoning():
                    deltas.append({"reasoning_content": part.text})
                case CallDelta():
                    deltas.append({"tool_calls": [_delta(part)]})
        # What the tokens are like goes with the first of their parts.
        listed = chat_logprobs(self._call.conversation, output.logprobs)
        told = {"logprobs": listed if output.logprobs else None}
        told |= self._call.ids(output)
        if not deltas and output.tokens and any(told.values()):
            deltas.append({"content": ""})
        made = []
        if not self._begun:
            self._begun = True
            made.append(self._choice({"role": "assistant", "content": ""}))
        for delta in deltas:
            made.append(self._choice(delta, **told))
            told = {}
        if output.finish is not None:
            made.append(self._choice({}, finish_reason=self._parser.finish(output)))
        return made

    def _choice(self, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            **more,
        }


def _delta(part: CallDelta) -> dict[str, Any]:
    """Part of a tool call: its name first, then its arguments as they come."""
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {
        "index": part.index,
        "id": part.id,
        "type": "function",
        "function": function,
    }
