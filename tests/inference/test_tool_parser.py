"""Calls of tools in texts, in whole and as they come."""

import itertools
import json
import random

import pytest

from jaxscale.inference.tool_parser import CallDelta, ToolParser, gathered
from jaxscale.inference.tools import detect_format


HERMES = 'Well. <tool_call>\n{"name": "f", "arguments": {"x": "<"}}\n</tool_call>'
CODER = """\
I look.
<tool_call>
<function=g>
<parameter=text>
a <b> "c"

</parameter>
<parameter=count>
3
</parameter>
<parameter=flag>
True
</parameter>
<parameter=maybe>
null
</parameter>
</function>
</tool_call>"""
CODED = '{"text": "a <b> \\"c\\"\\n", "count": 3, "flag": true, "maybe": null}'
SCHEMAS = {
    "f": None,
    "g": {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "flag": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }
    },
}
CASES = [
    ("hermes", HERMES, "Well. ", [("f", '{"x": "<"}')]),
    ("hermes", HERMES + "\n" + HERMES[6:], "Well. ", [("f", '{"x": "<"}')] * 2),
    ("hermes", HERMES[:-12], "Well. ", [("f", '{"x": "<"}')]),
    ("hermes", HERMES.replace("}}", "}}}") + "\nso", "Well. so", [("f", '{"x": "<"}')]),
    # Cut where the tokens ended.
    ("hermes", HERMES[:-15], "Well. ", [("f", '{"x": "<"')]),
    ("hermes", "<tool_call>no</tool_call> x", "<tool_call>no</tool_call> x", []),
    ("hermes", "a <tool_ca b <", "a <tool_ca b <", []),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>',
        "",
        [("f", '{"a": "\\ud800"}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>!',
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>!',
        [],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        "",
        [("f", '{"a": "</tool_call>"}')],
    ),
    ("llama", '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (
        "llama",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    # Numbers and halves of characters are as the model wrote them.
    (
        "llama",
        '{"name": "f", "parameters": {"x": 1e400, "y": "\\udc00"}}',
        "",
        [("f", '{"x": 1e400, "y": "\\udc00"}')],
    ),
    ("llama", '{"name": "f", "parameters": "{}"}', "", [("f", "{}")]),
    (
        "llama",
        '{"name": "f", "parameters": "{\\"a\\": \\"\\ud800\\"}"}',
        "",
        [("f", '{"a": "\\ud800"}')],
    ),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
    (
        "mistral",
        'So. [TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", '
        '"arguments": {}}]',
        "So. ",
        [("f", '{"a": [1]}'), ("g", "{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g{"b": {}}',
        "",
        [("f", '{"a": "]"}'), ("g", '{"b": {}}')],
    ),
    ("mistral", "[TOOL_CALLS]what is that", "[TOOL_CALLS]what is that", []),
    ("qwen3_coder", CODER, "I look.\n", [("g", CODED)]),
    ("qwen3_coder", CODER.replace("<tool_call>\n", ""), "I look.\n", [("g", CODED)]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n</function>\n</tool_call>\n" * 2,
        "",
        [("f", "{}")] * 2,
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=h>\n</function>\n</tool_call>",
        "<tool_call>\n<function=h>\n</function>\n</tool_call>",
        [],
    ),
    *(
        ("llama", text, text, [])
        for text in (
            '{"name": 5}',
            '{"name": "f", "age": 3}',
            '{"name": "Ann"}',
            '{"name": "f", "parameters": [1]}',
            "{ a set }",
            "Just text {",
            " to  be ",
            '[{"name": "f", "arguments": "{}"}]',
            '{"arguments": {"x": NaN}, "name": "f"}',
        )
    ),
]


def parsed(format, pieces, **options):
    parser = ToolParser(format, **({"schemas": SCHEMAS} | options))
    made = list(itertools.chain.from_iterable(map(parser.add, pieces)))
    return made + parser.flush()


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES)
def test_calls_in_text(format, text, content, calls, size):
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    said, found = gathered(parsed(format, pieces))
    assert said == content
    assert [(call.name, call.arguments) for call in found] == calls
    assert len({call.id for call in found}) == len(calls)
    if format == "mistral":
        assert all(len(call.id) == 9 and call.id.isalnum() for call in found)


def test_arguments_come_in_parts():
    text = '<tool_call>{"name": "f", "arguments": {"text": "to be or not"}}</tool_call>'
    first, *rest = parsed("hermes", text)
    assert (first.name, first.arguments) == ("f", "") and first.id
    assert len(rest) == len('{"text": "to be or not"}')
    assert all(isinstance(part, CallDelta) and part.name is None for part in rest)
    # Of Qwen3-Coder a parameter at a time.
    parts = [
        p.arguments for p in parsed("qwen3_coder", CODER) if not isinstance(p, str)
    ]
    assert parts[:3] == ["", '{"text": "a <b> \\"c\\"\\n"', ', "count": 3']


@pytest.mark.parametrize("format", ["hermes", "llama", "mistral", "qwen3_coder"])
def test_any_text_in_any_parts(format):
    """Nothing is lost or doubled, and parts make what the whole makes."""
    draw = random.Random(format)
    words = [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "f",
            "[ARGS]",
            "{}",
            " ",
            "\n",
        ),
        *('{"name": "f", "arguments": ', '{"x": 1}', "}", '"', "\\", "[", "]", ","),
        *(
            "<function=f>",
            "</function>",
            "<parameter=a>",
            "</parameter>",
            "<|python_tag|>",
        ),
    ]
    for _ in range(300):
        text = "".join(draw.choices(words, k=draw.randint(1, 9)))
        whole, calls = gathered(parsed(format, [text]))
        said, found = gathered(parsed(format, text))
        assert (said, [c.arguments for c in found]) == (
            whole,
            [c.arguments for c in calls],
        ), text
        if not calls:
            assert whole == text


def test_a_call_that_is_forced():
    text = '{"name":"f","arguments":{"a":"x"}}'
    (call,) = gathered(parsed("hermes", [text], forced=True))[1]
    assert json.loads(call.arguments) == {"a": "x"}


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("Use <tool_call>{}</tool_call>", "hermes"),
        ("<tool_call><function=x><parameter=y>", "qwen3_coder"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ('{"name": f, "parameters": {}}', "llama"),
        ("{{ messages }}", None),
    ],
)
def test_formats_of_templates(template, format):
    assert detect_format(template) == format
