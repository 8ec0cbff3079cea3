"""``/v1/completions``: prompts to texts."""

import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from jaxscale.inference.output import Output, TokenLogprobs
from jaxscale.inference.request import Request
from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.calls import (
    Caller,
    check_choices,
    check_length,
    noted,
    prepared,
    rendered,
)
from jaxscale.inference.server.generation import Usage, collect, merged
from jaxscale.inference.server.logprobs import CompletionLogprobs, prompt_logprobs
from jaxscale.inference.server.schema.completions import Completion
from jaxscale.inference.server.stream import attended, event_stream, varied


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """A request, ready to be run."""

    model: TextModel
    requests: list[Request]
    texts: list[str]
    """Texts of the prompts, where they are to be repeated."""
    echo: bool
    special: bool
    """Whether control tokens are part of those texts."""
    head: dict[str, Any]
    """What all parts of the answer have."""
    body: Completion

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of the prompt are to be repeated too."""
        return self.echo and self.requests[0].params.logprobs is not None

    def logprobs(self, number: int) -> CompletionLogprobs:
        """What lists the log-probabilities of a completion of a prompt."""
        return CompletionLogprobs(
            self.model,
            self.requests[number],
            echo=self.texts[number] if self.echo else None,
            special=self.special,
        )

    def ids(self, number: int, output: Output, *, first: bool) -> dict[str, Any]:
        """The tokens of an output, where they are asked for."""
        if not self.body.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": list(self.requests[number].prompt)}
        return {**(prompt if first else {}), "token_ids": list(output.tokens)}


async def complete(
    body: Completion, model: TextModel, caller: Caller, receive: Receive
) -> Response:
    """Answer a request.

    Raises:
        ValueError: the request is invalid.
    """
    prepare = prepared(caller, _prepare, body, model, caller)
    call = await attended(receive, prepare)
    if body.stream:
        response = await event_stream(_events(call, caller), caller.config)
        return noted(response, body.ignored, caller)
    run = collect(model.backend, call.requests, caller.metrics)
    found, usage = await attended(receive, run)
    choices = [
        _choice(call, number, index, whole, group[0].prompt_logprobs)
        for number, group in enumerate(found)
        for index, whole in enumerate(group)
    ]
    content = {**call.head, "choices": choices, "usage": usage.body()}
    return noted(JSONResponse(content), body.ignored, caller)


async def render(
    body: Completion, model: TextModel, caller: Caller, receive: Receive
) -> Response:
    """The token ids of the prompts of a request, which is not run.

    Raises:
        ValueError: the request is invalid.
    """
    prepare = prepared(caller, _prepare, body, model, caller)
    call = await attended(receive, prepare)
    return JSONResponse([rendered(request, model) for request in call.requests])


def _prepare(body: Completion, model: TextModel, caller: Caller) -> _Call:
    """Check and tokenize; large prompts take a while."""
    _check(body)
    echo = bool(body.echo)
    scored = body.logprobs if echo else None
    params = body.sampling_params(
        model.defaults,
        model.tokenizer,
        max_tokens=16 if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=scored
        if body.prompt_logprobs is None
        else body.prompt_logprobs,
        guided=body.guide(strict=caller.config.strict_schemas),
    )
    prompts = _prompts(body.prompt)
    check_choices(len(prompts), params.n, caller.config)
    special = body.add_special_tokens is not False
    bound = model.bound(caller.gone)
    kept = body.kept_tokens(bound.most, params.max_tokens)
    for prompt in prompts:
        if isinstance(prompt, str):
            (bound.check if kept is None else bound.check_characters)(prompt)
        elif kept is None:
            check_length(len(prompt), bound.most)
    ids = [
        model.encode(p, add_special_tokens=special) if isinstance(p, str) else p
        for p in prompts
    ]
    if kept is not None:
        ids = [tokens[-kept:] for tokens in ids]
    requests = [
        caller.request(body, prompt, params, model, echo=echo) for prompt in ids
    ]
    texts = []
    if echo:
        decode = model.tokenizer.decode
        whole = kept is None
        texts = [
            p if whole and isinstance(p, str) else decode(tokens)
            for p, tokens in zip(prompts, ids, strict=True)
        ]
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
    }
    return _Call(
        model=model,
        requests=requests,
        texts=texts,
        echo=echo,
        special=kept is not None or not isinstance(prompts[0], str),
        head=head,
        body=body,
    )


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
    """One finished completion."""
    request = call.requests[number]
    before = call.texts[number] if call.echo else ""
    logprobs = None
    if request.params.logprobs is not None:
        prompt = _scores(request, scores) if call.scored else []
        most = len(before + whole.text)
        logprobs = call.logprobs(number).listed(prompt, whole.logprobs, most)
    choice = {
        "index": number * request.params.n + index,
        "text": before + whole.text,
        "logprobs": logprobs,
        "finish_reason": whole.finish,
        **call.ids(number, whole, first=True),
    }
    if request.params.prompt_logprobs is not None and not call.scored:
        choice["prompt_logprobs"] = prompt_logprobs(call.model, scores)
    return choice


def _scores(
    request: Request, scores: Sequence[TokenLogprobs | None]
) -> list[TokenLogprobs | int]:
    """Log-probabilities of a prompt, with its first token, which has none."""
    return [
        token if score is None else score
        for token, score in zip(request.prompt, scores, strict=False)
    ]


async def _events(
    call: _Call, caller: Caller
) -> AsyncGenerator[dict[str, Any] | bytes]:
    """The parts of a stream."""
    wants_usage = call.body.wants_usage
    usage = Usage.of(call.requests)
    head = {**call.head, **({"usage": None} if wants_usage else {})}
    parts = [_Part(call, number) for number in range(len(call.requests))]
    always, with_choices = call.body.wants_usage_always, varied(head, "choices")
    run = merged(call.model.backend, call.requests, caller.metrics)
    async with contextlib.aclosing(run) as outputs:
        async for number, output in outputs:
            usage.add(number, output)
            if always:
                with_choices = varied({**head, "usage": usage.body()}, "choices")
            for choice in parts[number].choices(output):
                yield with_choices([choice])
    if wants_usage:
        yield {**call.head, "choices": [], "usage": usage.body()}


class _Part:
    """The completions of one prompt, as a stream sends them."""

    def __init__(self, call: _Call, number: int) -> None:
        self._call, self._number = call, number
        self._request, self._scored = call.requests[number], call.scored
        self._begun: set[int] = set()
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._lengths: dict[int, int] = {}
        self._ids = call.body.return_token_ids
        # The log-probabilities of the prompt come with the first continuation.
        self._scores: Sequence[TokenLogprobs | None] | None = None
        self._held: list[Output] = []

    def choices(self, output: Output) -> list[dict[str, Any]]:
        """What is to be sent now."""
        if output.prompt_logprobs:
            self._scores = output.prompt_logprobs
        if self._scored and self._scores is None:
            self._held.append(output)
            return []
        ready, self._held = [*self._held, output], []
        made = [self._choice(one) for one in ready]
        return [choice for choice in made if choice is not None]

    def _choice(self, output: Output) -> dict[str, Any] | None:
        call, request, index = self._call, self._request, output.index
        text, prompt = output.text, []
        first = index not in self._begun
        if first:
            self._begun.add(index)
            text = (call.texts[self._number] if call.echo else "") + text
            if self._scored:
                prompt = _scores(request, self._scores or ())
        items = output.logprobs
        tells = (
            text or prompt or items or (output.tokens and call.body.return_token_ids)
        )
        if not tells and output.finish is None:
            return None
        self._lengths[index] = self._lengths.get(index, 0) + len(text)
        logprobs = None
        if request.params.logprobs is not None:
            if index not in self._logprobs:
                self._logprobs[index] = call.logprobs(self._number)
            most = self._lengths[index]
            logprobs = self._logprobs[index].listed(prompt, items, most)
        return {
            "index": self._number * request.params.n + index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish,
            **(call.ids(self._number, output, first=first) if self._ids else {}),
        }
