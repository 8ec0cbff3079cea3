"""What encoders take for a text."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.models.tokenizer import EncodedText


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
    ordered = hasattr(texts, "__getitem__") and not isinstance(texts, Mapping)
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
