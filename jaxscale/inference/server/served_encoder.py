"""An encoder that is served: waiting requests are batched."""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from jaxscale.inference.encoder.encoder import Encoder, Text
from jaxscale.inference.engine.scheduler_output import Counts
from jaxscale.inference.request import Overloaded
from jaxscale.inference.server.backend import Load
from jaxscale.inference.server.calls import Caller, check_length
from jaxscale.inference.server.metrics import Metrics
from jaxscale.inference.text_bound import TextBound


_MOST_WAITING = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """Texts of one request."""

    kind: Literal["encode", "predict"]
    texts: Sequence[Text]
    truncate: bool
    result: concurrent.futures.Future[Any]
    begun: Callable[[], None]
    """Called when it is its turn."""


class ServedEncoder:
    """An encoder that is served: waiting requests are batched."""

    def __init__(
        self,
        encoder: Encoder,
        name: str,
        *,
        aliases: Sequence[str] = (),
        token_budget: int = 4096,
    ) -> None:
        """Compile for one text, so that the first request waits less.

        Args:
            encoder: The encoder.
            name: Model name in requests.
            aliases: Other model names that they may use.
            token_budget: Most tokens of a row.
        """
        self.name, self.aliases, self.encoder = name, tuple(aliases), encoder
        self.created = int(time.time())
        self._budget = max(token_budget, encoder.max_length)
        self._counts, self._running = Counts(), 0
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="encoder", daemon=True)
        encoder.encode(["a"], token_budget=self._budget, progress=False)
        self._thread.start()

    @property
    def longest(self) -> int:
        """Most tokens of a text."""
        return self.encoder.max_length

    @property
    def scores_pairs(self) -> bool:
        """Whether the model has a head that answers with one number."""
        head = self.encoder.model.head
        return (
            head is not None
            and head.config.kind != "pooler"
            and head.config.pools
            and head.config.num_labels == 1
        )

    def counted(
        self, texts: Sequence[Text], truncate: bool, caller: Caller
    ) -> tuple[list[Text], int]:
        """Texts as they are computed, and their tokens; they are checked.

        Texts that are to be cut come without what is certainly cut off.

        Raises:
            ValueError: one is empty or too long.
        """
        encoder = self.encoder
        bound = TextBound(
            tokenizer=encoder.tokenizer,
            most=encoder.max_length,
            left=caller.gone.is_set,
        )

        def kept(text: str) -> str:
            if truncate:
                return bound.beginning(text)
            bound.check(text)
            return text

        def of(text: Text) -> Text:
            if isinstance(text, list):
                if not truncate:
                    check_length(len(text), encoder.max_length)
                return text[: encoder.max_length]
            if isinstance(text, str):
                return kept(text)
            return kept(text[0]), kept(text[1])

        kept_texts = [of(text) for text in texts]
        plan = encoder.plan(kept_texts, token_budget=self._budget, truncate=truncate)
        return kept_texts, sum(plan.lengths)

    async def compute(
        self,
        kind: Literal["encode", "predict"],
        texts: Sequence[Text],
        truncate: bool,
        tokens: int,
        metrics: Metrics,
    ) -> np.ndarray:
        """Embeddings, or logits, of texts that were checked, and their tokens counted.

        Raises:
            Overloaded: too many requests wait.
        """
        start, loop = time.monotonic(), asyncio.get_running_loop()

        def begun() -> None:
            loop.call_soon_threadsafe(metrics.queued, time.monotonic() - start)

        result: concurrent.futures.Future[Any] = concurrent.futures.Future()
        job = _Job(
            kind=kind, texts=texts, truncate=truncate, result=result, begun=begun
        )
        counts = self._counts
        counts.received += 1
        outcome = "failed"
        try:
            self._jobs.put_nowait(job)
            rows = await asyncio.wrap_future(result)
            outcome = "finished"
        except queue.Full:
            outcome = "rejected"
            raise Overloaded(f"{_MOST_WAITING} calls wait", 1) from None
        except asyncio.CancelledError:
            outcome = "aborted"
            raise
        finally:
            setattr(counts, outcome, getattr(counts, outcome) + 1)
        counts.prompt_tokens += tokens
        metrics.finished(time.monotonic() - start)
        return rows

    def load(self) -> Load:
        """How busy it is, as of a moment ago."""
        waiting = self._jobs.qsize()
        return Load(waiting=waiting, running=self._running, counts=self._counts)

    def close(self) -> None:
        """End the thread once it is done."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            jobs = [self._jobs.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    jobs.append(self._jobs.get_nowait())
            alike = collections.defaultdict(list)
            for job in jobs:
                if job is not None:
                    alike[job.kind, job.truncate].append(job)
            for batch in alike.values():
                self._compute(batch)
            if None in jobs:
                return

    def _compute(self, batch: Sequence[_Job]) -> None:
        wanted = [job for job in batch if job.result.set_running_or_notify_cancel()]
        if not wanted:
            return
        for job in wanted:
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                job.begun()
        texts = [text for job in wanted for text in job.texts]
        self._running = len(wanted)
        function = getattr(self.encoder, wanted[0].kind)
        try:
            rows = function(
                texts,
                token_budget=self._budget,
                truncate=wanted[0].truncate,
                progress=False,
            )
        except (
            Exception
        ) as error:  # whatever it is, the calls raise it, and others go on
            for job in wanted:
                job.result.set_exception(error)
            return
        finally:
            self._running = 0
        at = 0
        for job in wanted:
            job.result.set_result(rows[at : at + len(job.texts)])
            at += len(job.texts)
