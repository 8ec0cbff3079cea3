"""Masks of tokens for texts that must follow a schema, a pattern or a choice.

The work is done by `llguidance`, an optional dependency
(extra ``infer``): an Earley parser over the bytes of all tokens,
which takes microseconds a mask. Here are the bounds that strangers' grammars need.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import re
import threading
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Int32

from jaxscale.checks import pip_install
from jaxscale.inference.request import Guide, InvalidRequest, Overloaded
from jaxscale.models.tokenizer import Tokenizer


_CACHED_BYTES = 2**28
_MAX_PENDING = 64
_CLIENT_PENDING = 32  # of one client, so that it leaves room for others
_LEAST_BYTES = 2**15  # of a grammar in the cache, however small
_BYTES_A_CHARACTER = 64  # of the text of a guide, for what is made of it
# Lexers write no more than this while they compile: what takes long may be large.
_BYTES_A_SECOND = 2**28
# A twentieth of the default, in which `a{900000}` took 90 MB and half a second.
_LEXER_FUEL = 50_000
# Without a bound a model may write spaces until its tokens are used up.
_SPACE = r"[\x20\x0A\x0D\x09]{1,20}"


class Matcher:
    """The place of one continuation in its grammar.

    It belongs to one thread at a time. A token that the grammar does not allow, or a
    grammar that gets too complex, sets `error` for good.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, tokens: Sequence[int]) -> bool:
        """Go on by drawn tokens; False where they are not allowed, see `error`."""
        return all(self._matcher.consume_token(token) for token in tokens)

    @property
    def finished(self) -> bool:
        """True where nothing but the end of the text can follow."""
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """True where the text may end."""
        return self._matcher.is_accepting()

    @property
    def error(self) -> str | None:
        """The message of the failure, None while all is well."""
        return _words(self._matcher.get_error()) or None

    def copy(self) -> "Matcher":
        """Another one at the same place, for another continuation."""
        return Matcher(self._matcher.deep_copy())


def fill_masks(
    matchers: Sequence[tuple[Matcher, int]], masks: Int32[np.ndarray, "B words"]
) -> None:
    """Write which tokens may come next, on several threads.

    Args:
        matchers: Each with its row of `masks`.
        masks: One bit for each token, 32 in a word, the lowest first; other rows stay.
    """
    if matchers:
        pairs = [(matcher._matcher, row) for matcher, row in matchers]
        llguidance = _require_llguidance()
        llguidance.numpy.fill_next_token_bitmask_par(_executor(), pairs, masks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    """A grammar in the cache."""

    matcher: Matcher
    owner: str
    size: int


class GrammarCache:
    """Compiled grammars, bounded in bytes; who fills it makes room for the others.

    Example:
        >>> cache = GrammarCache(100)
        >>> guides = [Guide(kind="regex", text=text) for text in "abc"]
        >>> for guide, owner in zip(guides, ["x", "y", "x"]):
        ...     cache.put(guide, Matcher(None), owner=owner, size=40)
        >>> [cache.get(guide) is None for guide in guides]
        [True, False, False]
    """

    def __init__(self, most_bytes: int) -> None:
        """Empty.

        Args:
            most_bytes: Of all grammars, as far as they can be estimated.
        """
        self._most, self._lock = most_bytes, threading.Lock()
        self._entries: collections.OrderedDict[Guide, _Entry]
        self._entries = collections.OrderedDict()
        self._sizes: collections.Counter[str] = collections.Counter()

    @property
    def size(self) -> int:
        """Bytes of all."""
        return self._sizes.total()

    def get(self, guide: Guide) -> Matcher | None:
        """What was made of a guide, None where it is not here."""
        with self._lock:
            found = self._entries.get(guide)
            if found is None:
                return None
            self._entries.move_to_end(guide)
            return found.matcher

    def put(self, guide: Guide, matcher: Matcher, *, owner: str, size: int) -> None:
        """Keep what was made of a guide; the oldest of who has most make room.

        Args:
            guide: Whose.
            matcher: At the beginning.
            owner: The client that asked first.
            size: Bytes.
        """
        with self._lock:
            if size > self._most or guide in self._entries:
                return
            self._entries[guide] = _Entry(matcher=matcher, owner=owner, size=size)
            self._sizes[owner] += size
            while self.size > self._most:
                ((largest, _),) = self._sizes.most_common(1)
                oldest = next(g for g, e in self._entries.items() if e.owner == largest)
                self._sizes[largest] -= self._entries.pop(oldest).size
            self._sizes += collections.Counter()  # without those that have none


class GrammarCompiler:
    """Makes matchers of guides, on threads of its own, and keeps the last ones.

    Example:
        >>> tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=260)
        >>> compiler = GrammarCompiler(tokenizer, vocab_size=288, eos_ids=[0])
        >>> matcher = compiler.compile(Guide(kind="choice", choices=["to", "be"]))
        >>> masks = np.zeros([1, 288 // 32], np.int32)
        >>> fill_masks([(matcher, 0)], masks)
        >>> bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        >>> sorted(tokenizer.decode([i]) for i in np.flatnonzero(bits).tolist())
        ['b', 'be', 't', 'to']
        >>> matcher.accept(tokenizer.encode("be")), matcher.finished
        (True, True)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        threads: int = 2,
        seconds: float = 10.0,
    ) -> None:
        """Read the vocabulary.

        Args:
            tokenizer: Of the model.
            vocab_size: V, tokens that the model knows; at least those of the tokenizer.
            eos_ids: Tokens that end a text, at least one.
            threads: That compile.
            seconds: Most time from `submit` to an answer.

        Raises:
            ValueError: the tokenizer has more tokens than the model, or nothing ends a
                text.
            ImportError: llguidance is not installed.
        """
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"vocab_size {vocab_size} is less than the {tokenizer.vocab_size} "
                "tokens of the tokenizer; they do not belong together"
            )
        if not eos_ids or any(not 0 <= token < vocab_size for token in eos_ids):
            raise ValueError(
                f"eos_ids {eos_ids} must be tokens of the vocabulary of {vocab_size}, "
                "at least one: a text that follows a grammar has to end"
            )
        self._library = _require_llguidance()
        self._tokenizer = self._library.LLTokenizer(
            tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(eos_ids)
        )
        self._seconds = seconds
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "grammar")
        self._limits = self._library.LLParserLimits(initial_lexer_fuel=_LEXER_FUEL)
        self._cache = GrammarCache(_CACHED_BYTES)
        self._pending: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def submit(
        self, guide: Guide, client: str = ""
    ) -> concurrent.futures.Future[Matcher]:
        """Compile on another thread.

        Args:
            guide: What to compile.
            client: Who asks: none fills the queue or the cache for all.

        Returns:
            A future of a matcher at the beginning, or of `InvalidRequest` where the
            guide is malformed, too complex, matches nothing or takes too long.

        Raises:
            Overloaded: too many are being compiled.
        """
        with self._lock:
            pending, own = self._pending.total(), self._pending[client]
            if pending >= _MAX_PENDING or (client and own >= _CLIENT_PENDING):
                raise Overloaded(f"{pending} grammars are being compiled", 1)
            self._pending[client] += 1
        answer: concurrent.futures.Future[Matcher] = concurrent.futures.Future()
        late = InvalidRequest(
            f"the {guide.kind} took more than {self._seconds} seconds to compile; "
            "simplify it"
        )
        clock = threading.Timer(self._seconds, _answer, [answer, None, late])
        clock.daemon = True
        clock.start()

        def run() -> None:
            try:
                matcher = self._cache.get(guide) or self._kept(guide, client)
                _answer(answer, matcher.copy(), None)
            except Exception as error:
                _answer(answer, None, error)
            finally:
                clock.cancel()
                with self._lock:
                    self._pending[client] -= 1
                    self._pending += collections.Counter()  # without those that ended

        self._pool.submit(run)
        return answer

    def compile(self, guide: Guide, client: str = "") -> Matcher:
        """A matcher at the beginning; as `submit`, but waits for it."""
        return self.submit(guide, client).result()

    def close(self) -> None:
        """End the threads once they are done."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _kept(self, guide: Guide, client: str) -> Matcher:
        """Compile, and keep the result."""
        start = time.thread_time()
        matcher = self._compile(guide)
        seconds = time.thread_time() - start
        characters = len(guide.text) + sum(map(len, guide.choices))
        size = _LEAST_BYTES + _BYTES_A_CHARACTER * characters
        size += int(_BYTES_A_SECOND * seconds)
        self._cache.put(guide, matcher, owner=client, size=size)
        return matcher

    def _compile(self, guide: Guide) -> Matcher:
        library = self._library.LLMatcher
        try:
            grammar = self._grammar(guide)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the {guide.kind} is malformed: {error}") from error
        matcher = library(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            # Lexers keep some of their work for later: what is too complex, and what
            # allows no token at all, is found at the first step.
            mask = np.frombuffer(matcher.compute_bitmask(), "<i4")
            words = np.flatnonzero(mask)
            if not len(words) and not matcher.is_error():
                raise InvalidRequest(f"no text matches the {guide.kind}")
            if len(words):
                word = int(words[0])
                bit = int(mask[word]) & -int(mask[word])
                step = matcher.deep_copy()
                step.consume_token(32 * word + bit.bit_length() - 1)
                if step.is_error():
                    matcher = step
        if "NoExtension" in matcher.get_error():
            raise InvalidRequest(f"no text matches the {guide.kind}")
        if matcher.is_error():
            raise InvalidRequest(
                f"the {guide.kind} cannot be used: {_words(matcher.get_error())}"
            )
        return Matcher(matcher)

    def _grammar(self, guide: Guide) -> str:
        library = self._library.LLMatcher
        if guide.kind == "regex":
            return library.grammar_from_regex(guide.text)
        if guide.kind == "choice":
            # A grammar of choices has a row for each, of which 2,000 are the most.
            return library.grammar_from_regex("|".join(map(re.escape, guide.choices)))
        schema = guide.text if guide.kind == "json_schema" else '{"type": "object"}'
        if not isinstance(json.loads(schema), dict | bool):
            raise ValueError("a JSON schema is an object")
        overrides: dict[str, Any] = {"whitespace_pattern": _SPACE}
        if guide.compact:
            overrides = {
                "whitespace_flexible": False,
                "item_separator": ",",
                "key_separator": ":",
            }
        return library.grammar_from_json_schema(schema, overrides=overrides)


def _answer(
    future: concurrent.futures.Future[Any], result: Any, error: Exception | None
) -> None:
    """Give an answer, unless there is one."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _words(message: str) -> str:
    """An error in one line, without the state of the parser."""
    return " ".join(message.partition("<state>")[0].split())[:500]


@functools.cache
def _executor() -> Any:
    return _require_llguidance().LLExecutor()


def _require_llguidance() -> ModuleType:
    try:
        import llguidance
        import llguidance.numpy
    except ImportError as error:
        raise ImportError(
            f"guided texts need llguidance: {pip_install('infer')}"
        ) from error
    return llguidance
