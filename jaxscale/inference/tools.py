"""Tools: functions that a model may or must call."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxscale.checks import check_choice
from jaxscale.inference.request import Guide
from jaxscale.inference.schemas import lenient, rooted


type Tool = Mapping[str, Any]
"""``{"type": "function", "function": {"name": ..., "parameters": schema}}``."""

type ToolChoice = str
"""``"none"``, ``"auto"``, ``"required"``, or the name of one function."""

type ToolFormat = Literal["llama", "hermes", "qwen3_coder", "mistral"]
"""Format of tool calls in a text: Llama 3's, a JSON object with ``parameters`` at the
beginning of the text; that of Hermes and Qwen, ``arguments`` within ``<tool_call>``;
Qwen3-Coder's, ``<parameter=NAME>`` within ``<function=NAME>``; or Mistral's, after
``[TOOL_CALLS]``."""

_MAX_TOOLS = 128


def chosen(tools: Sequence[Tool], choice: ToolChoice) -> Sequence[Tool]:
    """The tools to show to the model.

    Raises:
        ValueError: a tool is malformed or named twice, or the choice is not one of
            them.

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


def forced_call(
    tools: Sequence[Tool], choice: ToolChoice
) -> tuple[Guide | None, list[str]]:
    """The guide that forces one tool call, for choices that require it.

    The text is then one compact JSON object with the name and the arguments, for which
    `ToolParser` needs no format.

    Returns:
        The guide, None if nothing is forced, and the parts of the tools' schemas that
        it does not enforce.

    Raises:
        ValueError: as `chosen`.
    """
    shown = chosen(tools, choice)
    if choice in ("none", "auto"):
        return None, []
    calls, definitions, ignored = [], {}, {}
    for i, tool in enumerate(shown):
        # References of a schema are relative to its root, which is nested here.
        place = f"#/$defs/tool{i}"
        given = tool["function"].get("parameters") or {"type": "object"}
        schema, names = lenient(given)
        definitions[f"tool{i}"] = rooted(schema, place)
        ignored |= dict.fromkeys(names)
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": {"$ref": place},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    text = json.dumps({**schema, "$defs": definitions})
    return Guide(kind="json_schema", text=text, compact=True), list(ignored)


def detect_format(template: str) -> ToolFormat | None:
    """The tool-call format of a chat template, None if it has none.

    Example:
        >>> detect_format("... within <tool_call></tool_call> tags ...")
        'hermes'
    """
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or '"parameters"' in template:
        return "llama"
    return None
