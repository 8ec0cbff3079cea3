"""The state of a server: its model, its clients, and its shutdown."""

import asyncio
import concurrent.futures
import contextlib
import hashlib
import hmac
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from jaxscale.inference.request import Draining, EngineDead
from jaxscale.inference.server.backend import Load, Loading, TextModel
from jaxscale.inference.server.calls import Caller, LongTexts, longest_waiting
from jaxscale.inference.server.config import ServerConfig
from jaxscale.inference.server.errors import ApiError
from jaxscale.inference.server.live import Recorder, attach
from jaxscale.inference.server.metrics import Metrics
from jaxscale.inference.server.served_encoder import ServedEncoder


type Served = TextModel | ServedEncoder
"""A model that is served."""

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.05


class Service:
    """A server's model, from its loading to the last answer."""

    def __init__(self, config: ServerConfig, load: Callable[[], Served]) -> None:
        self.config, self._load = config, load
        self.metrics = Metrics()
        self.model: Served | None = None
        self.recorder: Recorder | None = None
        self.failure: BaseException | None = None
        """Why the model could not be loaded."""
        self.draining = False
        self.active = 0
        """Requests that are being answered."""
        self.texts = LongTexts(longest_waiting(config))
        self._keys = [_digest(key) for key in config.api_keys]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load the model while requests are already answered; close it in the end."""
        self.texts = LongTexts(longest_waiting(self.config))
        tasks = [asyncio.create_task(self._start())]
        try:
            yield
        finally:
            self.texts.threads.shutdown(wait=False, cancel_futures=True)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.recorder is not None:
                self.recorder.close()
            model = self.model
            if isinstance(model, TextModel):
                await asyncio.to_thread(model.backend.close)
            elif model is not None:
                await asyncio.to_thread(model.close)

    async def _start(self) -> None:
        try:
            model = await self._loaded()
        except (
            Exception
        ) as error:  # whatever it is, `serve` raises it once it has ended
            self.failure = error
            return
        self.model = model
        if isinstance(model, TextModel):
            backend = model.backend
            load, slots = backend.load, backend.config.num_slots
        else:
            backend, load, slots = None, model.load, 0
            model.on_pass = self.metrics.passed
        recorder = Recorder(load, num_slots=slots, model=model.name)
        self.recorder = recorder
        attach(recorder, self.metrics)
        self.metrics.watch(load, generates=backend is not None)
        if backend is not None:
            backend.observe(recorder.observe, recorder.tick)
        await recorder.run()

    async def _loaded(self) -> Served:
        # Not of the pool, whose threads hold up the end of the process.
        loaded: concurrent.futures.Future[Served] = concurrent.futures.Future()

        def load() -> None:
            try:
                loaded.set_result(self._load())
            except BaseException as error:  # it comes out where the thread is awaited
                loaded.set_exception(error)

        threading.Thread(target=load, name="load", daemon=True).start()
        return await asyncio.shield(asyncio.wrap_future(loaded))

    def load(self) -> Load:
        """How busy the model is."""
        model = self.model
        if model is None:
            return Load()
        return (model.backend if isinstance(model, TextModel) else model).load()

    @property
    def progress(self) -> dict[str, Any]:
        """How far it is with programs and weights, as far as that is known."""
        if self.model is None:
            return self._load.state if isinstance(self._load, Loading) else {}
        return dict(zip(("compiled", "programs"), self.load().programs, strict=True))

    @property
    def error(self) -> BaseException | None:
        """Why nothing can be served any more."""
        if self.failure is None and isinstance(self.model, TextModel):
            return self.model.backend.error
        return self.failure

    @property
    def state(self) -> str:
        """``"loading"``, ``"ready"``, ``"draining"`` or ``"dead"``."""
        if self.error is not None:
            return "dead"
        if self.draining:
            return "draining"
        return "loading" if self.model is None else "ready"

    def served(self, name: str | None = None) -> Served:
        """The model, if it can serve requests.

        Raises:
            ApiError: it is not loaded, or goes by another name.
            Draining: the server is about to end.
            EngineDead: it has failed.
        """
        if self.error is not None:
            raise EngineDead(f"the engine has stopped: {self.error}")
        if self.draining:
            raise Draining("the server is shutting down; send the call elsewhere")
        model = self.model
        if model is None:
            wait = {"retry-after": "5"}
            raise ApiError(503, "the model is loading", code="loading", headers=wait)
        if isinstance(model, TextModel):
            model = model.named(name)
        if name is not None and name not in (model.name, *model.aliases):
            raise ApiError(
                404,
                f"the model {name!r} is not served here; use {model.name!r}",
                param="model",
                code="model_not_found",
            )
        return model

    def decoder(self, name: str | None = None) -> TextModel:
        """The decoder that is served; arguments and errors as for `served`."""
        model = self.served(name)
        if not isinstance(model, TextModel):
            raise ApiError(404, "the model is an encoder; call /v1/embeddings")
        return model

    def encoder(self, name: str | None = None) -> ServedEncoder:
        """The encoder that is served; arguments and errors as for `served`."""
        model = self.served(name)
        if isinstance(model, TextModel):
            raise ApiError(404, "the model is a decoder; call /v1/completions")
        return model

    def caller(self, scope: Scope, *, public: bool) -> Caller:
        """The client of a request.

        Raises:
            ApiError: it shows no key that is known.
        """
        client = scope.get("client")
        name = client[0] if client else ""
        if self._keys and not public:
            headers = Headers(scope=scope)
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer":
                key = headers.get("x-api-key", "")  # as clients of Anthropic's send it
            shown = _digest(key.strip())
            # All are compared, each in constant time.
            found = [hmac.compare_digest(shown, known) for known in self._keys]
            if not any(found):
                raise ApiError(
                    401,
                    "the call shows no valid API key; send it as Authorization: Bearer "
                    "KEY, or as x-api-key",
                    code="invalid_api_key",
                )
            name = f"key-{found.index(True)}"
        return Caller(
            name=name,
            request_id=scope["state"]["request_id"],
            config=self.config,
            metrics=self.metrics,
            texts=self.texts,
        )

    async def drain(self) -> None:
        """Refuse what comes from now on; return when the rest is answered.

        What runs longer than `ServerConfig.drain_seconds` is left to be cut off.
        """
        self.draining = True
        if isinstance(self.model, TextModel):
            self.model.backend.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_seconds):
                while self.active:
                    await asyncio.sleep(_POLL_SECONDS)
        if self.active:
            _LOG.warning("%d calls are cut off", self.active)
        if self.recorder is not None:
            self.recorder.close()


def _digest(key: str) -> bytes:
    """Keys of any length as equally many bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
