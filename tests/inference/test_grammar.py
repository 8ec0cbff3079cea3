"""Guided texts: what the masks allow is what the guide means, within bounds."""

import json
import random
import re
import threading

import numpy as np
import pytest

from jaxscale.inference.grammar import (
    GrammarCache,
    GrammarCompiler,
    Matcher,
    fill_masks,
)
from jaxscale.inference.request import Guide, InvalidRequest, Overloaded
from jaxscale.inference.schemas import lenient
from jaxscale.inference.tools import forced_call
from jaxscale.models import Tokenizer


V = 320


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(['{"name": "to be", "size": 12}'] * 3, vocab_size=290)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    compiler = GrammarCompiler(tokenizer, vocab_size=V, eos_ids=[0], seconds=300)
    yield compiler
    compiler.close()


def allowed(*matchers):
    masks = np.zeros([len(matchers), V // 32], np.int32)
    fill_masks([(m, i) for i, m in enumerate(matchers)], masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def draw(tokenizer, matcher, rng, most=200):
    """Any allowed tokens, and the end as soon as it may be."""
    ids = []
    while len(ids) < most:
        (tokens,) = allowed(matcher)
        assert tokens and max(tokens) < tokenizer.vocab_size
        if 0 in tokens:
            assert matcher.complete
            return tokenizer.decode(ids)
        ids.append(rng.choice(sorted(tokens)))
        assert matcher.accept(ids[-1:]), matcher.error
    raise AssertionError(f"no end: {tokenizer.decode(ids)}")


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "minimum": 3, "maximum": 40},
        "kind": {"enum": ["é", None, 7]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_what_is_drawn_follows_the_guide(tokenizer, compiler, seed):
    rng = random.Random(seed)
    schema = Guide(kind="json_schema", text=json.dumps(SCHEMA))
    value = json.loads(draw(tokenizer, compiler.compile(schema), rng))
    assert len(value["name"]) <= 5 and 3 <= value["size"] <= 40
    assert value["kind"] in ("é", None, 7) and len(value) == 3
    regex = r"(不|ab{2,3})[0-9]{2}x?!"
    text = draw(tokenizer, compiler.compile(Guide(kind="regex", text=regex)), rng)
    assert re.fullmatch(regex, text)
    choices = ("to be", "to", "不", 'a "b"')
    guide = Guide(kind="choice", choices=choices)
    assert draw(tokenizer, compiler.compile(guide), rng) in choices


def test_choices_are_taken_by_the_letter(tokenizer, compiler):
    """Of thousands, whatever a pattern would make of them."""
    marks = "".join(map(chr, [*range(1, 48), *range(58, 65), *range(91, 97)])) + "{|}~"
    choices = (marks, *(f"item {i}" for i in range(3000)))
    matcher = compiler.compile(Guide(kind="choice", choices=choices))
    for choice in (marks, "item 0", "item 2999"):
        one = matcher.copy()
        assert one.accept(tokenizer.encode(choice)), choice
    assert not matcher.copy().accept(tokenizer.encode("item 3000"))
    assert not matcher.accept(tokenizer.encode("itemm"))


def test_any_object_and_only_objects(tokenizer, compiler):
    guide = Guide(kind="json_object")
    matcher = compiler.compile(guide)
    assert matcher.accept(tokenizer.encode('{"a": [1, {"b": null}]}'))
    assert matcher.finished and allowed(matcher) == [{0}] and matcher.error is None
    assert not compiler.compile(guide).accept(tokenizer.encode("[1]"))
    spaces = compiler.compile(guide)
    assert not spaces.accept(tokenizer.encode("{" + " " * 200 + "}"))


def test_matchers_of_one_guide_are_apart(tokenizer, compiler):
    guide = Guide(kind="choice", choices=("yes", "no"))
    first, second = compiler.compile(guide), compiler.compile(guide)
    begin = allowed(first)
    assert first.accept(tokenizer.encode("ye"))
    third = first.copy()
    assert first.accept(tokenizer.encode("s")) and first.finished
    assert allowed(second) == begin and not third.finished
    assert allowed(first, second, third) == [
        {0},
        begin[0],
        set(tokenizer.encode("s")),
    ]
    assert first.accept([0]) and first.error is None


def test_a_token_that_is_not_allowed_is_an_error(tokenizer, compiler):
    matcher = compiler.compile(Guide(kind="regex", text="ab"))
    assert not matcher.accept(tokenizer.encode("x"))
    assert "doesn't satisfy the grammar" in matcher.error and "\n" not in matcher.error


def test_rows_without_a_matcher_stay(compiler):
    masks = np.full([3, V // 32], 7, np.int32)
    fill_masks([(compiler.compile(Guide(kind="regex", text="a")), 1)], masks)
    assert (masks[[0, 2]] == 7).all() and (masks[1] != 7).any()
    fill_masks([], masks)


def test_grammars_in_memory_are_bounded(tokenizer):
    """However large a pattern is that takes a few characters to write."""
    compiler = GrammarCompiler(tokenizer, vocab_size=V, eos_ids=[0], seconds=300)
    for length in (900_000, 90_000):
        with pytest.raises(InvalidRequest, match="too many expressions"):
            compiler.compile(Guide(kind="regex", text=f"a{{{length}}}"))
    assert compiler._cache.size == 0  # what is refused is not kept
    compiler.compile(Guide(kind="choice", choices=("yes", "no")), "quiet")
    assert compiler._cache.size > 0
    compiler.close()
    cache = GrammarCache(1000)
    guides = [Guide(kind="regex", text=f"a{i}") for i in range(20)]
    cache.put(guides[0], Matcher(None), owner="quiet", size=100)
    for guide in guides[1:]:
        cache.put(guide, Matcher(None), owner="loud", size=200)
        assert cache.size <= 1000
    # Who fills it makes room, by what it has not used for longest.
    kept = [guide for guide in guides if cache.get(guide) is not None]
    assert kept == [guides[0], *guides[-4:]]
    cache.put(guides[1], Matcher(None), owner="loud", size=1001)
    assert cache.get(guides[1]) is None and cache.size == 900


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(a", "cannot be used: .*unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"a[^\s\S]", "no text matches the regex"),
        ("json_schema", "[1", "malformed: Expecting"),
        ("json_schema", "[1]", "malformed: a JSON schema is an object"),
        ("json_schema", '{"type": 5}', "type must be a string"),
        ("json_schema", '{"$ref": "http://a.b/c"}', "not present in a registry"),
        ("json_schema", '{"a":' * 9000 + "1" + "}" * 9000, "malformed: maximum rec"),
    ],
)
def test_guides_that_cannot_be_used(compiler, kind, text, message):
    with pytest.raises(InvalidRequest, match=message):
        compiler.compile(Guide(kind=kind, text=text))


def test_compilation_is_bounded(tokenizer, monkeypatch):
    """By time, by how many wait, and a slow one does not answer twice."""
    compiler = GrammarCompiler(tokenizer, vocab_size=V, eos_ids=[0], seconds=0.05)
    go = threading.Event()
    monkeypatch.setattr(compiler, "_compile", lambda guide: go.wait(120) and 1 / 0)
    guide = Guide(kind="regex", text="a")
    with pytest.raises(InvalidRequest, match=r"regex took more than 0\.05 sec"):
        compiler.compile(guide)
    others = [compiler.submit(guide) for _ in range(63)]
    with pytest.raises(Overloaded, match="64 grammars are being compiled"):
        compiler.submit(guide)
    go.set()
    for other in others:
        assert isinstance(other.exception(120), InvalidRequest | ZeroDivisionError)
    compiler.close()


def test_vocabularies(tokenizer):
    with pytest.raises(ValueError, match=r"vocab_size 100 is less than the 2.. tokens"):
        GrammarCompiler(tokenizer, vocab_size=100, eos_ids=[0])
    for ids in ([], [V]):
        with pytest.raises(ValueError, match="must be tokens of the vocabulary"):
            GrammarCompiler(tokenizer, vocab_size=V, eos_ids=ids)


def test_compact_json(compiler, tokenizer):
    """Without spaces, which cost a token each."""
    schema = json.dumps({"properties": {"a": {"type": "string"}}, "required": ["a"]})
    for compact in (False, True):
        guide = Guide(kind="json_schema", text=schema, compact=compact)
        spaced = compiler.compile(guide).accept(tokenizer.encode('{"a": "x"}'))
        assert spaced is not compact
        assert compiler.compile(guide).accept(tokenizer.encode('{"a":"x"}'))


@pytest.mark.parametrize(
    ("schema", "ignored"),
    [
        ({"type": "array", "uniqueItems": True}, ["uniqueItems"]),
        ({"propertyNames": {"pattern": "^a"}}, ["propertyNames"]),
        ({"not": {"type": "null"}, "if": {}, "then": {}}, ["not", "if", "then"]),
        ({"type": "string", "pattern": "^(?!a)b"}, ["pattern"]),
        ({"type": "string", "pattern": "^a+$"}, []),
        ({"const": {"uniqueItems": True}}, []),
        ({"properties": {"not": {"type": "null"}}}, []),
        ({"anyOf": [{"$ref": "#/$defs/not"}], "$defs": {"not": {"not": {}}}}, ["not"]),
        *(
            (
                {"type": "string", "format": name},
                [f"format={name}"] if name in ("binary", "cuid2", "int32") else [],
            )
            for name in ("binary", "date-time", "email", "cuid2", "uri", "int32")
        ),
    ],
)
def test_schemas_without_what_no_grammar_enforces(compiler, schema, ignored):
    """What is left compiles; nothing is left out that would have."""
    left, names = lenient(schema)
    assert names == [n for n in ignored if n not in ("if", "then")]
    compiler.compile(Guide(kind="json_schema", text=json.dumps(left)))
    if names:
        with pytest.raises(InvalidRequest):
            compiler.compile(Guide(kind="json_schema", text=json.dumps(schema)))
    else:
        assert left == {k: v for k, v in schema.items() if k not in ("if", "then")}


def test_schemas_of_tools_with_definitions(compiler, tokenizer):
    """Also those that refer to themselves."""
    tree = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/Node"}, "same": {"$ref": "#"}},
        "$defs": {"Node": {"type": "integer"}},
    }
    tools = [{"function": {"name": n, "parameters": tree}} for n in ("f", "g")]
    guide, ignored = forced_call(tools, "required")
    assert ignored == []
    call = '{"name":"g","arguments":{"same":{"next":5}}}'
    matcher = compiler.compile(guide)
    assert matcher.accept(tokenizer.encode(call)) and matcher.finished
