"""Guided decoding: token masks for a JSON schema, a regular expression or a choice.

It wraps `llguidance`, an optional dependency (extra ``infer``): an Earley parser over
the bytes of all tokens, which takes microseconds per mask. This module adds the limits
that untrusted grammars need.
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
_CLIENT_PENDING = 32  # per client, so that it leaves room for others
_LEAST_BYTES = 2**15  # of a grammar in the cache, however small
_BYTES_A_CHARACTER = 64  # per character of a guide, estimated size of its result
# Limit of what lexers write while they compile: slow ones may be large.
_BYTES_A_SECOND = 2**28
# A twentieth of the default, in which `a{900000}` took 90 MB and half a second.
_LEXER_FUEL = 50_000
# Without a limit a model may write spaces until its tokens are used up.
_SPACE = r"[\x20\x0A\x0D\x09]{1,20}"


class Matcher:
    """The state of one completion in its grammar.

    It belongs to one thread at a time. A token that the grammar does not allow, or a
    grammar that gets too complex, sets `error` for good.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, tokens: Sequence[int]) -> bool:
        """Advance by sampled tokens; False if they are not allowed, see `error`."""
        return all(self._matcher.consume_token(token) for token in tokens)

    @property
    def finished(self) -> bool:
        """True if only the end of the text can follow."""
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """True if the text may end here."""
        return self._matcher.is_accepting()

    @property
    def error(self) -> str | None:
        """The error message, None if there is none."""
        return _words(self._matcher.get_error()) or None

    def copy(self) -> "Matcher":
        """A copy in the same state, for another completion."""
        return Matcher(self._matcher.deep_copy())


def fill_masks(
    matchers: Sequence[tuple[Matcher, int]], masks: Int32[np.ndarray, "B words"]
) -> None:
    """Write the masks of allowed next tokens, on several threads.

    Args:
        matchers: Matchers, each with its row of `masks`.
        masks: One bit per token, 32 in a word, the lowest first; other rows stay.
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
    """A cache of compiled grammars, bounded in bytes and fair between clients.

    Example:
        >>> cache = GrammarCache(100)
        >>> guides = [Guide(kind="regex", text=text) for text in "abc"]
        >>> for guide, owner in zip(guides, ["x", "y", "x"]):
        ...     cache.put(guide, Matcher(None), owner=owner, size=40)
        >>> [cache.get(guide) is None for guide in guides]
        [True, False, False]
    """

    def __init__(self, most_bytes: int) -> None:
        self._most, self._lock = most_bytes, threading.Lock()
        self._entries: collections.OrderedDict[Guide, _Entry]
        self._entries = collections.OrderedDict()
        self._sizes: collections.Counter[str] = collections.Counter()

    @property
    def size(self) -> int:
        """Estimated bytes of all grammars."""
        return self._sizes.total()

    def get(self, guide: Guide) -> Matcher | None:
        """The compiled guide, None if it is not cached."""
        with self._lock:
            found = self._entries.get(guide)
            if found is None:
                return None
            self._entries.move_to_end(guide)
            return found.matcher

    def put(self, guide: Guide, matcher: Matcher, *, owner: str, size: int) -> None:
        """Cache a compiled guide; the oldest ones of the largest client are evicted."""
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
    """Compiles guides to matchers, on its own threads, with a cache.

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
            tokenizer: Tokenizer of the model.
            vocab_size: V, vocabulary size of the model; at least that of the tokenizer.
            eos_ids: End-of-sequence tokens, at least one.
            threads: Number of compiler threads.
            seconds: Time limit from `submit` to a result.

        Raises:
            ValueError: the tokenizer has more tokens than the model, or there is no
                end-of-sequence token.
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
            guide: The guide to compile.
            client: Name of the client, so that none can fill the queue or the cache.

        Returns:
            A future of a matcher in its initial state, or of `InvalidRequest` if the
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
        """A matcher in its initial state; as `submit`, but blocking."""
        return self.submit(guide, client).result()

    def close(self) -> None:
        """End the threads when they are done."""
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
            # Lexers work lazily: too complex ones, and those that allow no token at
            # all, are found at the first step.
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
            # A grammar of choices has a row for each, at most 2,000.
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
    """Set the result, unless there is one."""
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
