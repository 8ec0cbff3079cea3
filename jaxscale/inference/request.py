"""Requests to the inference engine, and what it answers when it takes none.

Everything here is checked when it is constructed, so that nothing invalid from a client
reaches the loop that all requests share. No module of the policy (`request`,
`output`, `batch_rows`, `block_pool`, `fair_queue`, `scheduler`) imports jax.
"""

import dataclasses
import functools
import itertools
import math
import operator
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from jaxscale.checks import check_choice
from jaxscale.keywords import explained


type GuideKind = Literal["json_schema", "json_object", "regex", "choice"]
"""Kinds of guided decoding."""

MAX_SAMPLES = 128
"""Maximum number of completions per request."""
MAX_LOGPROBS = 20
"""Maximum number of alternatives with log-probabilities per token."""
MAX_BIASES = 300
"""Maximum number of tokens with a bias per request."""
MAX_BAD_TOKENS = 16_384
"""Maximum total tokens of the forbidden sequences of a request."""
MAX_STOPS = 16_384
"""Maximum number of stop strings, and of stop tokens, per request."""
MAX_STOP_CHARACTERS = 2**20
"""Maximum total characters of a request's stop strings."""
MAX_STOP_LENGTH = 4096
"""Maximum characters of one stop string."""
MAX_GUIDE_CHARACTERS = 2**20
"""Maximum characters of a schema, a pattern, or all choices together."""


def _real(
    name: str, value: Any, low: float, high: float, *, above: bool = False
) -> None:
    """Raise unless a value is a finite number from `low` to `high`; NaN is not."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number:
        raise ValueError(f"{name} {value!r} must be a number")
    if abs(value) < math.inf and low <= value <= high and (value > low or not above):
        return
    least = "" if low == -math.inf else f"{'above' if above else 'at least'} {low}"
    most = "finite" if high == math.inf else f"at most {high}"
    raise ValueError(
        f"{name} {value} must be {' and '.join(filter(None, (least, most)))}"
    )


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise unless a value is an integer from `low` to `high`; True is not."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    if not integer or value < low or (high is not None and value > high):
        most = "" if high is None else f" and at most {high}"
        raise ValueError(f"{name} {value!r} must be an integer of at least {low}{most}")


def _ids(name: str, values: Iterable[Any]) -> tuple[int, ...]:
    """Token ids as Python integers; numpy's are accepted, True is not."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name} {values!r} must be a sequence of token ids")
    ids = []
    for value in values:
        try:
            token = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            token = -1
        if not 0 <= token < 2**31:
            raise ValueError(f"{name} holds {value!r}, which is no token id")
        ids.append(token)
    return tuple(ids)


def _strings(name: str, values: Any, most: int) -> tuple[str, ...]:
    values = (values,) if isinstance(values, str) else values
    if not isinstance(values, Iterable):
        raise ValueError(f"{name} {values!r} must be a string or a sequence of them")
    strings = tuple(values)
    if len(strings) > MAX_STOPS:
        raise ValueError(
            f"{name} has {len(strings)} strings, expected at most {MAX_STOPS}"
        )
    for value in strings:
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} holds {value!r}, expected strings, none empty")
    if sum(map(len, strings)) > most:
        raise ValueError(
            f"{name} has {sum(map(len, strings))} characters, expected at most {most}"
        )
    return strings


def _biases(values: Any) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise ValueError(f"logit_bias {values!r} must map token ids to numbers")
    if len(values) > MAX_BIASES:
        raise ValueError(
            f"logit_bias has {len(values)} tokens, expected at most {MAX_BIASES}"
        )
    biases = dict(zip(_ids("logit_bias", values), values.values(), strict=True))
    for token, bias in biases.items():
        _real(f"logit_bias of token {token}", bias, -100, 100)
    return biases


class InvalidRequest(ValueError):
    """The request cannot be served as it is; HTTP 400."""


class Overloaded(RuntimeError):
    """The waiting queue is full; HTTP 429. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message, retry_after)
        self.message, self.retry_after = message, retry_after

    def __str__(self) -> str:
        return self.message


class EngineDead(RuntimeError):
    """The engine has failed and serves no requests; HTTP 503."""


class Draining(RuntimeError):
    """The engine finishes accepted requests and takes no new ones; HTTP 503."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guide:
    """A constraint on the text of a completion (guided decoding).

    Example:
        >>> Guide(kind="choice", choices=("yes", "no")).text
        ''
    """

    kind: GuideKind
    """Meaning of `text` or `choices`; ``"json_object"`` needs neither."""
    text: str = ""
    """The JSON schema, as JSON, or the regular expression."""
    choices: Sequence[str] = ()
    """The allowed texts of the completion."""
    compact: bool = False
    """Compact JSON, without spaces and line breaks between its parts."""

    def __post_init__(self) -> None:
        check_choice("guided", self.kind, GuideKind)
        choices = _strings("choices", self.choices, MAX_GUIDE_CHARACTERS)
        object.__setattr__(self, "choices", choices)
        if not isinstance(self.text, str) or len(self.text) > MAX_GUIDE_CHARACTERS:
            raise ValueError(
                f"the {self.kind} must be a string of at most {MAX_GUIDE_CHARACTERS} "
                "characters"
            )
        wants_text = self.kind in ("json_schema", "regex")
        if bool(self.text) != wants_text or bool(choices) != (self.kind == "choice"):
            raise ValueError(
                f"guided {self.kind!r} takes "
                + {"choice": "choices alone", "json_object": "nothing"}.get(
                    self.kind, "a text that is not empty, and no choices"
                )
            )


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request's completions, and their stop conditions.

    Example:
        >>> SamplingParams(temperature=0.0, max_tokens=8).greedy
        True
        >>> SamplingParams(top_p=2.0)
        Traceback (most recent call last):
        ...
        ValueError: top_p 2.0 must be above 0 and at most 1
    """

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_k: int | None = None
    """Sample from the k most likely tokens; None is all."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the fewest most likely tokens whose probabilities
    reach it."""
    min_p: float = 0.0
    """Sample from tokens at least this likely, relative to the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in prompt or
    completion; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the completion; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence of the token in the completion; -2 to 2."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Added to the logits of single tokens; -100 to 100, for at most 300 tokens."""
    seed: int | None = None
    """Random seed; the result does not depend on other requests. None is random."""
    n: int = 1
    """Number of completions, which share the KV cache of the prompt."""
    logprobs: int | None = None
    """Report the log-probability of each sampled token and of this many most likely
    ones; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, except the first."""
    max_tokens: int | None = None
    """Maximum number of tokens to generate; 0 only computes the prompt; None is the
    model's limit."""
    min_tokens: int = 0
    """Minimum number of tokens before a stop token may be sampled."""
    stop: str | Sequence[str] = ()
    """Stop strings, which end the text when they appear in it."""
    include_stop: bool = False
    """True: the text ends with the stop string; False: just before it."""
    stop_token_ids: Sequence[int] = ()
    """Stop tokens, besides those of the model."""
    ignore_eos: bool = False
    """Ignore the model's own end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text."""
    guided: Guide | None = None
    """Guided decoding: a constraint on the text."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be sampled, end-of-sequence tokens included; None is
    all."""
    bad_token_ids: Sequence[Sequence[int]] = ()
    """Token sequences that must not occur."""

    def __post_init__(self) -> None:
        self._check_numbers()
        put = object.__setattr__
        put(self, "stop", _strings("stop", self.stop, MAX_STOP_CHARACTERS))
        if max(map(len, self.stop), default=0) > MAX_STOP_LENGTH:
            raise ValueError(
                f"stop has a string of {max(map(len, self.stop))} characters, expected "
                f"at most {MAX_STOP_LENGTH}"
            )
        put(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if len(self.stop_token_ids) > MAX_STOPS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} tokens, expected at "
                f"most {MAX_STOPS}"
            )
        put(self, "logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
            put(self, "allowed_token_ids", tuple(sorted(set(allowed))))
            if not allowed:
                raise ValueError(
                    "allowed_token_ids is empty, expected at least one token id; leave "
                    "it out to allow all"
                )
        bad = tuple(_ids("bad_token_ids", each) for each in self.bad_token_ids)
        put(self, "bad_token_ids", bad)
        if not all(bad) or sum(map(len, bad)) > MAX_BAD_TOKENS:
            raise ValueError(
                f"bad_token_ids has {len(bad)} sequences of {sum(map(len, bad))} "
                f"tokens, expected none empty and at most {MAX_BAD_TOKENS} tokens"
            )
        for name in ("include_stop", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"{name} {getattr(self, name)!r} must be True or False"
                )
        if self.guided is not None and not isinstance(self.guided, Guide):
            raise ValueError(f"guided {self.guided!r} must be a Guide")

    def _check_numbers(self) -> None:
        _real("temperature", self.temperature, 0, math.inf)
        _real("min_p", self.min_p, 0, 1)
        _real("presence_penalty", self.presence_penalty, -2, 2)
        _real("frequency_penalty", self.frequency_penalty, -2, 2)
        for name, top in (("top_p", 1), ("repetition_penalty", math.inf)):
            _real(name, getattr(self, name), 0, top, above=True)
        _integer("n", self.n, 1, MAX_SAMPLES)
        _integer("min_tokens", self.min_tokens, 0)
        for name, low, high in (
            ("top_k", 1, None),
            ("seed", -(2**63), 2**63 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
            ("max_tokens", 0, None),
        ):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} must not exceed max_tokens "
                f"{self.max_tokens}"
            )

    @property
    def greedy(self) -> bool:
        """True for greedy decoding."""
        return self.temperature == 0

    @functools.cached_property
    def needs_sampler(self) -> bool:
        """True if sampling needs more than a temperature: the full sampler.

        Before `min_tokens` are sampled it is needed too, to mask stop tokens.
        """
        return (
            self.top_p < 1
            or self.top_k is not None
            or self.min_p > 0
            or self.counts_tokens
            or bool(self.logit_bias)
            or bool(self.logprobs)
            or self.masked
        )

    @property
    def counts_tokens(self) -> bool:
        """True if a penalty depends on how often tokens occur."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def masked(self) -> bool:
        """True if the allowed tokens depend on the sampled ones."""
        return (
            self.guided is not None
            or self.allowed_token_ids is not None
            or bool(self.bad_token_ids)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to complete.

    Example:
        >>> Request(prompt=[1, 2, 3]).prompt
        (1, 2, 3)
    """

    prompt: Sequence[int]
    """Token ids, at least one; kept as a tuple."""
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    """Id of the request until it has ended; 1 to 256 characters."""
    params: SamplingParams = SamplingParams()
    """Sampling parameters."""
    priority: int = 0
    """Requests of a higher priority run first and are preempted last."""
    client: str = ""
    """Name of the client: clients of one priority get equal shares of tokens."""
    lora: str | None = None
    """Name of the adapter that continues the prompt; None is the model itself."""
    salt: str = ""
    """The prefix cache is shared only between requests of the same salt, so timing
    reveals nothing about other prompts."""
    arrival: float = 0.0
    """Time of arrival, in seconds of the scheduler's clock."""
    deadline: float | None = None
    """Deadline, by the same clock."""
    echo: bool = False
    """True: return the prompt before the completion."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", _ids("prompt", self.prompt))
        if not self.prompt:
            raise ValueError(
                "prompt is empty; begin it with a token, such as the "
                "beginning-of-sequence id of the tokenizer"
            )
        if not isinstance(self.id, str) or not 1 <= len(self.id) <= 256:
            raise ValueError(f"id {self.id!r} must be a string of 1 to 256 characters")
        for name in ("client", "salt"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > 1024:
                raise ValueError(f"{name} must be a string of at most 1024 characters")
        if not isinstance(self.lora, str | None):
            raise ValueError(f"lora {self.lora!r} must be the name of an adapter")
        if not isinstance(self.params, SamplingParams):
            raise ValueError(f"params {self.params!r} must be SamplingParams")
        if not isinstance(self.echo, bool):
            raise ValueError(f"echo {self.echo!r} must be True or False")
        _integer("priority", self.priority, -(2**31), 2**31 - 1)
        _real("arrival", self.arrival, -math.inf, math.inf)
        if self.deadline is not None:
            _real("deadline", self.deadline, -math.inf, math.inf)

    def check(self, *, vocab_size: int, max_len: int) -> None:
        """Check the limits of a model.

        Args:
            vocab_size: Vocabulary size of the model.
            max_len: Maximum tokens of prompt and completion together.

        Raises:
            InvalidRequest: a token is outside the vocabulary, or there is no room.

        Example:
            >>> Request(prompt=[7]).check(vocab_size=5, max_len=8)
            Traceback (most recent call last):
            ...
            jaxscale.inference.request.InvalidRequest: prompt holds the token 7, outside
            the vocabulary of 5; does the tokenizer belong to the model?
        """
        params = self.params
        for name, ids in (
            ("prompt", self.prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias)),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_token_ids", tuple(itertools.chain(*params.bad_token_ids))),
        ):
            if ids and max(ids) >= vocab_size:
                raise InvalidRequest(
                    f"{name} holds the token {max(ids)}, outside the vocabulary of "
                    f"{vocab_size}; does the tokenizer belong to the model?"
                )
        if params.top_k is not None and params.top_k > vocab_size:
            raise InvalidRequest(
                f"top_k {params.top_k} exceeds the vocabulary of {vocab_size}; leave "
                "it out to draw from all tokens"
            )
        # A request without a limit still generates something.
        wanted = params.max_tokens
        least = max(1, params.min_tokens) if wanted is None else wanted
        if len(self.prompt) + least > max_len:
            raise InvalidRequest(
                f"the prompt has {len(self.prompt)} tokens, which with "
                f"{'at least ' if wanted is None else 'max_tokens '}{least} makes "
                f"{len(self.prompt) + least}, more than the {max_len} that there is "
                "room for; shorten the prompt or lower max_tokens"
            )

    def limit(self, max_len: int) -> int:
        """Tokens of prompt and completion at which the latter ends."""
        if self.params.max_tokens is None:
            return max_len
        return len(self.prompt) + self.params.max_tokens
