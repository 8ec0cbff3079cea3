"""``/v1/responses``: conversations to items, at once or as events."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from jaxscale.inference.output import Output
from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.calls import Caller, noted, prepared
from jaxscale.inference.server.endpoints.answers import (
    AnswerParser,
    Block,
    BlockEvent,
    Blocks,
)
from jaxscale.inference.server.endpoints.conversation import Conversation, prepare
from jaxscale.inference.server.endpoints.response_store import ResponseStore
from jaxscale.inference.server.errors import ApiError
from jaxscale.inference.server.generation import Usage, collect, merged
from jaxscale.inference.server.logprobs import chat_logprobs
from jaxscale.inference.server.schema.responses import Responses, messages_of
from jaxscale.inference.server.stream import attended, event_stream


_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_PARTS = {"reasoning": "reasoning_text", "text": "output_text"}


async def respond(
    body: Responses,
    model: TextModel,
    caller: Caller,
    receive: Receive,
    store: ResponseStore,
) -> Response:
    """Answer a request.

    Raises:
        ValueError: the request is invalid.
    """
    before = _before(body, caller, store)
    chat = await attended(receive, prepared(caller, body.chat, before))
    conversation = await attended(
        receive, prepared(caller, prepare, chat, model, caller)
    )
    made = _Made(body, conversation)
    ignored = [*body.ignored, *conversation.ignored]

    def keep() -> None:
        if body.store is not False:
            messages = [*before, *body.messages(), *messages_of(made.items())]
            store.put(made.id, caller.name, messages)

    if body.stream:
        response = await event_stream(
            _events(made, caller, keep), caller.config, named=True
        )
        return noted(response, ignored, caller)
    run = collect(model.backend, [conversation.request], caller.metrics)
    (((whole,),), made.usage) = await attended(receive, run)
    made.add(whole)
    keep()
    return noted(JSONResponse(made.response()), ignored, caller)


def _before(
    body: Responses, caller: Caller, store: ResponseStore
) -> list[dict[str, Any]]:
    """The conversation that the request continues."""
    if body.previous_response_id is None:
        return []
    found = store.get(body.previous_response_id, caller.name)
    if found is None:
        raise ApiError(
            404,
            f"previous_response_id {body.previous_response_id!r:.100} is not kept: "
            "this server keeps the last responses in memory, as long as there is room; "
            "send the whole conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


class _Made:
    """A response as far as it has come."""

    def __init__(self, body: Responses, conversation: Conversation) -> None:
        self.id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self.body, self.conversation = body, conversation
        self.usage = Usage.of([conversation.request])
        self._parser, self._blocks = AnswerParser(conversation), Blocks()
        self._ids: dict[int, str] = {}
        self._logprobs: list[Any] = []
        self._finish: str | None = None

    def add(self, output: Output) -> list[BlockEvent]:
        """What an output brings."""
        self._finish = output.finish
        listed = chat_logprobs(self.conversation, output.logprobs)
        self._logprobs += listed["content"] if listed else []
        events = self._blocks.add(self._parser.add(output))
        return events + (self._blocks.close() if output.finish else [])

    def item(self, block: Block, status: str) -> dict[str, Any]:
        """A block as an item."""
        name = f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}"
        head = {"id": self._ids.setdefault(block.index, name), "status": status}
        begun = status == "in_progress"
        parts = [] if begun else [self.part(block)]
        match block.kind:
            case "reasoning":
                return {**head, "type": "reasoning", "summary": [], "content": parts}
            case "text":
                role = {"type": "message", "role": "assistant"}
                return {**head, **role, "content": parts}
        call = {"call_id": block.id, "name": block.name}
        arguments = "" if begun else block.text
        return {**head, "type": "function_call", **call, "arguments": arguments}

    def part(self, block: Block, *, empty: bool = False) -> dict[str, Any]:
        """The content of an item."""
        text = "" if empty else block.text
        made: dict[str, Any] = {"type": _PARTS.get(block.kind), "text": text}
        if block.kind == "text":
            made |= {"annotations": [], "logprobs": [] if empty else self._logprobs}
        return made

    def items(self) -> list[dict[str, Any]]:
        """All items that have begun."""
        ended = "completed" if self._finish == "stop" else "incomplete"
        last = len(self._blocks.all) - 1
        return [
            self.item(block, ended if block.index == last else "completed")
            for block in self._blocks.all
        ]

    def response(self) -> dict[str, Any]:
        """The whole, as JSON."""
        body, params = self.body, self.conversation.request.params
        status, details = "in_progress", None
        if self._finish is not None:
            status = "completed" if self._finish == "stop" else "incomplete"
        if status == "incomplete":
            details = {"reason": "max_output_tokens"}
        form = None if body.text is None else body.text.format
        shown = {"type": "text"}
        if form is not None:
            shown = form.model_dump(by_alias=True, exclude_none=True)
        choice = body.tool_choice or "auto"
        effort = None if body.reasoning is None else body.reasoning.effort
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.conversation.model.name,
            "output": [] if self._finish is None else self.items(),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": shown},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None if self._finish is None else self._usage(),
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        counts = self.usage.body()
        thoughts = "".join(b.text for b in self._blocks.all if b.kind == "reasoning")
        thought = len(self.conversation.model.tokenizer.encode(thoughts))
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": counts["total_tokens"],
        }


async def _events(
    made: _Made, caller: Caller, keep: Any
) -> AsyncGenerator[dict[str, Any]]:
    """The events of a stream, numbered."""
    request, count = made.conversation.request, 0
    backend = made.conversation.model.backend
    run = merged(backend, [request], caller.metrics)

    def numbered(kind: str, **more: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        return {"type": kind, "sequence_number": count - 1, **more}

    async with contextlib.aclosing(run) as outputs:
        async for number, output in outputs:
            if not count:
                yield numbered("response.created", response=made.response())
                yield numbered("response.in_progress", response=made.response())
            made.usage.add(number, output)
            for event in made.add(output):
                for kind, more in _told(made, event):
                    yield numbered(kind, **more)
    keep()
    whole = made.response()
    yield numbered(f"response.{whole['status']}", response=whole)


def _told(made: _Made, event: BlockEvent) -> list[tuple[str, dict[str, Any]]]:
    """The events that say what happens to a block."""
    happens, block, text = event
    status = "in_progress" if happens == "open" else "completed"
    item = made.item(block, status)
    at = {"output_index": block.index}
    here = {**at, "item_id": item["id"]}
    if block.kind != "call":
        here["content_index"] = 0
    kind = {
        "reasoning": "response.reasoning_text",
        "text": "response.output_text",
        "call": "response.function_call_arguments",
    }[block.kind]
    logprobs = {"logprobs": []} if block.kind == "text" else {}
    told: list[tuple[str, dict[str, Any]]]
    match happens:
        case "open":
            told = [("response.output_item.added", {**at, "item": item})]
            if block.kind != "call":
                part = made.part(block, empty=True)
                told.append(("response.content_part.added", {**here, "part": part}))
        case "delta":
            told = [(f"{kind}.delta", {**here, "delta": text, **logprobs})]
        case "close":
            name = {"name": block.name} if block.kind == "call" else {}
            key = "arguments" if block.kind == "call" else "text"
            told = [(f"{kind}.done", {**here, key: block.text, **name, **logprobs})]
            if block.kind != "call":
                part = made.part(block)
                told.append(("response.content_part.done", {**here, "part": part}))
            told.append(("response.output_item.done", {**at, "item": item}))
    return told
