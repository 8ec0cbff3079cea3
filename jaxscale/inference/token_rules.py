"""Tokens that a request must not sample."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from jaxscale.inference.request import SamplingParams


def token_mask(tokens: Iterable[int], vocab_size: int) -> Int32[np.ndarray, "words"]:
    """One bit per token, 32 in a word, the lowest first; set for `tokens`.

    Example:
        >>> token_mask([0, 33, 99], 40).tolist()
        [1, 2]
    """
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[[token for token in tokens if token < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


class TokenRules:
    """The allowed tokens and forbidden token sequences of one sequence.

    Example:
        >>> rules = TokenRules(8, allowed=None, barred=[(1, 2), (5,)])
        >>> masks = np.full((2, 1), 255, np.int32)
        >>> rules.narrow(masks[0])
        >>> rules.accept([1])
        >>> rules.narrow(masks[1])
        >>> [f"{mask:08b}" for mask in masks[:, 0]]
        ['11011111', '11011011']
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed: Iterable[int] | None,
        barred: Sequence[Sequence[int]],
    ) -> None:
        """Start before the first token.

        Args:
            vocab_size: V, vocabulary size of the model.
            allowed: The only tokens that may be sampled; None is all.
            barred: Token sequences that must not occur, none empty.
        """
        everything = range(vocab_size) if allowed is None else allowed
        singles = [sequence[0] for sequence in barred if len(sequence) == 1]
        self._base = token_mask(everything, vocab_size)
        self._base &= ~token_mask(singles, vocab_size)
        self._vocab_size = vocab_size
        self._lasts: dict[tuple[int, ...], list[int]] = {}
        for *before, last in barred:
            if before:
                self._lasts.setdefault(tuple(before), []).append(last)
        self._lengths = sorted({len(before) for before in self._lasts})
        self._drawn: tuple[int, ...] = ()

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> "TokenRules | None":
        """The rules of a request, None if it has none."""
        allowed = params.allowed_token_ids
        if allowed is None and not params.bad_token_ids:
            return None
        return cls(vocab_size, allowed=allowed, barred=params.bad_token_ids)

    def copy(self) -> "TokenRules":
        """A copy for another sequence; constant parts are shared."""
        made = object.__new__(TokenRules)
        made.__dict__.update(self.__dict__)
        return made

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by sampled tokens."""
        most = max(self._lengths, default=0)
        self._drawn = (*self._drawn, *tokens)[-most:] if most else ()

    def narrow(self, mask: Int32[np.ndarray, "words"]) -> None:
        """Clear the bits of tokens that must not follow."""
        mask &= self._base
        lasts = [
            token
            for length in self._lengths
            for token in self._lasts.get(self._drawn[-length:], ())
        ]
        if lasts:
            mask &= ~token_mask(lasts, self._vocab_size)
