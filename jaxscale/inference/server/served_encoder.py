"""An encoder that is served: its passes hold texts of many calls."""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxscale.inference.encoder.encode_plan import usual_capacities
from jaxscale.inference.encoder.encoder import Encoder, Launched, Method
from jaxscale.inference.encoder.texts import Text
from jaxscale.inference.engine.scheduling.fair_queue import FairQueue
from jaxscale.inference.engine.scheduling.scheduler_output import Counts
from jaxscale.inference.request import Overloaded
from jaxscale.inference.server.backend import Load
from jaxscale.inference.server.calls import Caller, check_length
from jaxscale.inference.text_bound import TextBound
from jaxscale.models.tokenizer import EncodedText


_MOST_WAITING = 256


@dataclasses.dataclass(eq=False, kw_only=True)
class _Call:
    """Texts of one call."""

    kind: Method
    texts: Sequence[EncodedText]
    client: str
    name: str
    """Of the call."""
    begun: Callable[[], None]
    """Called when the first of its texts is computed."""
    result: concurrent.futures.Future[np.ndarray]
    rows: np.ndarray | None = None
    """[texts, D or C], as far as they are computed."""
    left: int
    """Texts that are not computed."""
    over: bool = False
    """Whether nobody waits for it any more."""


type _Text = tuple[_Call, int]
"""A call, and the index of one of its texts."""


class _Turns:
    """Texts that wait: clients take turns, and the calls of a client.

    Who was served the fewest tokens is next, so a call of a few texts is done soon,
    however many thousands another one has.
    """

    def __init__(self) -> None:
        """Nothing waits."""
        self._clients = FairQueue[_Text]()
        self._calls: dict[str, FairQueue[_Text]] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def push(self, call: _Call) -> None:
        """Add the texts of a call."""
        calls = self._calls.setdefault(call.client, FairQueue())
        for index in range(len(call.texts)):
            calls.push((call, index), priority=0, client=call.name)
            self._clients.push((call, index), priority=0, client=call.client)

    def peek(self) -> _Text | None:
        """The next text, None if nothing waits."""
        # Any text of the client whose turn it is.
        found = self._clients.peek()
        return None if found is None else self._calls[found[0].client].peek()

    def pop(self, tokens: int) -> None:
        """Remove the text that `peek` has just returned, and charge its tokens."""
        found = self.peek()
        assert found is not None
        call, calls = found[0], self._calls[found[0].client]
        for turns, client in ((self._clients, call.client), (calls, call.name)):
            turns.pop()
            turns.charge(tokens, priority=0, client=client)
        if not calls:
            del self._calls[call.client]


class ServedEncoder:
    """An encoder that is served: its passes hold texts of many calls.

    A thread computes pass after pass: each takes as many of the waiting texts as a row
    holds, so that a call waits for a pass or two, and not for all that came before.
    Texts were tokenized on other threads. Until the program of a size is compiled, that
    of a larger one stands in for it.
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
        self._budget = max(token_budget, encoder.max_length)
        self._most = usual_capacities(self._budget)[-1]
        self._counts, self._waiting, self._running = Counts(), 0, 0
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._turns = _Turns()
        self._thread = threading.Thread(target=self._run, name="encoder", daemon=True)
        methods: tuple[Method, ...] = ("encode", "predict")
        methods = methods[: 1 + self.scores_pairs]
        for method in methods:
            encoder.compile(method, token_budget=self._budget, sizes="largest")
        for method in methods if encoder.device.platform != "cpu" else ():
            encoder.compile(method, token_budget=self._budget, wait=False)
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

        found = encoder.tokenize([of(text) for text in texts], truncate=truncate)
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

        call = _Call(
            kind=kind,
            texts=texts,
            client=caller.name,
            name=caller.request_id,
            begun=begun,
            result=concurrent.futures.Future(),
            left=len(texts),
        )
        self._waiting += 1
        self._calls.put(call)
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
            running=self._running,
            counts=self._counts,
            programs=self.encoder.num_compiled,
        )

    def close(self) -> None:
        """End the thread once it is done."""
        self._calls.put(None)
        self._thread.join()

    # The thread.

    def _run(self) -> None:
        flying = collections.deque[tuple[list[_Text], list[Launched], float]]()
        closing = False
        while not (closing and not flying and not self._turns):
            closing |= self._receive(wait=not (flying or self._turns or closing))
            texts = self._next()
            if texts:
                # The device has the next pass when it is done with one.
                started = time.monotonic()
                launched = self._attempt(texts, lambda x=texts: self._launched(x))
                flying.append((texts, launched or [], started))
            if len(flying) > bool(texts):
                self._finish(*flying.popleft())

    def _receive(self, *, wait: bool) -> bool:
        """Take in new calls; True where there will be no more."""
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get(block=wait)
                if call is None:
                    return True
                self._turns.push(call)
                wait = False
        return False

    def _next(self) -> list[_Text]:
        """The texts of the next pass."""
        found: list[_Text] = []
        room = self._budget
        while (text := self._turns.peek()) is not None:
            call, index = text
            tokens = len(call.texts[index].ids)
            alike = not found or call.kind == found[0][0].kind
            if not call.over and (
                not alike or tokens > room or len(found) == self._most
            ):
                break
            if index == 0:
                call.begun()
            self._turns.pop(0 if call.over else tokens)
            if not call.over:
                found.append(text)
                room -= tokens
        self._running = len({id(call) for call, _ in found})
        return found

    def _launched(self, texts: Sequence[_Text]) -> list[Launched]:
        encoded = [call.texts[index] for call, index in texts]
        kind = texts[0][0].kind
        return self.encoder.launch(kind, encoded, self._budget, stand_in=True)

    def _finish(
        self, texts: list[_Text], launched: list[Launched], started: float
    ) -> None:
        self._attempt(texts, lambda: self._distribute(texts, launched))
        if self.on_pass is not None:
            tokens = sum(len(call.texts[index].ids) for call, index in texts)
            self.on_pass(time.monotonic() - started, len(texts), tokens)

    def _distribute(self, texts: list[_Text], launched: list[Launched]) -> None:
        """Give calls the rows of their texts."""
        for each in launched:
            for place, row in self.encoder.read(each):
                call, index = texts[place]
                if call.rows is None:
                    call.rows = np.empty((len(call.texts), *row.shape), np.float32)
                call.rows[index] = row
                call.left -= 1
                if not call.left and call.result.set_running_or_notify_cancel():
                    call.result.set_result(call.rows)

    def _attempt[T](self, texts: Sequence[_Text], run: Callable[[], T]) -> T | None:
        """What it makes; the calls of these texts raise what it raises."""
        try:
            return run()
        except Exception as error:  # whatever it is: others go on
            for call in {id(call): call for call, _ in texts}.values():
                if not call.result.done():
                    call.result.set_exception(error)
                call.over = True
            return None
