"""Requests to the serving engine, and the outputs that clients get.

Everything here is checked when it is made, so that nothing a client can send reaches
the loop that all requests share. No module of the policy (`request`, `slots`,
`block_pool`, `fair_queue`, `scheduler`) imports jax.
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


type FinishReason = Literal["stop", "length", "aborted", "timeout", "error"]
"""Reason for the end of a continuation: a token or string that stops it, the most
tokens, the client, its deadline, or logits that were not finite."""

type GuideKind = Literal["json_schema", "json_object", "regex", "choice"]
"""Kinds of constraints on a continuation."""

MAX_SAMPLES = 128
"""Most continuations of one request."""
MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities are reported for a token."""
MAX_BIASES = 300
"""Most tokens of a request that have a bias."""
MAX_BAD_TOKENS = 16_384
"""Most tokens of all the sequences that a request must not draw."""
MAX_STOPS = 16_384
"""Most stop strings of a request, and most stop tokens."""
MAX_STOP_CHARACTERS = 2**20
"""Most characters of all stop strings of a request together."""
MAX_STOP_LENGTH = 4096
"""Most characters of one of them."""
MAX_GUIDE_CHARACTERS = 2**20
"""Most characters of a schema, a pattern, or all choices together."""


def _real(
    name: str, value: Any, low: float, high: float, *, above: bool = False
) -> None:
    """Raise where a value is no finite number from `low` to `high`; NaN is none."""
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
    """Raise where a value is no integer from `low` to `high`; True is none."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    if not integer or value < low or (high is not None and value > high):
        most = "" if high is None else f" and at most {high}"
        raise ValueError(f"{name} {value!r} must be an integer of at least {low}{most}")


def _ids(name: str, values: Iterable[Any]) -> tuple[int, ...]:
    """Token ids as integers of Python; numpy's are taken, True is not."""
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
    """The queue is full; HTTP 429. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDead(RuntimeError):
    """The engine has failed and serves nobody any more; HTTP 503."""


class Draining(RuntimeError):
    """The engine finishes what it has and takes nothing new; HTTP 503."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guide:
    """A constraint on the text of a continuation.

    Example:
        >>> Guide(kind="choice", choices=("yes", "no")).text
        ''
    """

    kind: GuideKind
    """Meaning of `text` or `choices`; ``"json_object"`` needs neither."""
    text: str = ""
    """The JSON schema, as JSON, or the regular expression."""
    choices: Sequence[str] = ()
    """The texts of which the continuation is one."""
    compact: bool = False
    """JSON without spaces and line breaks between its parts."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings that a request's continuations are drawn with, and what ends them.

    Example:
        >>> SamplingParams(temperature=0.0, max_tokens=8).greedy
        True
        >>> SamplingParams(top_p=2.0)
        Traceback (most recent call last):
        ...
        ValueError: top_p 2.0 must be above 0 and at most 1
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 always takes the most likely token."""
    top_k: int | None = None
    """Draw among this many most likely tokens; None for all."""
    top_p: float = 1.0
    """Draw among the fewest most likely tokens whose probabilities reach it."""
    min_p: float = 0.0
    """Draw among tokens at least this likely, relative to the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that prompt or
    continuation hold; 1 changes nothing."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the continuation holds; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the continuation holds the token; -2 to 2."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Added to the logits of single tokens; -100 to 100, for 300 tokens at most."""
    seed: int | None = None
    """Decides what is drawn, whatever else runs; None for another each time."""
    n: int = 1
    """Continuations to draw, which share the pages of the prompt."""
    logprobs: int | None = None
    """Report the log-probability of each drawn token and of this many most likely ones;
    None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, the first excepted."""
    max_tokens: int | None = None
    """Most tokens to draw; 0 only computes the prompt; None draws what the model has
    room for."""
    min_tokens: int = 0
    """Tokens to draw before any that stops the continuation may be drawn."""
    stop: str | Sequence[str] = ()
    """Strings that end the text when they appear in it."""
    include_stop: bool = False
    """True: the text ends with the stop string; False: just before it."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the continuation, besides those of the model."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-text tokens."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text."""
    guided: Guide | None = None
    """Constraint on the text."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be drawn, also of those that end a text; None is all."""
    bad_token_ids: Sequence[Sequence[int]] = ()
    """Sequences of tokens of which none may be completed."""

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
        """True where the most likely token is always taken."""
        return self.temperature == 0

    @functools.cached_property
    def needs_sampler(self) -> bool:
        """True where drawing needs more than a temperature: the full sampler.

        Before `min_tokens` are drawn it is needed too, to bar the tokens that stop.
        """
        return (
            self.top_p < 1
            or self.top_k is not None
            or self.min_p > 0
            or self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or bool(self.logit_bias)
            or bool(self.logprobs)
            or self.masked
        )

    @property
    def masked(self) -> bool:
        """True where what may be drawn depends on what has been drawn."""
        return (
            self.guided is not None
            or self.allowed_token_ids is not None
            or bool(self.bad_token_ids)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to be continued.

    Example:
        >>> Request(prompt=[1, 2, 3]).prompt
        (1, 2, 3)
    """

    prompt: Sequence[int]
    """Token ids, at least one; kept as a tuple."""
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    """Names the request until it has ended; 1 to 256 characters."""
    params: SamplingParams = SamplingParams()
    """Settings of the continuations."""
    priority: int = 0
    """Requests of a higher priority run first and are preempted last."""
    client: str = ""
    """Name of the client: clients of one priority get equal shares of tokens."""
    lora: str | None = None
    """Name of the adapter that continues the prompt; None is the model itself."""
    salt: str = ""
    """Requests share cached prompts with those of the same salt only, and cannot learn
    from the clock what others have asked."""
    arrival: float = 0.0
    """Time of arrival, in seconds of the clock that `Scheduler.plan` is given."""
    deadline: float | None = None
    """Time to give up at, by the same clock."""
    echo: bool = False
    """True: the client wants the prompt before the continuation."""

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
        """Check what depends on the model.

        Args:
            vocab_size: Tokens that the model knows.
            max_len: Most tokens of prompt and continuation together.

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
        # A request that may draw as much as it likes still draws something.
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
        """Tokens of prompt and continuation at which the latter ends."""
        if self.params.max_tokens is None:
            return max_len
        return len(self.prompt) + self.params.max_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """The log-probability of a token, and those of the likeliest in its place."""

    token: int
    """The token that stands there."""
    logprob: float
    """Log-probability of the token, in nats."""
    top: tuple[tuple[int, float], ...] = ()
    """Tokens and log-probabilities, the likeliest first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """News for a client of one of the continuations of its request.

    Example:
        >>> parts = [(5, 6), (7,)]
        >>> news = [Output(request="a", index=0, tokens=part) for part in parts]
        >>> [token for output in news for token in output.tokens]
        [5, 6, 7]
    """

    request: str
    """The id of the request."""
    index: int
    """Number of the continuation, 0 to n - 1."""
    tokens: tuple[int, ...] = ()
    """Tokens since the last output."""
    text: str = ""
    """Text since the last output."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `tokens` where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Once, where they were asked for: None for the first token, then one each."""
    finish: FinishReason | None = None
    """Reason for its end; None while it goes on."""
    stop: str | int | None = None
    """The stop string or token that ended it."""
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the cache."""
    error: str | None = None
    """Message of the failure, for the reason ``"error"``."""
    blames_request: bool = False
    """Whether the failure is the request's own: its guide allows no token."""


def joined(outputs: Iterable[Output]) -> list[Output]:
    """The same news with one output for each continuation.

    Args:
        outputs: Of one request, in the order in which they came.

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
    parts: dict[str, Any] = {
        name: tuple(itertools.chain.from_iterable(getattr(o, name) for o in outputs))
        for name in ("tokens", "logprobs", "prompt_logprobs")
    }
    text = "".join(output.text for output in outputs)
    return dataclasses.replace(outputs[-1], text=text, **parts)
