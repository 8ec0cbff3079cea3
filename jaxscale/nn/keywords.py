"""Arguments that other libraries have, answered with the way that leads there here."""

import difflib
import functools
import inspect
from collections.abc import Callable


_PACKED = (
    "sequences are packed instead of masked: `jaxscale.nn.pack_sequences` makes rows "
    "and their cu_seqlens"
)
_STATE = "give state=jaxscale.nn.attention_state(x.shape[:2], cu_seqlens=cu_seqlens)"
_ADVICE = {
    "attention_mask": f"{_PACKED}, and an encoder takes padded rows by "
    "model.padded(tokens, mask=attention_mask)",
    "mask": _PACKED,
    "padding_mask": _PACKED,
    "segment_ids": f"{_PACKED}, the bounds of the segments of each row",
    "input_ids": "token ids are the first argument, tokens",
    "position_ids": "it is called positions",
    "token_type_ids": "it is called token_types, of encoders",
    "labels": "a model gives logits, and `jaxscale.training` has the losses",
    "cu_seqlens": _STATE,
    "positions": _STATE.replace("cu_seqlens=cu_seqlens", "positions=positions"),
}


def explain_keywords[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A function that says of an unknown keyword which one is meant.

    Example:
        >>> @explain_keywords
        ... def call(*, config=None): ...
        >>> call(confg=3)
        Traceback (most recent call last):
        ...
        TypeError: call() takes no 'confg' (did you mean config?); it takes config
    """
    known = [
        name
        for name in inspect.signature(function).parameters
        if name not in ("self", "cls")
    ]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{function.__qualname__}() {_answer(name, known)}")
        return function(*args, **kwargs)

    return call


def _answer(name: str, known: list[str]) -> str:
    if name in _ADVICE:
        return f"takes no {name!r}: {_ADVICE[name]}"
    close = difflib.get_close_matches(name, known, n=1)
    guess = f" (did you mean {close[0]}?)" if close else ""
    return f"takes no {name!r}{guess}; it takes {', '.join(known)}"
