"""``/v1/messages``: conversations in the format of Anthropic's API."""

import contextlib
import json
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from jaxscale.inference.output import Output
from jaxscale.inference.request import InvalidRequest
from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.calls import Caller, noted, prepared
from jaxscale.inference.server.endpoints.answers import (
    AnswerParser,
    Block,
    BlockEvent,
    Blocks,
)
from jaxscale.inference.server.endpoints.conversation import Conversation, prepare
from jaxscale.inference.server.generation import Usage, collect, merged
from jaxscale.inference.server.schema.messages import Messages
from jaxscale.inference.server.stream import attended, event_stream


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


async def answer_messages(
    body: Messages, model: TextModel, caller: Caller, receive: Receive
) -> Response:
    """Answer a request.

    Raises:
        ValueError: the request is invalid.
    """
    if body.max_tokens is None:
        raise InvalidRequest("max_tokens: Field required")
    conversation = await attended(receive, _prepared(body, model, caller))
    made = _Made(conversation)
    ignored = [*body.ignored, *conversation.ignored]
    if body.stream:
        response = await event_stream(_events(made, caller), caller.config, named=True)
        return noted(response, ignored, caller)
    run = collect(model.backend, [conversation.request], caller.metrics)
    (((whole,),), made.usage) = await attended(receive, run)
    made.add(whole)
    return noted(JSONResponse(made.message()), ignored, caller)


async def count_tokens(
    body: Messages, model: TextModel, caller: Caller, receive: Receive
) -> Response:
    """The tokens of a conversation, which is not answered.

    Raises:
        ValueError: the request is invalid.
    """
    conversation = await attended(receive, _prepared(body, model, caller))
    return JSONResponse({"input_tokens": len(conversation.request.prompt)})


async def _prepared(body: Messages, model: TextModel, caller: Caller) -> Conversation:
    chat = await prepared(caller, body.chat)
    return await prepared(caller, prepare, chat, model, caller)


class _Made:
    """An answer as far as it has come."""

    def __init__(self, conversation: Conversation) -> None:
        self.id, self.conversation = f"msg_{uuid.uuid4().hex}", conversation
        self.usage = Usage.of([conversation.request])
        self._parser, self._blocks = AnswerParser(conversation), Blocks()
        self._last: Output | None = None

    def add(self, output: Output) -> list[BlockEvent]:
        """What an output brings."""
        self._last = output
        events = self._blocks.add(self._parser.add(output))
        return events + (self._blocks.close() if output.finish else [])

    def end(self) -> dict[str, Any]:
        """The reason for the end."""
        last = self._last
        if last is None or last.finish is None:
            return {"stop_reason": None, "stop_sequence": None}
        sequence = last.stop if isinstance(last.stop, str) else None
        reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(
            str(self._parser.finish(last)), "end_turn"
        )
        if reason == "end_turn" and sequence is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def counts(self) -> dict[str, Any]:
        """Numbers of tokens."""
        counts = self.usage.body()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
        }

    def message(self) -> dict[str, Any]:
        """The whole, as JSON."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.conversation.model.name,
            "content": [_block(block) for block in self._blocks.all],
            **self.end(),
            "usage": self.counts(),
        }


def _block(block: Block, *, empty: bool = False) -> dict[str, Any]:
    text = "" if empty else block.text
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "text":
            return {"type": "text", "text": text}
    given = {} if empty else _input(block.text)
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}


def _input(text: str) -> dict[str, Any]:
    """The arguments of a tool call; those that are no object stay as text."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return {"arguments": text}
    return found if isinstance(found, dict) else {"arguments": text}


async def _events(made: _Made, caller: Caller) -> AsyncGenerator[dict[str, Any]]:
    """The events of a stream."""
    request, begun = made.conversation.request, False
    backend = made.conversation.model.backend
    run = merged(backend, [request], caller.metrics)
    async with contextlib.aclosing(run) as outputs:
        async for number, output in outputs:
            made.usage.add(number, output)
            if not begun:
                begun = True
                yield {"type": "message_start", "message": made.message()}
            for event in made.add(output):
                yield _told(event)
    counts = made.counts()
    yield {"type": "message_delta", "delta": made.end(), "usage": counts}
    yield {"type": "message_stop"}


def _told(event: BlockEvent) -> dict[str, Any]:
    happens, block, text = event
    if happens == "open":
        begun = {"content_block": _block(block, empty=True)}
        return {"type": "content_block_start", "index": block.index, **begun}
    if happens == "close":
        return {"type": "content_block_stop", "index": block.index}
    kind, key = _DELTAS[block.kind]
    delta = {"type": kind, key: text}
    return {"type": "content_block_delta", "index": block.index, "delta": delta}
