"""Detection of texts that are too long for a model, without tokenizing all of them.

Tokenizing takes a hundred times the memory of a text. The number of tokens is not known
before; but a few times the model's limit is enough to see that a text is too long,
whatever the tokenizer does with spaces and long words.
"""

import dataclasses
from collections.abc import Callable

from jaxscale.inference.request import InvalidRequest
from jaxscale.models.tokenizer import Tokenizer


_CERTAIN = 2**20  # characters allowed for tokenizers that drop some
_USUAL = 8  # characters per token: shorter texts are tokenized as a whole
_SMALLEST, _LARGEST = 2**12, 2**16
# Tokens of a piece that the whole text may not have: words split by the cut.
_SLACK = 8


def _never() -> bool:
    return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextBound:
    """Checks whether texts are too long for a model.

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
    """Tokenizer of the model."""
    most: int
    """Maximum number of tokens."""
    left: Callable[[], bool] = _never
    """Function that says whether the client has left."""

    @property
    def characters(self) -> int:
        """Maximum characters of a text that fits.

        Each token is at most as long as the longest. Characters that a tokenizer drops,
        such as joined spaces, may come on top: up to a million are allowed.
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
        """Raise if `text` is too long to be tokenized before truncation.

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
            InvalidRequest: the client has left.
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
            # Words stay whole if there are any.
            end = text.rfind(" ", start + size // 2, end) if end < len(text) else end
            end = start + size if end < 0 else end
            found += max(0, len(self.tokenizer.encode(text[start:end])) - _SLACK)
            start = end
            # Twice as many: tokens of pieces are almost those of the text.
            if found > 2 * self.most:
                return text[:start]
        return text
