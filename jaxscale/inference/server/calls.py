"""What calls have in common: who makes them, and how much they may ask for."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxscale.inference.request import InvalidRequest, Request, SamplingParams
from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.config import ServerConfig
from jaxscale.inference.server.metrics import Metrics


if TYPE_CHECKING:
    from jaxscale.inference.server.schema import GenerationBody


@dataclasses.dataclass(frozen=True, kw_only=True)
class Caller:
    """Who makes a call."""

    name: str
    """Stands for the key that was shown, or for the address."""
    config: ServerConfig
    """Settings."""
    metrics: Metrics
    """Learn the times."""

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
            salt=f"{self.name} {salt}" if self.config.isolate_clients else salt,
            deadline=deadline,
            echo=echo,
        )
        config = model.backend.config
        request.check(vocab_size=config.vocab_size, max_len=config.longest)
        return request


async def prepared[**P, T](
    function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """What `function` makes of a call, on another thread.

    Raises:
        InvalidRequest: the call is to blame.
    """
    try:
        return await asyncio.to_thread(function, *args, **kwargs)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def check_choices(prompts: int, n: int, config: ServerConfig) -> None:
    """Raise where a call has too many prompts or continuations."""
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


def rendered(request: Request, model: TextModel) -> dict[str, Any]:
    """A request as the gateways read it that look for servers that know its prompt."""
    return {
        "request_id": request.id,
        "model": model.name,
        "token_ids": list(request.prompt),
    }
