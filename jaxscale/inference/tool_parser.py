"""Incremental parser of tool calls in a text."""

import dataclasses
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.checks import check_choice
from jaxscale.inference.tools import ToolFormat


_PYTHON_TAG = "<|python_tag|>"
_OPEN: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "qwen3_coder": ("<tool_call>", "<function="),  # some calls lack the first
    "mistral": ("[TOOL_CALLS]",),
    "llama": (),
}
_CLOSE = "</tool_call>"
_SPACE = " \t\r\n"
_BETWEEN = _SPACE + ";,[]}"  # some models close more than they open
# The beginning of a call, up to its arguments; longer ones are read as a whole.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_LONGEST_HEAD = 512
_NAMED = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_BEGUN_NAME = re.compile(r"\s*[\w.\-]*(?:\[[\w\]]*)?\s*")
_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,256})>\s*")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,256})>(.*?)</parameter>", re.DOTALL)
_FUNCTION_END = "</function>"
_SURROGATES = re.compile("[\ud800-\udfff]")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallDelta:
    """A part of a tool call in a stream."""

    index: int
    """Number of the call in the text."""
    name: str | None = None
    """Name of the function, in the first part."""
    id: str | None = None
    """Id of the call, in the first part."""
    arguments: str = ""
    """The next part of the arguments, a JSON object, as the model wrote it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A complete tool call."""

    name: str
    """Name of the function."""
    arguments: str
    """The arguments, a JSON object as text; if the text ends too early, its
    beginning."""
    id: str
    """Id of the call, to match its result."""


type Piece = str | CallDelta
"""Content, or part of a call."""


class ToolParser:
    """Separates the tool calls in a streamed text from the rest.

    A call is recognized once its name and the beginning of its arguments are known; the
    arguments are streamed. Text that may still become a call is held back; text that
    looks like one but is not is returned as content.

    Example:
        >>> parser = ToolParser("hermes")
        >>> parser.add("Let me see. <tool_"), parser.add('call>{"name": "f", ')
        (['Let me see. '], [])
        >>> begin, rest = parser.add('"arguments": {"x": 1}}</tool_call>')
        >>> begin.name, rest.arguments
        ('f', '{"x": 1}')
    """

    def __init__(
        self,
        format: ToolFormat,
        *,
        schemas: Mapping[str, Any] | None = None,
        forced: bool = False,
    ) -> None:
        """Start without text.

        Args:
            format: Format in which the model writes calls.
            schemas: JSON schemas of the arguments of the known functions, by name; None
                is any function. Other names are not calls.
            forced: True: all of the text is one call, by `forced_call`.
        """
        check_choice("tool format", format, ToolFormat)
        self._format: str = "llama" if forced else format
        self._schemas = schemas
        self._waiting = ""
        self._raw = ""  # returned as content if it is no call
        self._step = self._start if self._format == "llama" else self._content
        self._pieces: list[Piece] = []
        self._count = 0
        self._committed = False  # whether the current one is certainly a call
        self._behind = False  # whether nothing has followed a call
        self._final = False
        self._name, self._given = "", 0
        self._reset()

    def add(self, text: str) -> list[Piece]:
        """The content and call parts that are certain so far."""
        self._waiting += text
        while self._waiting and self._step():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def flush(self) -> list[Piece]:
        """The rest, at the end of the text."""
        self._final = True
        pieces = self.add("")
        known = self._committed and self._step != self._content
        left = "" if known else self._raw + self._waiting
        self._waiting = self._raw = ""
        return [*pieces, *([left] if left else [])]

    # Each step returns whether there may be another one.

    def _start(self) -> bool:
        """Whether the text begins like a call of Llama."""
        text = self._waiting.lstrip()
        if text.startswith(_PYTHON_TAG):
            self._take(len(self._waiting) - len(text) + len(_PYTHON_TAG))
        elif not text or _PYTHON_TAG.startswith(text):
            return False
        elif text[0] != "{":
            return self._no_call()
        self._step = self._between
        return True

    def _content(self) -> bool:
        """Read text up to the beginning of a call."""
        if self._behind:  # line breaks between calls are not content
            self._waiting = self._waiting.lstrip()
        opens = _OPEN[self._format]
        found = [at for tag in opens if (at := self._waiting.find(tag)) >= 0]
        keep = max((_overlap(self._waiting, tag) for tag in opens), default=0)
        end = min(found, default=len(self._waiting) - keep)
        self._say(self._waiting[:end])
        self._waiting = self._waiting[end:]
        if not found:
            return False
        self._committed = False
        if self._waiting.startswith(opens[0]):
            self._take(len(opens[0]))
        kinds = {"hermes": self._between, "mistral": self._mistral}
        self._step = kinds.get(self._format, self._function)
        return True

    def _between(self) -> bool:
        """Read before and after JSON objects."""
        text = self._waiting.lstrip(_BETWEEN if self._committed else _SPACE + "[")
        self._take(len(self._waiting) - len(text))
        if not text:
            return False
        if text[0] == "{":
            self._reset()
            self._step = self._object
            return True
        return self._closed() if self._committed else self._no_call()

    def _object(self) -> bool:
        """Read the beginning of an object that may be a call."""
        short = len(self._waiting) <= _LONGEST_HEAD
        head = _HEAD.match(self._waiting) if short else None
        if head and self._begin(_DECODER.decode(head[1])):
            return self._arguments_at(head.end(), self._arguments_in_object)
        end = self._scan()
        if end is None:
            cut = self._format == "hermes" and _CLOSE in self._waiting
            return cut and self._no_call()
        try:
            name, arguments = _as_call(_DECODER.decode(self._waiting[:end]))
            known = self._begin(name)
        except (ValueError, RecursionError):
            known, arguments = False, ""
        self._reset()
        if not known:
            return self._no_call()
        self._pieces.append(CallDelta(index=self._count - 1, arguments=arguments))
        self._waiting = self._waiting[end:]
        self._step = self._between
        return True

    def _mistral(self) -> bool:
        """Read a list of objects, or a name with an object."""
        text = self._waiting.lstrip()
        if not text:
            return False
        if text[0] in "[{":
            self._step = self._between
            return True
        named = _NAMED.match(self._waiting)
        if named is None:
            begun = _BEGUN_NAME.fullmatch(self._waiting) and len(text) < _LONGEST_HEAD
            return False if begun else self._no_call()
        if not self._begin(named[1]):
            return self._no_call()
        return self._arguments_at(named.end(), self._arguments_alone)

    def _arguments_at(self, start: int, step: Any) -> bool:
        self._waiting, self._step = self._waiting[start:], step
        self._reset()
        return True

    def _arguments_in_object(self) -> bool:
        return self._arguments(self._tail)

    def _arguments_alone(self) -> bool:
        return self._arguments(self._content)

    def _arguments(self, after: Any) -> bool:
        end = self._scan()
        given = self._waiting if end is None else self._waiting[:end]
        self._pieces.append(CallDelta(index=self._count - 1, arguments=given))
        self._waiting, self._scanned = self._waiting[len(given) :], 0
        if end is None:
            return False
        self._reset(depth=1)
        self._step = after
        return True

    def _tail(self) -> bool:
        """Read the rest of an object whose arguments are known."""
        end = self._scan()
        self._waiting = "" if end is None else self._waiting[end:]
        self._scanned = 0
        if end is None:
            return False
        self._reset()
        self._step = self._between
        return True

    def _function(self) -> bool:
        """Read the beginning of a call of Qwen3-Coder."""
        found = _FUNCTION.match(self._waiting)
        if found is None:
            text = self._waiting.lstrip()
            begun = "<function=".startswith(text[:10]) and ">" not in text
            return False if begun and len(text) < _LONGEST_HEAD else self._no_call()
        if not self._begin(found[1].strip()):
            return self._no_call()
        self._name, self._given = found[1].strip(), 0
        self._waiting = self._waiting[found.end() :]
        self._step, self._scanned = self._parameter, 0
        return True

    def _parameter(self) -> bool:
        """Read a parameter of Qwen3-Coder, or the end of its call."""
        if ">" not in self._waiting[self._scanned :]:
            self._scanned = len(self._waiting)
            return False
        index = self._count - 1
        at = {tag: self._waiting.find(tag) for tag in (_FUNCTION_END, _CLOSE)}
        end = min((place for place in at.values() if place >= 0), default=-1)
        if end >= 0 and "<parameter=" not in self._waiting[:end]:
            text = "}" if self._given else "{}"
            self._pieces.append(CallDelta(index=index, arguments=text))
            end += len(_FUNCTION_END) * (end == at[_FUNCTION_END])
            self._waiting, self._step = self._waiting[end:], self._closed
            return True
        found = _PARAMETER.search(self._waiting)
        self._scanned = 0 if found else len(self._waiting)
        if found is None:
            return False
        begin = ", " if self._given else "{"
        schema = (self._schemas or {}).get(self._name) or {}
        known = schema.get("properties") if isinstance(schema, Mapping) else None
        kind = known.get(found[1]) if isinstance(known, Mapping) else None
        value = found[2].removeprefix("\n").removesuffix("\n")
        written = f"{begin}{json.dumps(found[1])}: {_typed(value, kind)}"
        self._pieces.append(CallDelta(index=index, arguments=written))
        self._given += 1
        self._waiting = self._waiting[found.end() :]
        return True

    def _closed(self) -> bool:
        """Read the closing tag after calls, if there is one."""
        self._step = self._closed
        if self._format in ("hermes", "qwen3_coder"):
            self._waiting = self._waiting.lstrip()
            if len(self._waiting) < len(_CLOSE) and _CLOSE.startswith(self._waiting):
                return False
            self._waiting = self._waiting.removeprefix(_CLOSE)
        self._step = self._content
        return True

    def _no_call(self) -> bool:
        """Return as content what looked like a call, up to its closing tag."""
        if self._committed:
            return self._closed()
        at = self._waiting.find(_CLOSE)
        if self._format == "llama" or (at < 0 and self._final):
            self._say(self._raw + self._waiting)
            self._waiting = ""
        elif self._format == "mistral":
            self._say(self._raw)
        elif at < 0:
            self._step = self._no_call
            return False
        else:
            end = at + len(_CLOSE)
            self._say(self._raw + self._waiting[:end])
            self._waiting = self._waiting[end:]
        self._raw, self._step = "", self._content
        self._reset()
        return True

    # --------------------------------------------------------------------------------

    def _begin(self, name: str) -> bool:
        """Begin a call, if there is a function of this name."""
        if self._schemas is not None and name not in self._schemas:
            return False
        # Mistral's templates take no others.
        length = 9 if self._format == "mistral" else 24
        prefix = "" if self._format == "mistral" else "call_"
        made = f"{prefix}{uuid.uuid4().hex[:length]}"
        self._pieces.append(CallDelta(index=self._count, name=name, id=made))
        self._count += 1
        self._committed, self._behind, self._raw = True, True, ""
        return True

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._behind = False

    def _take(self, count: int) -> None:
        """Advance past text that is returned as content if it begins no call."""
        if not self._committed:
            self._raw += self._waiting[:count]
        self._waiting = self._waiting[count:]

    def _reset(self, depth: int = 0) -> None:
        self._depth, self._scanned = depth, 0
        self._in_string = self._escaped = False

    def _scan(self) -> int | None:
        """The end of the pending object; None if it is incomplete."""
        for at in range(self._scanned, len(self._waiting)):
            character = self._waiting[at]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        self._scanned = len(self._waiting)
        return None


def gathered(pieces: Sequence[Piece]) -> tuple[str, list[ToolCall]]:
    """All content, and the complete calls.

    Example:
        >>> parser = ToolParser("llama")
        >>> pieces = parser.add('{"name": "f", "parameters": {}}') + parser.flush()
        >>> content, (call,) = gathered(pieces)
        >>> content, call.name, call.arguments
        ('', 'f', '{}')
    """
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        if isinstance(piece, str):
            continue
        if piece.name is not None:
            calls[piece.index] = ToolCall(
                name=piece.name, arguments=piece.arguments, id=piece.id or ""
            )
        else:
            call = calls[piece.index]
            arguments = call.arguments + piece.arguments
            calls[piece.index] = dataclasses.replace(call, arguments=arguments)
    return content, list(calls.values())


def _as_call(item: Any) -> tuple[str, str]:
    """Name and arguments of a call, from its object.

    Raises:
        ValueError: the object is not a call.
    """
    keys = item.keys() if isinstance(item, dict) else set()
    given = keys & {"arguments", "parameters"}
    # Without arguments, but with more than a name, it is some other object.
    if "name" not in keys or not (given or keys <= {"name", "type", "id"}):
        raise ValueError("an object that is no call")
    name = item["name"]
    arguments = item.get("arguments", item.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else None
    if text is not None:  # some models write the object as text
        text = text or "{}"
        arguments = _DECODER.decode(text)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("an object that is no call")
    if text is None:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Lone surrogates, valid in JSON but not in text, stay escaped.
    return name, _SURROGATES.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _typed(value: str, schema: Any) -> str:
    """The JSON of a value that was written as text."""
    kinds = _kinds(schema)
    if (kinds and "string" not in kinds) or (
        value.strip() == "null" and "null" in kinds
    ):
        for text in (value.strip(), value.strip().lower()):
            try:
                _DECODER.decode(text)
            except (ValueError, RecursionError):
                continue
            return text
    return json.dumps(value, ensure_ascii=False)


def _kinds(schema: Any) -> set[str]:
    """Types that a schema names; those of a reference count as an object's."""
    if not isinstance(schema, Mapping):
        return set()
    said = schema.get("type")
    listed = said if isinstance(said, list) else [said]
    found = {kind for kind in listed if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        parts = schema.get(name)
        for part in parts if isinstance(parts, Sequence) else ():
            found |= _kinds(part)
    return found | ({"object"} if "$ref" in schema else set())


def _overlap(text: str, tag: str) -> int:
    """The longest suffix of `text` that is a prefix of `tag`, in characters."""
    return next((k for k in range(len(tag) - 1, 0, -1) if text.endswith(tag[:k])), 0)
