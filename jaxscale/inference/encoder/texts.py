"""What encoders take for a text, and its tokens."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.models.tokenizer import EncodedText, Tokenizer


logger = logging.getLogger("jaxscale.inference")

type Text = str | tuple[str, str] | list[int] | EncodedText
"""A text, a pair of texts, or the token ids of a text, control tokens included, as a
list or as `Encoder.tokenize` gives them."""


def as_encoded(ids: list[int]) -> EncodedText:
    """Token ids as one text, with all tokens."""
    count = len(ids)
    return EncodedText(
        ids=ids, types=[0] * count, spans=[(0, 0)] * count, control=[False] * count
    )


def check_texts(texts: Sequence[Text]) -> None:
    """Raise unless these are texts.

    Raises:
        TypeError: `texts` is no list, or has an element that is no text.
        ValueError: a text is empty.
    """
    if isinstance(texts, str):
        raise TypeError(
            "texts must be a list of strings, got one string; pass [text] for one text"
        )
    # Results are in the order of the texts, so `texts` must be an ordered sequence.
    ordered = type(texts) is list or (
        hasattr(texts, "__getitem__") and not isinstance(texts, Mapping)
    )
    if not ordered:
        raise TypeError(
            f"texts must be a list of strings, got {type(texts).__name__}; pass "
            "list(texts)"
        )
    for i, text in enumerate(texts):
        if isinstance(text, EncodedText) or (
            isinstance(text, str) and text and not text.isspace()
        ):
            continue
        if isinstance(text, list) and all(type(token) is int for token in text):
            if not text:
                raise ValueError(f"texts[{i}] is empty; leave it out")
            continue
        parts: Any = text if isinstance(text, tuple) else (text,)
        if not all(isinstance(part, str) for part in parts) or (
            isinstance(text, tuple) and len(text) != 2
        ):
            raise TypeError(
                f"texts[{i}] must be a string or a pair of strings (a tuple), got "
                f"{text!r}"
            )
        if not all(part.strip() for part in parts):
            raise ValueError(f"texts[{i}] {text!r} is empty; leave it out")


def tokenized(
    texts: Sequence[Text],
    tokenizer: Tokenizer,
    vocab_size: int,
    limit: int,
    truncate: bool,
    spans: bool,
) -> list[EncodedText]:
    """The tokens of texts; see `Encoder.tokenize`."""
    check_texts(texts)
    encoded = _encoded(texts, tokenizer, vocab_size, spans)
    # The arrays are made here, since a server tokenizes on other threads.
    long = [i for i, text in enumerate(encoded) if len(text.array) > limit]
    if long and not truncate:
        raise ValueError(
            f"texts[{long[0]}] has {len(encoded[long[0]].ids)} tokens, more than "
            f"max_length {limit} (and so have {len(long) - 1} others); shorten "
            "them, or cut them with truncate=True"
        )
    if long:
        logger.info(
            "%d of %d texts are cut at %d tokens", len(long), len(encoded), limit
        )
        cut = _encoded([texts[i] for i in long], tokenizer, vocab_size, spans, limit)
        for i, text in zip(long, cut, strict=True):
            encoded[i] = text
    for i, text in enumerate(encoded):
        # Characters without a token, such as a zero-width space, leave only the
        # template.
        if all(text.control):
            raise ValueError(f"texts[{i}] {texts[i]!r} has no tokens; leave it out")
    return encoded


def _encoded(
    texts: Sequence[Text],
    tokenizer: Tokenizer,
    vocab_size: int,
    spans: bool,
    max_length: int | None = None,
) -> list[EncodedText]:
    """Texts in tokens; token ids as they are."""
    words = [text for text in texts if isinstance(text, (str, tuple))]
    options: Any = {"max_length": max_length, "spans": spans}
    found = tokenizer.encode_inputs(words, **options) if words else []
    if len(found) == len(texts):
        return found
    made = iter(found)
    encoded = []
    for i, text in enumerate(texts):
        if isinstance(text, (str, tuple)):
            encoded.append(next(made))
            continue
        known = isinstance(text, EncodedText)
        # Programs rely on it. A negative number is a large one without its sign.
        if known and text.array.view(np.uint32).max(initial=0) < vocab_size:
            encoded.append(_cut(text, max_length))
            continue
        ids = text.ids if known else text
        wrong = [token for token in ids if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(
                f"texts[{i}] holds the token {wrong[0]}, outside the vocabulary of "
                f"{vocab_size}; token ids are those of the model's own tokenizer: send "
                "texts instead"
            )
        encoded.append(as_encoded(ids[:max_length]))
    return encoded


def _cut(text: EncodedText, max_length: int | None) -> EncodedText:
    if max_length is None or len(text.ids) <= max_length:
        return text
    return EncodedText(
        ids=text.ids[:max_length],
        types=text.types[:max_length],
        spans=text.spans[:max_length],
        control=text.control[:max_length],
    )
