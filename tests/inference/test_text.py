"""Deltas are together the text of all tokens, and show nothing of a stop string."""

import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.inference.request import SamplingParams
from jaxscale.inference.text import Detokenizer, StopStrings, TextStream
from jaxscale.models import Tokenizer


class Bytes:
    """A tokenizer whose tokens are any bytes at all."""

    vocab_size = 2**31

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids, *, skip_special_tokens=False):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


def deltas_of(tokenizer, ids, prompt=()):
    stream = Detokenizer(tokenizer, prompt)
    return [*map(stream.add, ids), stream.flush()]


def splits(data):
    """Every way to cut `data` in pieces."""
    for cuts in range(2 ** (len(data) - 1)):
        pieces, start = [], 0
        for i in range(1, len(data) + 1):
            if i == len(data) or cuts >> (i - 1) & 1:
                pieces.append(data[start:i])
                start = i
        yield pieces


@settings(deadline=None, max_examples=60)
@given(
    ids=st.lists(st.integers(0, 271), max_size=30),
    prompt=st.lists(st.integers(0, 271), max_size=5),
    skip=st.booleans(),
)
def test_known_tokens_have_the_texts_that_decoding_gives(ids, prompt, skip):
    """Bytes that are no characters, tokens of several bytes, control tokens."""
    text = ["to be or not to be, 不 é 😀"] * 3
    tokenizer = Tokenizer.train(text, 272, special_tokens=["<|end|>"])
    assert tokenizer.joins_bytes
    deltas = []
    for joins in (False, True):
        tokenizer.joins_bytes = joins
        stream = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
        deltas.append([*map(stream.add, ids), stream.flush()])
    assert deltas[0] == deltas[1]


@pytest.mark.parametrize(
    "data",
    [
        "aé",
        "不é",
        "😀a",
        "é\ufffdb",
        b"a\xff\xe4\xb8",
        b"\xe4\xb8a\xf0\x9f\x98",
        b"\x80\xc3",
    ],
)
def test_every_split_of_a_text(data):
    data = data.encode() if isinstance(data, str) else data
    whole = data.decode("utf-8", "replace")
    for pieces in splits(data):
        deltas = deltas_of(Bytes(pieces), range(len(pieces)))
        assert "".join(deltas) == whole, pieces
        # What is certain is not held back, unless U+FFFD makes it doubtful.
        if "\ufffd" not in whole:
            assert deltas[-1] == ""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=5), min_size=1, max_size=150), st.data())
def test_any_bytes(pieces, data):
    at = data.draw(st.integers(0, len(pieces)))
    tokenizer = Bytes(pieces)
    ids = list(range(len(pieces)))
    before = tokenizer.decode(ids[:at])
    added = "".join(deltas_of(tokenizer, ids[at:], ids[:at]))
    whole = tokenizer.decode(ids)
    if whole.startswith(before):
        assert before + added == whole
    else:  # the prompt ended within a character, which is completed
        assert whole.endswith(added) and len(before + added) <= len(whole) + 3
        assert before.rstrip("\ufffd") + added == whole or "\ufffd" in whole


def test_bytes_that_never_become_a_character_do_not_wait_for_ever():
    stream = Detokenizer(Bytes([b"\xff", b"\xe4", b"\xb8", b"\x8d"]))
    deltas = [stream.add(0) for _ in range(1000)]
    assert len("".join(deltas)) > 900 and len(stream._window) < 80
    deltas += [stream.add(token) for token in (1, 2, 3)]
    assert "".join(deltas) + stream.flush() == "\ufffd" * 1000 + "不"


def sentencepiece():
    """As LLaMA's: words begin with a visible space, bytes where a piece is missing."""
    vocab = [("<unk>", 0.0), ("</s>", 0.0)]
    vocab += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    vocab += [(piece, -3.0) for piece in ("▁", "▁to", "▁be", "or", "é", "b", "e")]
    backend = tokenizers.Tokenizer(
        tokenizers.models.Unigram(vocab, unk_id=0, byte_fallback=True)
    )
    backend.add_special_tokens(["</s>"])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend, eos_token="</s>")


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_tokenizers(kind):
    if kind == "bytes":
        tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=270)
    else:
        tokenizer = sentencepiece()
    text = "to be, or é 不😀 to be  x"
    ids = tokenizer.encode(text)
    assert len(ids) < len(text.encode())
    for at in range(len(ids)):
        prompt, new = ids[:at], ids[at:]
        new.insert(len(new) // 2, tokenizer.eos_id)
        new.insert(0, tokenizer.eos_id)
        added = "".join(deltas_of(tokenizer, [*new, tokenizer.vocab_size + 5], prompt))
        assert added == tokenizer.continuation(prompt, new), at
    # The library's own stream says the same, where it says something.
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    theirs = tokenizers.decoders.DecodeStream(skip_special_tokens=True)
    ours = Detokenizer(tokenizer)
    for token in ids:
        assert (theirs.step(backend, token) or "") == ours.add(token)


def first_stop(text, stops, include=False):
    """By definition: up to the stop string that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=60, deadline=None)
@given(
    st.text("ab不", min_size=1, max_size=30),
    st.lists(st.text("ab不", min_size=1, max_size=4), max_size=4),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_stop_strings(text, stops, include, seed):
    rng = random.Random(seed)
    data, pieces = text.encode(), []
    while data:
        size = rng.randint(1, 5)
        pieces.append(data[:size])
        data = data[size:]
    params = SamplingParams(stop=stops, include_stop=include)
    stream = TextStream(Bytes(pieces), [], params)
    expected, stop = first_stop(text, stops, include)
    shown, at = "", 0
    while at < len(pieces):
        count = rng.randint(1, 3)
        ids = list(range(len(pieces)))[at : at + count]
        at += count
        shown += stream.add(ids, "length" if at >= len(pieces) else None)
        assert expected.startswith(shown)
        # Only what may begin a stop string is held back.
        if stream.stop is None and at < len(pieces):
            known = "".join(deltas_of(Bytes(pieces), range(at))[:-1])
            held = known[len(shown) :]
            assert not held or any(s.startswith(held) for s in stops)
    assert (shown, stream.stop) == (expected, stop)


def test_of_strings_that_end_together_the_longest_counts():
    for stops in (["b", "ab", "xab"], ["ab", "xab", "b"]):
        stream = TextStream(Bytes([b"-xa", b"b"]), [], SamplingParams(stop=stops))
        assert (stream.add([0]), stream.add([1]), stream.stop) == ("-", "", "xab")


def test_stop_tokens_have_no_text_unless_wanted():
    tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=260)
    ids = tokenizer.encode("to b")
    for include, text in ((False, "to "), (True, "to b")):
        stream = TextStream(tokenizer, [], SamplingParams(include_stop=include))
        assert stream.add(ids[:-1]) + stream.add(ids[-1:], "stop") == text
        assert stream.num_tokens == len(ids)


def test_what_was_held_is_shown_at_the_end():
    stream = TextStream(Bytes([b"an EN", b"\xe4"]), [], SamplingParams(stop=["END"]))
    assert stream.add([0]) == "an "
    assert stream.add([1], "length") == "EN\ufffd"


def test_no_stop_before_min_tokens():
    params = SamplingParams(stop=["a"], min_tokens=2)
    stream = TextStream(Bytes([b"a", b"a", b"ba"]), [], params)
    assert stream.add([0]) + stream.add([1]) == "aa"
    assert (stream.add([2]), stream.stop) == ("b", "a")


def test_ten_thousand_stop_strings_cost_as_much_as_one():
    """Counted in searches: a few a character."""
    stops = [f"stop {i} here" for i in range(10_000)] + ["a" * k for k in range(5, 99)]
    many = StopStrings(stops)
    searches = 0

    class Counted(list):
        def __getitem__(self, index):
            nonlocal searches
            searches += isinstance(index, int)
            return super().__getitem__(index)

    many._sorted = Counted(many._sorted)
    many._endings = Counted(many._endings)
    text = "stop 77 heroes aaaa stop 9999 her" * 20
    begun = ""
    for character in text:
        begun = many.next(begun, character)
        assert many.ending(begun) is None if begun else True
    assert searches < 60 * len(text)
