"""What the inference engine sends to clients, piece by piece."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Literal


type FinishReason = Literal["stop", "length", "aborted", "timeout", "error"]
"""Finish reason of a completion: a stop token or string, the maximum length, abort by
the client, its deadline, or logits that were not finite."""


@dataclasses.dataclass(slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of a token and of the most likely ones at its position."""

    token: int
    """The token at this position."""
    logprob: float
    """Log-probability of the token, in nats."""
    top: tuple[tuple[int, float], ...] = ()
    """Tokens and log-probabilities, the most likely first."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Output:
    """New output of one of the completions of a request.

    It is not frozen, since one is made for each row of each step, and setting fields of
    a frozen class takes four times as long.

    Example:
        >>> parts = [(5, 6), (7,)]
        >>> news = [Output(request="a", index=0, tokens=part) for part in parts]
        >>> [token for output in news for token in output.tokens]
        [5, 6, 7]
    """

    request: str
    """The id of the request."""
    index: int
    """Index of the completion, 0 to n - 1."""
    tokens: tuple[int, ...] = ()
    """Tokens since the last output."""
    text: str = ""
    """Text since the last output."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `tokens`, if requested."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Once, if requested: None for the first token, then one for each."""
    finish: FinishReason | None = None
    """Finish reason; None while it runs."""
    stop: str | int | None = None
    """The stop string or token that ended it."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    error: str | None = None
    """Error message, for the reason ``"error"``."""
    blames_request: bool = False
    """Whether the error is the request's: its guide allows no token."""


def joined(outputs: Iterable[Output]) -> list[Output]:
    """The outputs of one request, merged to one per completion.

    Example:
        >>> first, second = (Output(request="a", index=0, text=t) for t in ("to", "be"))
        >>> [output.text for output in joined([first, second])]
        ['tobe']
    """
    by_index: dict[int, list[Output]] = {}
    for output in outputs:
        by_index.setdefault(output.index, []).append(output)
    return [_joined(each) for each in by_index.values()]


def _joined(outputs: Sequence[Output]) -> Output:
    if len(outputs) == 1:
        return outputs[0]
    last, flat = outputs[-1], itertools.chain.from_iterable
    return Output(
        request=last.request,
        index=last.index,
        tokens=tuple(flat([output.tokens for output in outputs])),
        text="".join([output.text for output in outputs]),
        logprobs=tuple(flat([output.logprobs for output in outputs])),
        prompt_logprobs=tuple(flat([output.prompt_logprobs for output in outputs])),
        finish=last.finish,
        stop=last.stop,
        cached_tokens=last.cached_tokens,
        error=last.error,
        blames_request=last.blames_request,
    )
