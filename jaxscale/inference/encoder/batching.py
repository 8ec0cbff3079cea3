"""Dynamic batching: the texts of many calls share the passes of an encoder."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jaxscale.inference.encoder.encode_plan import usual_capacities
from jaxscale.inference.encoder.encoder import Method
from jaxscale.inference.fair_queue import FairQueue
from jaxscale.models.tokenizer import EncodedText


@runtime_checkable
class Passes[Launched](Protocol):
    """What computes passes; `Encoder` does."""

    def launch(
        self,
        method: Method,
        texts: Sequence[EncodedText],
        token_budget: int,
        *,
        stand_in: bool,
    ) -> list[Launched]:
        """Have the device compute texts, and return at once; see `Encoder.launch`."""
        ...

    def read(self, launched: Launched) -> Iterable[tuple[int, np.ndarray]]:
        """Index and result of each text, once they are there."""
        ...


@dataclasses.dataclass(eq=False, kw_only=True)
class Call:
    """Texts of one call, and their results as far as they are computed."""

    method: Method
    """What is computed of them."""
    texts: Sequence[EncodedText]
    """Results of `Encoder.tokenize`, at least one."""
    client: str = ""
    """Clients take turns."""
    name: str = ""
    """The calls of a client take turns, too."""
    begun: Callable[[], None] = lambda: None
    """Called, by the thread that computes, when the first text is."""
    result: concurrent.futures.Future[np.ndarray] = dataclasses.field(
        default_factory=concurrent.futures.Future
    )
    """[texts, D or C] fp32."""
    over: bool = False
    """Whether nobody waits for it any more: set it to save its computation."""
    rows: np.ndarray | None = None
    """[texts, D or C], as far as they are computed."""
    left: int = dataclasses.field(init=False)
    """Texts that are not computed."""

    def __post_init__(self) -> None:
        self.left = len(self.texts)


type _Text = tuple[Call, int]
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

    def push(self, call: Call) -> None:
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


class DynamicBatching[Launched]:
    """A thread that computes pass after pass of the texts of many calls.

    Each pass takes as many of the waiting texts as a row holds, so that a call waits
    for a pass or two, and not for all that came before. Texts were tokenized on other
    threads. While the device computes a pass, the next one is launched.
    """

    def __init__(
        self,
        encoder: Passes[Launched],
        token_budget: int,
        *,
        on_pass: Callable[[float, int, int], None] = lambda *_: None,
    ) -> None:
        """Start the thread.

        Args:
            encoder: What computes.
            token_budget: Most tokens of a pass, at least as many as the longest text.
            on_pass: Told the seconds, texts and tokens of each pass.
        """
        self._encoder, self._budget, self._on_pass = encoder, token_budget, on_pass
        self._most = usual_capacities(token_budget)[-1]
        self.running = 0
        """Calls of the latest pass."""
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._turns = _Turns()
        self.thread = threading.Thread(target=self._run, name="encoder", daemon=True)
        self.thread.start()

    def submit(self, call: Call) -> None:
        """Have a call computed: its `result` has the rows in the end, or the error."""
        self._calls.put(call)

    def close(self) -> None:
        """End the thread once it is done."""
        self._calls.put(None)
        self.thread.join()

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
            alike = not found or call.method == found[0][0].method
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
        self.running = len({id(call) for call, _ in found})
        return found

    def _launched(self, texts: Sequence[_Text]) -> list[Launched]:
        encoded = [call.texts[index] for call, index in texts]
        method = texts[0][0].method
        return self._encoder.launch(method, encoded, self._budget, stand_in=True)

    def _finish(
        self, texts: list[_Text], launched: list[Launched], started: float
    ) -> None:
        self._attempt(texts, lambda: self._distribute(texts, launched))
        tokens = sum(len(call.texts[index].ids) for call, index in texts)
        self._on_pass(time.monotonic() - started, len(texts), tokens)

    def _distribute(self, texts: list[_Text], launched: list[Launched]) -> None:
        """Give calls the rows of their texts."""
        for each in launched:
            for place, row in self._encoder.read(each):
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
