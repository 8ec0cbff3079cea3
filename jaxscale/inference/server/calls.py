"""What requests have in common: their client, and limits on what they ask for."""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from jaxscale.inference.request import (
    InvalidRequest,
    Overloaded,
    Request,
    SamplingParams,
)
from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.config import ServerConfig
from jaxscale.inference.server.metrics import Metrics


if TYPE_CHECKING:
    from jaxscale.inference.server.schema.generation import GenerationBody


IGNORED_HEADER = "x-jaxscale-ignored"
"""Response header that names the ignored parameters of the request."""

_LOG = logging.getLogger(__name__)
LONG = 2**16  # bytes of a body that is tokenized at once, as most are
_ESCAPED = 12  # bytes of a character in JSON
_USUAL = 8  # bytes of most tokens
_BESIDE = 2**21  # bytes of tools, a grammar, spaces that a tokenizer joins
_THREADS = 2
_BODIES = 4  # of the longest that is taken, that a client may have waiting


class LongTexts:
    """Threads for calls with long texts: one at a time of a client, and a few of all.

    Tokenizing takes the processor's time and a hundred times the memory of the text, so
    what strangers send at once is bounded, and none keeps others from their turn.
    """

    def __init__(self, most_bytes: int) -> None:
        """Nothing waits.

        Args:
            most_bytes: Of the bodies of one client that wait.
        """
        self._most = most_bytes
        self._bytes: collections.Counter[str] = collections.Counter()
        self._turns: dict[str, asyncio.Lock] = {}
        self.threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "texts")

    @contextlib.asynccontextmanager
    async def turn(self, client: str, size: int) -> AsyncIterator[None]:
        """Wait until the other long texts of a client are done.

        Raises:
            Overloaded: too much of it waits.
        """
        if self._bytes[client] + size > self._most:
            raise Overloaded(
                f"long texts of {self._bytes[client]} bytes of this client wait", 1
            )
        self._bytes[client] += size
        try:
            async with self._turns.setdefault(client, asyncio.Lock()):
                yield
        finally:
            self._bytes[client] -= size
            if not self._bytes[client]:
                del self._bytes[client], self._turns[client]


@dataclasses.dataclass(kw_only=True)
class Caller:
    """The client of an HTTP request."""

    name: str
    """Stands for its API key, or for its address."""
    request_id: str
    """Request id in logs and in the response."""
    config: ServerConfig
    """Settings."""
    metrics: Metrics
    """Learn the times."""
    texts: LongTexts
    """Where long texts are tokenized."""
    body_bytes: int = 0
    """Length of the body, as far as it is here."""
    gone: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set once nobody waits for what is being prepared."""

    def request(
        self,
        body: "GenerationBody",
        prompt: Sequence[int],
        params: SamplingParams,
        model: TextModel,
        *,
        echo: bool = False,
    ) -> Request:
        """A request for the engine, checked against the model.

        Raises:
            ValueError: it cannot be served.
        """
        if body.priority and not self.config.allow_priority:
            raise InvalidRequest(
                f"priority {body.priority} is refused: this server lets no call choose "
                "its priority; leave it out"
            )
        config = model.backend.config
        check_length(len(prompt), config.longest)
        deadline = None
        if body.timeout is not None:
            if body.timeout <= 0:
                raise InvalidRequest(
                    f"timeout {body.timeout} must be above 0: seconds until the call "
                    "is given up"
                )
            deadline = time.monotonic() + body.timeout
        salt = body.cache_salt or ""
        request = Request(
            prompt=prompt,
            params=params,
            priority=body.priority or 0,
            client=self.name,
            lora=model.lora,
            salt=f"{self.name} {salt}" if self.config.isolate_clients else salt,
            deadline=deadline,
            echo=echo,
        )
        request.check(vocab_size=config.vocab_size, max_len=config.longest)
        return request


async def prepared[**P, T](
    caller: Caller, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """The result of `function` on a request, computed on another thread.

    Raises:
        InvalidRequest: the request is invalid.
        Overloaded: too many long texts of the caller wait.
    """
    run = functools.partial(function, *args, **kwargs)
    loop, size = asyncio.get_running_loop(), caller.body_bytes
    try:
        if size <= LONG:
            return await loop.run_in_executor(None, run)
        async with caller.texts.turn(caller.name, size):
            return await loop.run_in_executor(caller.texts.threads, run)
    except asyncio.CancelledError:
        caller.gone.set()
        raise
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def most_bytes(model: TextModel | None, config: ServerConfig) -> int:
    """Bytes of the longest body that is read.

    Reading and parsing take the loop's time, so no body is read that is too long for
    the model whatever it holds: there is room for a prompt of its longest tokens with
    every character escaped, for as many prompts of usual tokens as a request may have,
    and for its other fields.
    """
    if model is None:
        return config.max_body_bytes
    longest = model.backend.config.longest
    each = max(_ESCAPED * model.tokenizer.longest_token, _USUAL * config.max_prompts)
    return min(config.max_body_bytes, _BESIDE + each * longest)


def longest_waiting(config: ServerConfig) -> int:
    """Bytes of long bodies of one client that may wait."""
    return _BODIES * config.max_body_bytes


def check_length(count: int, most: int) -> None:
    """Raise before anything is made of token ids that are too many."""
    if count > most:
        raise InvalidRequest(
            f"the prompt has {count} tokens, more than the {most} that there is room "
            "for; shorten it"
        )


def check_choices(prompts: int, n: int, config: ServerConfig) -> None:
    """Raise where a request has too many prompts or completions."""
    if prompts > config.max_prompts:
        raise InvalidRequest(
            f"the call has {prompts} prompts, at most {config.max_prompts} are taken; "
            "send several calls"
        )
    if prompts * n > config.max_choices:
        raise InvalidRequest(
            f"{prompts} prompts with n {n} make {prompts * n} continuations, at most "
            f"{config.max_choices} are taken; send several calls"
        )


def noted[R: Response](response: R, ignored: Sequence[str], caller: Caller) -> R:
    """A response with a header that names what was ignored."""
    if ignored:
        names = ", ".join(dict.fromkeys(re.sub(r"[^!-+.-~]", "?", n) for n in ignored))
        response.headers[IGNORED_HEADER] = names
        _LOG.info("request %s: ignored %s", caller.request_id, names)
    return response


def rendered(request: Request, model: TextModel) -> dict[str, Any]:
    """A request as the gateways read it that look for servers that know its prompt."""
    return {
        "request_id": request.id,
        "model": model.name,
        "token_ids": list(request.prompt),
    }
