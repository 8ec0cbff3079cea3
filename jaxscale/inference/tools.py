"""Functions that a model may call: which it is shown, and the calls in its text."""

import dataclasses
import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from jaxscale.checks import check_choice
from jaxscale.inference.request import Guide


type Tool = Mapping[str, Any]
"""``{"type": "function", "function": {"name": ..., "parameters": schema}}``."""

type ToolChoice = str
"""``"none"``, ``"auto"``, ``"required"``, or the name of one function."""

type ToolFormat = Literal["llama", "hermes"]
"""Form of the calls in a text: that of Llama 3, a JSON object with ``parameters`` which
is the whole text, or that of Hermes and Qwen, ``arguments`` within ``<tool_call>``."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_MAX_TOOLS = 128


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that a model has written."""

    name: str
    """Name of the function."""
    arguments: str
    """A JSON object, as text."""
    id: str = dataclasses.field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    """Names the call, so that its result can be told apart."""


def chosen(tools: Sequence[Tool], choice: ToolChoice) -> Sequence[Tool]:
    """The tools that the model is to see.

    Raises:
        ValueError: a tool is malformed or named twice, or the choice is none of them.

    Example:
        >>> tools = [{"type": "function", "function": {"name": "f"}}]
        >>> chosen(tools, "none"), list(chosen(tools, "f")) == tools
        ((), True)
    """
    if len(tools) > _MAX_TOOLS:
        raise ValueError(f"tools has {len(tools)} tools, expected at most {_MAX_TOOLS}")
    named: dict[str, Tool] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise ValueError(f"tools[{i}] must be an object with function.name")
        if not isinstance(function.get("parameters", {}), Mapping):
            raise ValueError(f"tools[{i}].function.parameters must be a JSON schema")
        if name in named:
            raise ValueError(f"tools[{i}] has the name {name!r} of one before")
        named[name] = tool
    if choice in ("auto", "none") or (choice == "required" and tools):
        return () if choice == "none" else tuple(tools)
    check_choice("tool_choice", choice, ("none", "auto", *named))
    return (named[choice],)


def forced_call(tools: Sequence[Tool], choice: ToolChoice) -> Guide | None:
    """The guide that holds the model to one call, for the choices that ask for it.

    The text is then one JSON object with the name and the arguments, for which
    `parse_calls` needs no format.

    Raises:
        ValueError: as `chosen`.
    """
    shown = chosen(tools, choice)
    if choice in ("none", "auto"):
        return None
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in shown
    ]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return Guide(kind="json_schema", text=json.dumps(schema))


def detect_format(template: str) -> ToolFormat | None:
    """The format that a chat template shows its model, None where it shows neither.

    Example:
        >>> detect_format("... within <tool_call></tool_call> tags ...")
        'hermes'
    """
    if _OPEN in template:
        return "hermes"
    if _PYTHON_TAG in template or '"parameters"' in template:
        return "llama"
    return None


class ToolParser:
    """Tells the calls in a text from the rest, while the text comes.

    Text that may yet become a call is held back; text that looks like one but is none
    is given out as it is.

    Example:
        >>> parser = ToolParser("hermes")
        >>> parser.add("Let me see. <tool_"), parser.add('call>{"name": "f", ')
        (('Let me see. ', []), ('', []))
        >>> text, (call,) = parser.add('"arguments": {"x": 1}}</tool_call>')
        >>> call.name, call.arguments
        ('f', '{"x": 1}')
    """

    def __init__(
        self,
        format: ToolFormat,
        *,
        names: Collection[str] | None = None,
        forced: bool = False,
    ) -> None:
        """Begin without text.

        Args:
            format: Format in which the model writes calls.
            names: Functions that there are; any by default. An object with another
                name is no call.
            forced: True: all of the text is one call, by `forced_call`.
        """
        check_choice("tool format", format, ToolFormat)
        self._names = names
        self._format = "llama" if forced else format
        self._waiting = ""
        self._began = False

    def add(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return what is certain by now: content, and calls that are complete."""
        self._waiting += text
        if self._format == "hermes":
            return self._hermes()
        if self._began:
            return self._give_all()
        start = self._waiting.lstrip()
        if not start or start[0] == "{" or _PYTHON_TAG.startswith(start[:14]):
            return "", []  # a call is the whole text, and known at its end
        self._began = True
        return self._give_all()

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The rest, at the end of the text."""
        if self._format == "llama":
            calls = self._calls(self._waiting.strip().removeprefix(_PYTHON_TAG))
            if calls:
                self._waiting = ""
                return "", calls
        elif self._waiting.startswith(_OPEN):
            # Some models end with the object, without the closing tag.
            calls = self._calls(self._waiting.removeprefix(_OPEN))
            if calls:
                self._waiting = ""
                return "", calls
        return self._give_all()

    def _give_all(self) -> tuple[str, list[ToolCall]]:
        text, self._waiting = self._waiting, ""
        return text, []

    def _hermes(self) -> tuple[str, list[ToolCall]]:
        content, calls = [], []
        while True:
            start = self._waiting.find(_OPEN)
            if start < 0:
                keep = _overlap(self._waiting, _OPEN)
                end = len(self._waiting) - keep
                content.append(self._waiting[:end])
                self._waiting = self._waiting[end:]
                break
            content.append(self._waiting[:start])
            self._waiting = self._waiting[start:]
            end = self._waiting.find(_CLOSE)
            if end < 0:
                break
            inside = self._waiting[len(_OPEN) : end]
            whole = self._waiting[: end + len(_CLOSE)]
            found = self._calls(inside)
            calls += found
            content.append("" if found else whole)
            self._waiting = self._waiting[len(whole) :]
        text = "".join(content)
        # Between calls there are line breaks, which are no content.
        return ("" if calls and not text.strip() else text), calls

    def _calls(self, text: str) -> list[ToolCall]:
        """The calls in JSON objects one behind the other; none if there is more."""
        calls, at, text = [], 0, text.strip()
        while at < len(text):
            try:
                value, at = _DECODER.raw_decode(text, at)
                items = value if isinstance(value, list) else [value]
                calls += [self._as_call(item) for item in items]
            except (ValueError, RecursionError):
                return []
            while at < len(text) and text[at] in " \t\r\n;":
                at += 1
        return calls

    def _as_call(self, item: Any) -> ToolCall:
        """The call that an object is.

        Raises:
            ValueError: it is none.
        """
        keys = item.keys() if isinstance(item, dict) else set()
        given = keys & {"arguments", "parameters"}
        # What has no arguments, but more than a name, is some other object.
        if "name" not in keys or not (given or keys <= {"name", "type", "id"}):
            raise ValueError("an object that is no call")
        name = item["name"]
        arguments = item.get("arguments", item.get("parameters", {}))
        if isinstance(arguments, str):  # some write the object as text
            arguments = _DECODER.decode(arguments or "{}")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError("an object that is no call")
        if self._names is not None and name not in self._names:
            raise ValueError(f"a function {name!r} that there is not")
        return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def parse_calls(
    text: str,
    format: ToolFormat,
    *,
    names: Collection[str] | None = None,
    forced: bool = False,
) -> tuple[str, list[ToolCall]]:
    """The content of a whole text, and the calls in it.

    Example:
        >>> content, calls = parse_calls('{"name": "f", "parameters": {}}', "llama")
        >>> content, [(call.name, call.arguments) for call in calls]
        ('', [('f', '{}')])
    """
    parser = ToolParser(format, names=names, forced=forced)
    first, calls = parser.add(text)
    rest, more = parser.flush()
    return first + rest, calls + more


def _overlap(text: str, tag: str) -> int:
    """The longest ending of `text` that begins `tag`, in characters."""
    return next((k for k in range(len(tag) - 1, 0, -1) if text.endswith(tag[:k])), 0)
