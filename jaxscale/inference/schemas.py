"""Untrusted JSON schemas, reduced to what grammars can enforce."""

import re
from collections.abc import Callable, Mapping
from typing import Any


# Keywords that no grammar here enforces.
_IGNORED = frozenset(
    [
        "uniqueItems",
        "propertyNames",
        "contains",
        "minContains",
        "maxContains",
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
        "unevaluatedItems",
    ]
)
_FORMATS = frozenset(
    [
        "date-time",
        "time",
        "date",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uuid",
        "unknown",
    ]
)
# Look-around and back-references are not regular.
_IRREGULAR = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<|\(\?P=")
_OPEN = _IGNORED - {"contains", "not", "unevaluatedProperties", "unevaluatedItems"}
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SCHEMAS = frozenset({"items", "additionalItems", "additionalProperties"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_MOST_DEPTH = 128


def lenient(schema: Any) -> tuple[Any, list[str]]:
    """A schema without unsupported parts, and the names of these.

    Returns:
        The reduced schema, which allows at least the same values; and the removed
        keywords, formats as ``format=NAME``, each once.

    Raises:
        ValueError: it nests too deep.

    Example:
        >>> lenient({"type": "array", "uniqueItems": True, "items": {"format": "url"}})
        ({'type': 'array', 'items': {}}, ['uniqueItems', 'format=url'])
    """
    ignored: dict[str, None] = {}

    def kept(part: dict[str, Any]) -> dict[str, Any]:
        left = {}
        for key, value in part.items():
            name = None
            if key in _IGNORED:
                # A keyword without effect is no loss.
                name = "" if key in _OPEN and value in (False, {}) else key
            elif key == "format" and value not in _FORMATS:
                name = f"format={value!s:.40}"
            elif key == "pattern" and _IRREGULAR.search(str(value)):
                name = "pattern"
            if name is None:
                left[key] = value
            elif name:
                ignored[name] = None
        return left

    return _mapped(schema, kept), list(ignored)


def rooted(schema: Any, pointer: str) -> Any:
    """A schema with references adjusted to its position `pointer` in another one.

    Example:
        >>> rooted({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#"}}}, "#/$defs/f")
        {'$ref': '#/$defs/f/$defs/A', '$defs': {'A': {'$ref': '#/$defs/f'}}}
    """

    def moved(part: dict[str, Any]) -> dict[str, Any]:
        left = {k: v for k, v in part.items() if k not in ("$schema", "$id", "id")}
        target = left.get("$ref")
        if isinstance(target, str) and target.startswith("#"):
            left["$ref"] = pointer + target[1:]
        return left

    return _mapped(schema, moved)


def _mapped(
    schema: Any,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    depth: int = 0,
) -> Any:
    """A schema with `change` applied to it and all nested schemas; values stay."""
    if depth > _MOST_DEPTH:
        raise ValueError(f"a JSON schema nests deeper than {_MOST_DEPTH}; simplify it")
    if not isinstance(schema, Mapping):
        return schema
    made = change(dict(schema))
    for key, value in made.items():
        if key in _MAPS and isinstance(value, Mapping):
            made[key] = {k: _mapped(v, change, depth + 1) for k, v in value.items()}
        elif key in _LISTS and isinstance(value, list):
            made[key] = [_mapped(v, change, depth + 1) for v in value]
        elif key in _SCHEMAS:
            made[key] = _mapped(value, change, depth + 1)
    return made
