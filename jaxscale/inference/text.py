"""Incremental detokenization, up to the first stop string.

A delta contains only text that no later token can change: incomplete characters are
held back, and so is a possible beginning of a stop string.
"""

import bisect
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from jaxscale.inference.output import FinishReason
from jaxscale.inference.request import SamplingParams


_LOST = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 16  # tokens before the first one; a character has at most four bytes
_LONGEST_WAIT = 32


@runtime_checkable
class TextDecoder(Protocol):
    """Interface of a detokenizer, as `jaxscale.models.Tokenizer`."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        ...

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `ids`, with U+FFFD for invalid bytes."""
        ...


class Detokenizer:
    """The text that tokens append to a prompt, in deltas.

    The deltas and the result of `flush` together are the text of all tokens. A token is
    decoded after the few before it, on which its leading space may depend.

    Example:
        >>> from jaxscale.models import Tokenizer
        >>> tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=260)
        >>> stream = Detokenizer(tokenizer)
        >>> [stream.add(token) for token in tokenizer.encode("a 不")]
        ['a', ' ', '', '', '不']
    """

    def __init__(
        self,
        tokenizer: TextDecoder,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """Start after a prompt.

        Args:
            tokenizer: Detokenizer.
            prompt: Token ids of the prompt; its text is not repeated, but an incomplete
                character at its end is completed.
            skip_special_tokens: Leave control tokens out of the text.
        """
        self._tokenizer, self._size = tokenizer, tokenizer.vocab_size
        self._skip = skip_special_tokens
        # Where the text of tokens is that of each, a known one need not be decoded.
        joins = getattr(tokenizer, "joins_bytes", False)
        self._pieces = _pieces(tokenizer, skip_special_tokens) if joins else None
        # Tokens whose text so far is `_sent`; then the pending ones.
        self._window = self._context(prompt)
        self._sent = self._text(self._window)
        self._num_sent = len(self._window)

    def add(self, token: int) -> str:
        """The text that is final after one more token, usually that token's.

        Tokens past the tokenizer's vocabulary, which tables are padded to, have no
        text.
        """
        if token >= self._size:
            return ""
        if self._pieces is not None and self._num_sent == len(self._window):
            piece = self._pieces.get(token)
            if piece is None:
                piece = self._pieces[token] = self._text([token])
            if _LOST not in piece:  # nor is it a part of a character
                if piece:
                    self._window, self._num_sent, self._sent = [token], 1, piece
                return piece
        self._window.append(token)
        text = self._text(self._window)
        if not text.endswith(_LOST):
            if text == self._sent:
                self._window.pop()
                return ""
            return self._send(text, len(self._window))
        if len(self._window) - self._num_sent > _LONGEST_WAIT:
            return self._send_part(text)
        return ""

    def flush(self) -> str:
        """Return pending text at the end: incomplete characters."""
        return self._send(self._text(self._window), len(self._window))

    def _send(self, text: str, count: int) -> str:
        """Return the new part of `text`, the text of the first tokens."""
        known = len(self._sent)
        if not text.startswith(self._sent):
            # The prompt ended within a character.
            pairs = zip(self._sent, text, strict=False)
            known = len(
                list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            )
        delta = text[known:]
        if delta:
            # Keep the newest tokens, after which the following ones are decoded, and
            # with the end of a character also its beginning.
            newest = self._text(self._window[self._num_sent : count])
            if _LOST not in newest or count > 2 * _LONGEST_WAIT:
                del self._window[: self._num_sent]
                self._num_sent, self._sent = count - self._num_sent, newest
            else:
                self._num_sent, self._sent = count, text
        return delta

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt, from one that begins a character."""
        known = [t for t in prompt[-_CONTEXT:] if t < self._tokenizer.vocab_size]
        starts = (known[start:] for start in range(min(4, len(known))))
        whole = (ids for ids in starts if not self._text(ids).startswith(_LOST))
        return next(whole, known)

    def _send_part(self, text: str) -> str:
        """Send invalid bytes up to a token that begins a character."""
        for count in range(len(self._window) - 1, self._num_sent, -1):
            first, rest = self._window[:count], self._window[count:]
            begins = self._text(first)
            if begins + self._text(rest) == text:
                return self._send(begins, count)
        return ""

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


@functools.lru_cache(maxsize=16)
def _pieces(tokenizer: TextDecoder, skip_special_tokens: bool) -> dict[int, str]:
    """The texts of single tokens, as far as they were needed."""
    del tokenizer, skip_special_tokens  # the key
    return {}


class StopStrings:
    """A set of stop strings, for incremental search.

    A character costs a few searches in a sorted list, for any number of strings.

    Example:
        >>> stops = StopStrings(["END", "###"])
        >>> stops.next("E", "N"), stops.next("EN", "#"), stops.next("#", "x")
        ('EN', '#', '')
        >>> stops.ending("x###"), stops.ending("x##")
        ('###', None)
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._sorted = sorted(set(strings))
        self._firsts = {string[0] for string in self._sorted}
        self._lengths = sorted({len(s) for s in self._sorted}, reverse=True)
        self._all = set(self._sorted)
        # Reversed, and without those that end in another: one search finds whether a
        # text ends in any.
        self._endings: list[str] = []
        for string in sorted(string[::-1] for string in self._sorted):
            if not self._endings or not string.startswith(self._endings[-1]):
                self._endings.append(string)

    def __bool__(self) -> bool:
        return bool(self._sorted)

    def next(self, begun: str, character: str) -> str:
        """The longest suffix of `begun` + `character` that is a prefix of a string.

        Args:
            begun: The same for the text before.
            character: The next one.
        """
        if not begun and character not in self._firsts:
            return ""
        begun += character
        # As in Knuth-Morris-Pratt: each dropped character was added once.
        while begun:
            index = bisect.bisect_left(self._sorted, begun)
            if index < len(self._sorted) and self._sorted[index].startswith(begun):
                break
            begun = begun[1:]
        return begun

    def ending(self, text: str) -> str | None:
        """The longest string that `text` ends in, None if there is none."""
        backwards = text[::-1]
        index = bisect.bisect_right(self._endings, backwards) - 1
        if index < 0 or not backwards.startswith(self._endings[index]):
            return None
        found = (text[-length:] for length in self._lengths if length <= len(text))
        return next(ending for ending in found if ending in self._all)


stop_strings = functools.lru_cache(maxsize=64)(StopStrings)
"""`StopStrings` of a tuple, cached for requests that share it."""


def ends_by_text(params: SamplingParams) -> bool:
    """Whether what ends a completion depends on its text."""
    return bool(params.stop) or params.guided is not None


class TextStream:
    """The text of one completion, as its client sees it.

    Example:
        >>> from jaxscale.models import Tokenizer
        >>> tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=260)
        >>> stream = TextStream(tokenizer, [], SamplingParams(stop=["be"]))
        >>> stream.add(tokenizer.encode("to be or")), stream.stop
        ('to ', 'be')
    """

    def __init__(
        self, tokenizer: TextDecoder, prompt: Sequence[int], params: SamplingParams
    ) -> None:
        """Start without text.

        Args:
            tokenizer: Detokenizer.
            prompt: Token ids of the prompt.
            params: Stop strings, and whether they are part of the text.
        """
        self._detokenizer = Detokenizer(
            tokenizer, prompt, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = stop_strings(tuple(params.stop))
        self._searched, self._include = bool(self._stops), params.include_stop
        self._free = params.min_tokens
        self._begun = ""
        self.stop: str | None = None
        """The stop string that was found."""
        self.num_tokens = 0
        """Tokens up to the end, including those of the stop string."""

    def add(self, tokens: Sequence[int], finish: FinishReason | None = None) -> str:
        """The text that is final after these tokens.

        Nothing follows a stop string: once `stop` is set, tokens are ignored.

        Args:
            tokens: The next ones.
            finish: Finish reason, if the last token ended the text. A stop token has
                text only if `include_stop` says so.
        """
        if not self._searched and finish is None:  # as nearly all
            self.num_tokens += len(tokens)
            return "".join(map(self._detokenizer.add, tokens))
        deltas = []
        for i, token in enumerate(tokens):
            if self.stop is not None:
                break
            self.num_tokens += 1
            stops = finish == "stop" and i == len(tokens) - 1
            if not stops or self._include:
                deltas.append(self._until_stop(self._detokenizer.add(token)))
        if finish is not None and self.stop is None:
            deltas.append(self._until_stop(self._detokenizer.flush()))
        if finish is not None and self.stop is None:
            deltas.append(self._begun)
            self._begun = ""
        return "".join(deltas)

    def _until_stop(self, text: str) -> str:
        if not self._searched or self.num_tokens <= self._free:
            return text
        held = self._begun + text
        done = len(self._begun)
        for end, character in enumerate(text, start=done + 1):
            self._begun = self._stops.next(self._begun, character)
            if not self._begun:
                continue
            self.stop = self._stops.ending(self._begun)
            if self.stop is not None:
                self._begun = ""
                return held[: end if self._include else end - len(self.stop)]
        return held[: len(held) - len(self._begun)]
