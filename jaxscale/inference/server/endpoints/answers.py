"""Splits generated text into reasoning, content and tool calls, while it streams."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from jaxscale.inference.output import Output
from jaxscale.inference.reasoning import ReasoningParser
from jaxscale.inference.server.endpoints.conversation import Conversation
from jaxscale.inference.tool_parser import CallDelta, ToolCall, ToolParser, gathered


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """The reasoning."""

    text: str


type AnswerPart = Reasoning | str | CallDelta
"""Reasoning, content, or part of a tool call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A whole answer."""

    reasoning: str
    """Empty where there is none."""
    content: str
    """Without reasoning and tool calls."""
    calls: Sequence[ToolCall]
    """Tool calls."""
    finish: str | None
    """Finish reason, as OpenAI names it."""


class AnswerParser:
    """Splits the text of one completion."""

    def __init__(self, conversation: Conversation) -> None:
        """Start without text."""
        self._conversation = conversation
        self._reasoning = self._tools = None
        if conversation.reasoning is not None:
            self._reasoning = ReasoningParser(
                conversation.reasoning, prompt=conversation.prompt_end
            )
        if conversation.format is not None:
            self._tools = ToolParser(
                conversation.format,
                schemas=conversation.schemas,
                forced=conversation.forced,
            )
        self._thought = self._strip = False
        self.called = False
        """Whether there is a tool call."""

    def add(self, output: Output) -> list[AnswerPart]:
        """What is certain by now."""
        parts = self._divided(output.text)
        if output.finish is not None:
            if self._reasoning is not None:
                parts += self._sorted(*self._reasoning.flush())
            if self._tools is not None:
                parts += self._tools.flush()
        if self._conversation.one_tool:
            parts = [
                part
                for part in parts
                if not isinstance(part, CallDelta) or part.index == 0
            ]
        self.called |= any(isinstance(part, CallDelta) for part in parts)
        return parts

    def finish(self, output: Output) -> str | None:
        """Finish reason, as OpenAI names it."""
        stopped = output.finish == "stop" and self.called
        return "tool_calls" if stopped else output.finish

    def _divided(self, text: str) -> list[AnswerPart]:
        if self._reasoning is None:
            return self._found(text)
        return self._sorted(*self._reasoning.add(text))

    def _sorted(self, thought: str, rest: str) -> list[AnswerPart]:
        """Line breaks around the tags belong to neither."""
        thought = thought if self._thought else thought.lstrip()
        parts: list[AnswerPart] = []
        if thought:
            self._thought = self._strip = True
            if not self._conversation.hides_reasoning:
                parts.append(Reasoning(thought))
        if self._strip:
            rest = rest.lstrip()
        if rest:
            self._strip = False
            parts += self._found(rest)
        return parts

    def _found(self, text: str) -> list[AnswerPart]:
        if self._tools is not None:
            return [*self._tools.add(text)]
        return [text] if text else []


def answer(conversation: Conversation, whole: Output) -> Answer:
    """The parts of a finished completion."""
    parser = AnswerParser(conversation)
    parts = parser.add(whole)
    content, calls = gathered([p for p in parts if not isinstance(p, Reasoning)])
    return Answer(
        reasoning=thoughts(parts),
        content=content,
        calls=calls,
        finish=parser.finish(whole),
    )


def thoughts(parts: Iterable[AnswerPart]) -> str:
    """The reasoning in parts of an answer."""
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


@dataclasses.dataclass(kw_only=True)
class Block:
    """A run of parts of one kind."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    """Number of the block in the answer."""
    name: str = ""
    """Of the function."""
    id: str = ""
    """Of the call."""
    text: str = ""
    """Reasoning, content, or arguments, as far as they have come."""


type BlockEvent = tuple[Literal["open", "delta", "close"], Block, str]
"""What happens to a block, and the text that comes to it."""


class Blocks:
    """Parts of an answer as blocks, each open until another one begins."""

    def __init__(self) -> None:
        """None is open."""
        self.all: list[Block] = []
        """Those that have begun."""
        self._open: Block | None = None
        self._space = ""

    def add(self, parts: Iterable[AnswerPart]) -> list[BlockEvent]:
        """What these parts bring."""
        events: list[BlockEvent] = []
        for part in parts:
            match part:
                case Reasoning():
                    events += self._grow("reasoning", part.text)
                case CallDelta():
                    if part.name is not None:
                        events += self._begin("call", name=part.name, id=part.id or "")
                    events += self._grow("call", part.arguments)
                case str():
                    events += self._content(part)
        return events

    def close(self) -> list[BlockEvent]:
        """End the block that is open."""
        block, self._open = self._open, None
        return [] if block is None else [("close", block, "")]

    def _content(self, text: str) -> list[BlockEvent]:
        """Line breaks between other blocks are none."""
        if self._open is None or self._open.kind != "text":
            text, self._space = self._space + text, ""
            if not text.strip():
                self._space = text
                return []
        return self._grow("text", text)

    def _grow(
        self, kind: Literal["reasoning", "text", "call"], text: str
    ) -> list[BlockEvent]:
        events = []
        if self._open is None or self._open.kind != kind:
            events = self._begin(kind)
        block = self._open
        if block is None or not text:
            return events
        block.text += text
        return [*events, ("delta", block, text)]

    def _begin(
        self, kind: Literal["reasoning", "text", "call"], **more: str
    ) -> list[BlockEvent]:
        events = self.close()
        if kind == "call":
            self._space = ""
        self._open = Block(kind=kind, index=len(self.all), **more)
        self.all.append(self._open)
        return [*events, ("open", self._open, "")]
