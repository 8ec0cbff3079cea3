"""Chat templates: conversations rendered and encoded as prompts.

The template comes with the model, and the messages are untrusted. So the template runs
in a separate process with bounded time and memory (`templates`), and anything that
looks like a control token in a message stays text: only those that the template writes
become control tokens.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale.inference.reasoning import ReasoningFormat, detect_reasoning
from jaxscale.inference.templates import WORKERS
from jaxscale.inference.tools import Tool, ToolChoice, ToolFormat, chosen, detect_format
from jaxscale.models.tokenizer import Tokenizer


type Message = Mapping[str, Any]
"""A message in OpenAI's format: role, content, optionally tool_calls and others."""

_END_WITHIN = "within"
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # no characters, by definition
_MAX_MESSAGES = 4096
_MAX_DEPTH = 32


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The chat template of one model.

    Example:
        >>> tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=260)
        >>> chat = ChatTemplate(tokenizer, "{{ messages[0].content }}{{ eos_token }}")
        >>> chat.render([{"role": "user", "content": "to be"}])
        'to be<|endoftext|>'
        >>> chat.encode([{"role": "user", "content": "<|endoftext|>"}]).count(
        ...     tokenizer.eos_id)
        1
    """

    tokenizer: Tokenizer
    """Tokenizer, which may have the template."""
    template: str | Sequence[Mapping[str, str]] | None = None
    """Jinja source, or several by name: ``"tool_use"`` if there are tools, otherwise
    ``"default"``. None takes the tokenizer's."""
    _templates: dict[str, str] = dataclasses.field(
        init=False, repr=False, compare=False
    )
    _guard: "_Guard" = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = self.template or self.tokenizer.chat_template
        if not found:
            raise ValueError(
                "the tokenizer has no chat_template, so conversations cannot be laid "
                "out; give a template, or send prompts to /v1/completions"
            )
        named = {"default": found} if isinstance(found, str) else _named(found)
        for source in named.values():
            WORKERS.render(source, None)
        object.__setattr__(self, "_templates", named)
        guard = _Guard(tuple(self.tokenizer.control_tokens))
        object.__setattr__(self, "_guard", guard)

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format of tool calls in texts, as far as the template shows it."""
        return detect_format(self._source)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """Format of the reasoning in texts, as far as the template shows it."""
        return detect_reasoning(self._source)

    def knows(self, variable: str) -> bool:
        """Whether the template uses a variable."""
        return re.search(rf"\b{re.escape(variable)}\b", self._source) is not None

    @property
    def _source(self) -> str:
        return "".join(self._templates.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text.

        Args:
            messages: The conversation, in OpenAI's format.
            tools: Functions that the model may call, in OpenAI's format.
            tool_choice: ``"none"`` passes no tools to the template; a name passes that
                tool only.
            add_generation_prompt: End with the beginning of an answer.
            continue_final_message: End within the last message, to continue it; instead
                of `add_generation_prompt`.
            variables: Further template variables, such as ``enable_thinking``.

        Raises:
            ValueError: a message is malformed, the template refuses the conversation,
                or it takes too long or gets too large.
        """
        end = _END_WITHIN if continue_final_message else add_generation_prompt
        text, mark = self._render(messages, tools, tool_choice, end, variables or {})
        return text.replace(mark, "")

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        check: Callable[[str], None] | None = None,
    ) -> list[int]:
        """The prompt as token ids; other arguments are as for `render`.

        A name of a control token in a message is encoded in two parts, as text.

        Args:
            messages: As for `render`.
            tools: As for `render`.
            tool_choice: As for `render`.
            add_generation_prompt: As for `render`.
            continue_final_message: As for `render`.
            variables: As for `render`.
            check: Function that raises if the text is too long to be tokenized.
        """
        end = _END_WITHIN if continue_final_message else add_generation_prompt
        text, mark = self._render(messages, tools, tool_choice, end, variables or {})
        if check is not None:
            check(text)
        parts = [part for part in text.split(mark) if part]
        return [
            token
            for part in parts
            for token in self.tokenizer.encode(part, control_tokens=True)
        ]

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        tool_choice: ToolChoice,
        end: bool | str,
        variables: Mapping[str, Any],
    ) -> tuple[str, str]:
        """The text, and the mark of the places where it must be split."""
        within = end == _END_WITHIN
        given = {
            "messages": [_message(i, m) for i, m in enumerate(_listed(messages))],
            "tools": list(chosen(tools, tool_choice)) or None,
            "variables": dict(variables),
        }
        if "developer" not in self._source:
            # OpenAI's newer name of the system role; templates would drop it.
            for message in given["messages"]:
                if message["role"] == "developer":
                    message["role"] = "system"
        mark = _unused_mark(given)
        given = self._guard.all(given, mark)
        if within:
            last = given["messages"][-1]
            last["content"] = last["content"].removesuffix(mark) + 3 * mark
        templates = self._templates
        use = "tool_use" if given["tools"] and "tool_use" in templates else "default"
        if use not in templates:
            raise ValueError(
                f"the tokenizer has chat templates {sorted(templates)}, none of which "
                "is the default"
            )
        context = {
            **self.tokenizer.special_tokens,
            **given["variables"],
            "messages": given["messages"],
            "tools": given["tools"],
            "add_generation_prompt": end is True,
        }
        text = WORKERS.render(templates[use], context)
        if not within:
            return text, mark
        before, found, _ = text.rpartition(3 * mark)
        if not found:
            raise ValueError(
                "continue_final_message is true, but the chat template does not write "
                "the text of the last message; give the model a prompt in "
                "/v1/completions"
            )
        return before, mark


def _listed(messages: Sequence[Message]) -> Sequence[Message]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of messages, got {messages!r:.100}")
    if not 1 <= len(messages) <= _MAX_MESSAGES:
        raise ValueError(
            f"messages has {len(messages)} messages, expected 1 to {_MAX_MESSAGES}"
        )
    return messages


def _message(index: int, message: Message) -> dict[str, Any]:
    """A message as templates expect it: text in one piece, arguments as an object."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where} must be an object with a role")
    laid = {key: value for key, value in message.items() if value is not None}
    laid["content"] = _content(where, message.get("content"))
    calls = laid.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise ValueError(f"{where}.tool_calls must be a list")
        laid["tool_calls"] = [
            _call(f"{where}.tool_calls[{i}]", c) for i, c in enumerate(calls)
        ]
    elif message.get("content") is None:
        raise ValueError(f"{where} has neither content nor tool_calls")
    return laid


def _content(where: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ValueError(f"{where}.content must be a string or a list of parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in ("text", "input_text", "output_text") or not isinstance(
            text, str
        ):
            raise ValueError(
                f"{where}.content has a part of type {kind!r}; only text is understood"
            )
        texts.append(text)
    return "".join(texts)


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where} must be an object with function.name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _arguments(arguments or "{}")
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(text: str) -> Any:
    """The arguments of a call as an object, as templates expect it.

    Malformed arguments of a model, or ones that cannot be serialized again, stay as
    they are: templates get them as text that they write without quotes.
    """
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _unused_mark(given: Any) -> str:
    text = json.dumps(given, ensure_ascii=False, default=str)
    for mark in _MARKS:
        if mark not in text:
            return mark
    raise ValueError("messages hold every noncharacter from U+FDD0 to U+FDEF")


class _Guard:
    """Marks where text must be split so that no part of it names a control token."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._firsts = {name[:k] for name in names for k in range(1, len(name))}
        self._lasts = {name[k:] for name in names for k in range(1, len(name))}
        self._longest = max(map(len, names), default=0)

    def all(self, value: Any, mark: str, depth: int = 0) -> Any:
        """`value` with the marks in every string of it."""
        if depth > _MAX_DEPTH:
            raise ValueError(
                f"messages, tools and variables nest deeper than {_MAX_DEPTH}"
            )
        if isinstance(value, str):
            return self._edges(self._inside(value, mark), mark)
        if isinstance(value, Mapping):
            return {
                self._inside(str(key), mark): self.all(item, mark, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.all(item, mark, depth + 1) for item in value]
        return value

    def _inside(self, text: str, mark: str) -> str:
        for name in self._names:
            if name in text:
                text = text.replace(name, name[:1] + mark + name[1:])
        return text

    def _edges(self, text: str, mark: str) -> str:
        """A name may begin in a message and be completed by the template."""
        most = range(1, min(self._longest, len(text) + 1))
        ends = any(text[-k:] in self._firsts for k in most)
        begins = any(text[:k] in self._lasts for k in most)
        return mark * begins + text + mark * ends


def _named(templates: Any) -> dict[str, str]:
    try:
        return {entry["name"]: entry["template"] for entry in templates}
    except (TypeError, KeyError) as error:
        raise ValueError(
            "chat_template must be a string, or a list of objects with name and "
            "template"
        ) from error
