"""Masks of tokens for texts that must follow a schema, a pattern or a choice.

The work is done by `llguidance`, an optional dependency
(``pip install 'jaxscale[infer]'``): an Earley parser over the bytes of all tokens,
which takes microseconds a mask. Here are the bounds that strangers' grammars need.
"""

import concurrent.futures
import contextlib
import functools
import json
import re
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Int32

from jaxscale.inference.request import Guide, InvalidRequest, Overloaded
from jaxscale.models.tokenizer import Tokenizer


_CACHED = 256
_MAX_PENDING = 64
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

    def accept_some(self, tokens: Sequence[int]) -> int:
        """Go on by drafts as far as they are allowed; how many are."""
        return self._matcher.try_consume_tokens(list(tokens))

    def rollback(self, count: int) -> None:
        """Take the last tokens back.

        Raises:
            ValueError: fewer were accepted.
        """
        if not self._matcher.rollback(count):
            raise ValueError(f"count {count} exceeds the tokens that were accepted")

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
        self._cached = functools.lru_cache(maxsize=_CACHED)(self._compile)
        self._pending = 0
        self._lock = threading.Lock()

    def submit(self, guide: Guide) -> concurrent.futures.Future[Matcher]:
        """Compile on another thread.

        Returns:
            A future of a matcher at the beginning, or of `InvalidRequest` where the
            guide is malformed, too complex, matches nothing or takes too long.

        Raises:
            Overloaded: too many are being compiled.
        """
        with self._lock:
            if self._pending >= _MAX_PENDING:
                raise Overloaded(f"{self._pending} grammars are being compiled", 1)
            self._pending += 1
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
                matcher = self._cached(guide).copy()
                _answer(answer, matcher, None)
            except Exception as error:
                _answer(answer, None, error)
            finally:
                clock.cancel()
                with self._lock:
                    self._pending -= 1

        self._pool.submit(run)
        return answer

    def compile(self, guide: Guide) -> Matcher:
        """A matcher at the beginning; as `submit`, but waits for it."""
        return self.submit(guide).result()

    def close(self) -> None:
        """End the threads once they are done."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, guide: Guide) -> Matcher:
        library = self._library.LLMatcher
        try:
            grammar = self._grammar(guide)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the {guide.kind} is malformed: {error}") from error
        matcher = library(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # lexers keep some of their work for later
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
        overrides = {"whitespace_pattern": _SPACE}
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
            "guided texts need llguidance: pip install 'jaxscale[infer]'"
        ) from error
    return llguidance
