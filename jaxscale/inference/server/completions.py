"""``/v1/completions``: prompts to texts."""

import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from jaxscale.inference.request import Output, Request, TokenLogprobs
from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.calls import (
    Caller,
    check_choices,
    check_length,
    prepared,
    rendered,
)
from jaxscale.inference.server.generation import Usage, collect, merged
from jaxscale.inference.server.schema import Completion
from jaxscale.inference.server.stream import attended, event_stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """A call, ready to be run."""

    model: TextModel
    requests: list[Request]
    texts: list[str]
    """Texts of the prompts, where they are to be repeated."""
    echo: bool
    head: dict[str, Any]
    """What all parts of the answer have."""

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of the prompt are to be repeated too."""
        return self.echo and self.requests[0].params.logprobs is not None


async def complete(
    body: Completion, model: TextModel, caller: Caller, receive: Receive
) -> Response:
    """Answer a call.

    Raises:
        ValueError: it asks for what there is not.
    """
    prepare = prepared(caller, _prepare, body, model, caller)
    call = await attended(receive, prepare)
    if body.stream:
        events = _events(call, caller, body.wants_usage)
        return await event_stream(events, caller.config)
    run = collect(model.backend, call.requests, caller.metrics)
    found, usage = await attended(receive, run)
    choices = [
        _choice(call, number, index, whole, group[0].prompt_logprobs)
        for number, group in enumerate(found)
        for index, whole in enumerate(group)
    ]
    return JSONResponse({**call.head, "choices": choices, "usage": usage.body()})


async def render(
    body: Completion, model: TextModel, caller: Caller, receive: Receive
) -> Response:
    """The token ids of the prompts of a call, which is not run.

    Raises:
        ValueError: it asks for what there is not.
    """
    prepare = prepared(caller, _prepare, body, model, caller)
    call = await attended(receive, prepare)
    return JSONResponse([rendered(request, model) for request in call.requests])


def _prepare(body: Completion, model: TextModel, caller: Caller) -> _Call:
    """Check and encode; large prompts take a while."""
    _check(body)
    echo = bool(body.echo)
    scored = body.logprobs if echo else None
    params = body.sampling_params(
        max_tokens=16 if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=scored
        if body.prompt_logprobs is None
        else body.prompt_logprobs,
        guided=body.guide(),
    )
    prompts = _prompts(body.prompt)
    check_choices(len(prompts), params.n, caller.config)
    special = body.add_special_tokens is not False
    bound = model.bound(caller.gone)
    for prompt in prompts:
        if isinstance(prompt, str):
            bound.check(prompt)
        else:
            check_length(len(prompt), bound.most)
    ids = [
        model.encode(p, add_special_tokens=special) if isinstance(p, str) else p
        for p in prompts
    ]
    requests = [
        caller.request(body, prompt, params, model, echo=echo) for prompt in ids
    ]
    texts = []
    if echo:
        decode = model.tokenizer.decode
        texts = [p if isinstance(p, str) else decode(p) for p in prompts]
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
    }
    return _Call(model=model, requests=requests, texts=texts, echo=echo, head=head)


def _check(body: Completion) -> None:
    body.check_stream()
    if body.stream and body.prompt_logprobs is not None:
        raise ValueError(
            "prompt_logprobs come with a whole answer; leave out stream, or use echo "
            "with logprobs"
        )
    if body.suffix:
        raise ValueError(
            "suffix is not supported: the models continue texts, and do not fill gaps; "
            "leave it out"
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ValueError(
            f"best_of {body.best_of} must equal n {body.n or 1}; choosing among more "
            "is not supported"
        )


def _prompts(prompt: Any) -> Sequence[str | list[int]]:
    """One or several prompts, as a list."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise ValueError("prompt is empty; give a text, or token ids")
    return prompt


def _choice(
    call: _Call,
    number: int,
    index: int,
    whole: Output,
    scores: Sequence[TokenLogprobs | None],
) -> dict[str, Any]:
    """One continuation, complete."""
    request = call.requests[number]
    before = call.texts[number] if call.echo else ""
    logprobs = None
    if request.params.logprobs is not None:
        prompt = _scores(request, scores) if call.scored else []
        logprobs = _logprobs(call.model, [*prompt, *whole.logprobs], 0)
    choice = {
        "index": number * request.params.n + index,
        "text": before + whole.text,
        "logprobs": logprobs,
        "finish_reason": whole.finish,
    }
    if request.params.prompt_logprobs is not None and not call.scored:
        choice["prompt_logprobs"] = _prompt_logprobs(call.model, scores)
    return choice


def _scores(
    request: Request, scores: Sequence[TokenLogprobs | None]
) -> list[TokenLogprobs | int]:
    """Log-probabilities of a prompt, with its first token, which has none."""
    return [
        token if score is None else score
        for token, score in zip(request.prompt, scores, strict=False)
    ]


def _logprobs(
    model: TextModel, items: Sequence[TokenLogprobs | int], offset: int
) -> dict[str, Any]:
    """Tokens with their log-probabilities, as completions list them."""
    made: dict[str, Any] = {
        name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    for item in items:
        known = not isinstance(item, int)
        text = model.token_text(item.token if known else item)
        made["tokens"].append(text)
        made["token_logprobs"].append(item.logprob if known else None)
        top: dict[str, float] = {}
        for token, value in item.top if known else ():
            top.setdefault(model.token_text(token), value)  # of one text the likeliest
        made["top_logprobs"].append(top if known else None)
        made["text_offset"].append(offset)
        offset += len(text)
    return made


def _prompt_logprobs(
    model: TextModel, scores: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """Of each token of the prompt: what is known of it, and of likelier ones, by id."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"logprob": logprob, "decoded_token": model.token_text(token)}

    return [
        None
        if score is None
        else {
            str(t): entry(t, v) for t, v in ((score.token, score.logprob), *score.top)
        }
        for score in scores
    ]


async def _events(
    call: _Call, caller: Caller, wants_usage: bool
) -> AsyncGenerator[dict[str, Any]]:
    """The parts of a stream."""
    usage = Usage.of(call.requests)
    head = {**call.head, **({"usage": None} if wants_usage else {})}
    parts = [_Part(call, number) for number in range(len(call.requests))]
    run = merged(call.model.backend, call.requests, caller.metrics)
    async with contextlib.aclosing(run) as outputs:
        async for number, output in outputs:
            usage.add(number, output)
            for choice in parts[number].choices(output):
                yield {**head, "choices": [choice]}
    if wants_usage:
        yield {**call.head, "choices": [], "usage": usage.body()}


class _Part:
    """The continuations of one prompt, as a stream sends them."""

    def __init__(self, call: _Call, number: int) -> None:
        self._call, self._number = call, number
        self._request = call.requests[number]
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        # The log-probabilities of the prompt come with the first continuation.
        self._scores: Sequence[TokenLogprobs | None] | None = None
        self._held: list[Output] = []

    def choices(self, output: Output) -> list[dict[str, Any]]:
        """What is to be sent now."""
        if output.prompt_logprobs:
            self._scores = output.prompt_logprobs
        if self._call.scored and self._scores is None:
            self._held.append(output)
            return []
        ready, self._held = [*self._held, output], []
        made = [self._choice(one) for one in ready]
        return [choice for choice in made if choice is not None]

    def _choice(self, output: Output) -> dict[str, Any] | None:
        call, request, index = self._call, self._request, output.index
        text, items = output.text, list(output.logprobs)
        if index not in self._begun:
            self._begun.add(index)
            text = (call.texts[self._number] if call.echo else "") + text
            if call.scored:
                items = [*_scores(request, self._scores or ()), *items]
        if not text and not items and output.finish is None:
            return None
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = _logprobs(call.model, items, self._offsets.get(index, 0))
            self._offsets[index] = sum(map(len, logprobs["tokens"])) + (
                self._offsets.get(index, 0)
            )
        return {
            "index": self._number * request.params.n + index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish,
        }
