"""An encoder that is served: its passes hold texts of many calls."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxscale.inference.encoder.batching import Call, DynamicBatching
from jaxscale.inference.encoder.encoder import Encoder, Method
from jaxscale.inference.encoder.texts import Text
from jaxscale.inference.engine.scheduling.scheduler_output import Counts
from jaxscale.inference.gc_heap import FrozenHeap
from jaxscale.inference.request import Overloaded
from jaxscale.inference.server.backend import Load
from jaxscale.inference.server.calls import Caller, check_length
from jaxscale.inference.text_bound import TextBound
from jaxscale.models.tokenizer import EncodedText


_MOST_WAITING = 256


class ServedEncoder:
    """An encoder that is served: its passes hold texts of many calls.

    `DynamicBatching` computes them, on a thread of its own. Until the program of a size
    is compiled, that of a larger one stands in for it.
    """

    def __init__(
        self,
        encoder: Encoder,
        name: str,
        *,
        aliases: Sequence[str] = (),
        token_budget: int = 4096,
    ) -> None:
        """Compile the largest size; on a GPU the others follow in the background.

        Args:
            encoder: The encoder.
            name: Model name in requests.
            aliases: Other model names that they may use.
            token_budget: Most tokens of a row.
        """
        self.name, self.aliases, self.encoder = name, tuple(aliases), encoder
        self.created = int(time.time())
        self.on_pass: Callable[[float, int, int], None] | None = None
        """Told the seconds, texts and tokens of each pass."""
        budget = max(token_budget, encoder.max_length)
        self._counts, self._waiting = Counts(), 0
        self._heap: FrozenHeap | None = None
        methods: tuple[Method, ...] = ("encode", "predict")
        methods = methods[: 1 + self.scores_pairs]
        for method in methods:
            encoder.compile(method, token_budget=budget, sizes="largest")
        for method in methods if encoder.device.platform != "cpu" else ():
            encoder.compile(method, token_budget=budget, wait=False)
        self._batching = DynamicBatching(encoder, budget, on_pass=self._passed)

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
    ) -> tuple[list[EncodedText], int]:
        """The tokens of texts, and their number.

        Of texts that are to be cut, what is certainly cut off is not tokenized.

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
            if isinstance(text, tuple):
                return kept(text[0]), kept(text[1])
            return kept(text) if isinstance(text, str) else text

        found = encoder.tokenize(
            [of(text) for text in texts], truncate=truncate, spans=False
        )
        return found, sum(len(text.ids) for text in found)

    async def compute(
        self, kind: Method, texts: Sequence[EncodedText], caller: Caller
    ) -> np.ndarray:
        """Embeddings, or logits, of texts that were tokenized, [texts, D or C].

        Raises:
            Overloaded: too many calls wait.
        """
        start, loop = time.monotonic(), asyncio.get_running_loop()
        metrics, counts = caller.metrics, self._counts
        counts.received += 1
        if self._waiting >= _MOST_WAITING:
            counts.rejected += 1
            raise Overloaded(f"{self._waiting} calls wait", 1)

        def begun() -> None:
            def note() -> None:
                self._waiting -= 1
                metrics.queued(time.monotonic() - start)

            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(note)

        call = Call(
            method=kind,
            texts=texts,
            client=caller.name,
            name=caller.request_id,
            begun=begun,
        )
        self._waiting += 1
        self._batching.submit(call)
        outcome = "failed"
        try:
            rows = await asyncio.wrap_future(call.result)
            outcome = "finished"
        except asyncio.CancelledError:
            outcome = "aborted"
            raise
        finally:
            call.over = True
            setattr(counts, outcome, getattr(counts, outcome) + 1)
        counts.prompt_tokens += sum(len(text.ids) for text in texts)
        metrics.finished(time.monotonic() - start)
        return rows

    def load(self) -> Load:
        """How busy it is, as of a moment ago."""
        return Load(
            waiting=self._waiting,
            running=self._batching.running,
            counts=self._counts,
            programs=self.encoder.num_compiled,
        )

    def freeze_gc_heap(self) -> None:
        """Keep the garbage collector from what is there now: see `FrozenHeap`."""

        def whole() -> bool:
            compiled, begun = self.encoder.num_compiled
            return compiled == begun

        self._heap = FrozenHeap(whole)

    def close(self) -> None:
        """End the thread once it is done."""
        self._batching.close()

    def _passed(self, seconds: float, texts: int, tokens: int) -> None:
        if self.on_pass is not None:
            self.on_pass(seconds, texts, tokens)
        if self._heap is not None:
            self._heap.again()
