"""Texts that are too long for a model, found before all of them is tokenized.

Tokenizing takes a hundred times the memory of a text. How many tokens a text has is not
known before; but no more than a few times the model's length of it has to be read to
know that it is too long, whatever the tokenizer makes of spaces and long words.
"""

import dataclasses
from collections.abc import Callable

from jaxscale.inference.request import InvalidRequest
from jaxscale.models.tokenizer import Tokenizer


_CERTAIN = 2**20  # characters that a tokenizer which drops some may need
_USUAL = 8  # characters a token: texts of fewer are tokenized as a whole
_SMALLEST, _LARGEST = 2**12, 2**16
# Tokens of a piece that the whole text may not have: words that the cut divides.
_SLACK = 8


def _never() -> bool:
    return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextBound:
    """Says whether texts are too long for a model.

    Example:
        >>> tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=260)
        >>> bound = TextBound(tokenizer=tokenizer, most=4)
        >>> len(bound.beginning("to be " * 10**6)) < 10**4
        True
        >>> bound.check("to be " * 10**6)
        Traceback (most recent call last):
        ...
        jaxscale.inference.request.InvalidRequest: a text of 6000000 characters has more
        tokens than the 4 that there is room for; shorten it
    """

    tokenizer: Tokenizer
    """Of the model."""
    most: int
    """Tokens that there is room for."""
    left: Callable[[], bool] = _never
    """Whether nobody waits any more."""

    @property
    def characters(self) -> int:
        """Characters of which no text that fits has more.

        Each token is at most as long as the longest. What a tokenizer drops, such as
        spaces that it joins, may come on top: it is let pass up to a million.
        """
        return max(_CERTAIN, self.most * self.tokenizer.longest_token)

    def check(self, text: str) -> None:
        """Raise unless `text` may have at most `most` tokens.

        Raises:
            InvalidRequest: it certainly has more.
        """
        fits = len(text) <= self.characters
        if not fits or len(self.beginning(text)) < len(text):
            raise InvalidRequest(
                f"a text of {len(text)} characters has more tokens than the "
                f"{self.most} that there is room for; shorten it"
            )

    def check_characters(self, text: str) -> None:
        """Raise where `text` is too long to be tokenized, to be cut afterwards.

        Raises:
            InvalidRequest: it has more characters than any text that fits.
        """
        if len(text) > self.characters:
            raise InvalidRequest(
                f"a text of {len(text)} characters is too long to be tokenized, at "
                f"most {self.characters} are; send less of it"
            )

    def beginning(self, text: str) -> str:
        """The part of a text that has at least its first `most` tokens.

        Raises:
            InvalidRequest: nobody waits any more.
        """
        text = text[: self.characters]
        if len(text) <= max(_USUAL * self.most, _SMALLEST):
            return text
        size = min(max(_USUAL * self.most, _SMALLEST), _LARGEST)
        start = found = 0
        while start < len(text):
            if self.left():
                raise InvalidRequest("the client has left")
            end = start + size
            # Words stay whole where there are any.
            end = text.rfind(" ", start + size // 2, end) if end < len(text) else end
            end = start + size if end < 0 else end
            found += max(0, len(self.tokenizer.encode(text[start:end])) - _SLACK)
            start = end
            # Twice as many: tokens of pieces are almost those of the text.
            if found > 2 * self.most:
                return text[:start]
        return text
