"""An engine that says what it is told to, a token each time the event loop goes round.

Everything around the model is real: requests, outputs, text, stop strings, events.
"""

import asyncio
import contextlib
import itertools
import threading

from jaxscale.inference.chat import ChatTemplate
from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.inference.engine.scheduling.scheduler_output import Counts, SchedulerEvent
from jaxscale.inference.engine.scheduling.sequence import Sequence, SequenceStatus
from jaxscale.inference.engine.timeline import Timeline
from jaxscale.inference.output import Output, TokenLogprobs
from jaxscale.inference.request import Draining, EngineDead, InvalidRequest, Overloaded
from jaxscale.inference.server import Load, TextModel
from jaxscale.inference.text import TextStream
from jaxscale.models import Tokenizer
from tests.inference.test_chat import CHATML


NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENIZER = Tokenizer.train(["to be or not to be"], 270, special_tokens=NAMES)
CONFIG = SchedulerConfig(num_pages=64, vocab_size=288, max_len=2048, num_slots=4)


class FakeEngine:
    """What the server takes for an engine."""

    def __init__(self, answer=" to be", *, most=100):
        self.answer, self.most = answer, most
        self.config, self.error = CONFIG, None
        self.counts, self.live, self.seen = Counts(), {}, []
        self.timelines = []
        self.fails = None
        self.hold = None  # an asyncio.Semaphore, of which each token takes one
        self.draining = self.closed = False
        self._on_event, self._on_tick = (lambda event: None), (lambda: None)
        self._order = itertools.count()

    def text_of(self, request, index):
        guide = request.params.guided
        if guide is not None and guide.kind == "choice":
            return guide.choices[0]
        return self.answer if isinstance(self.answer, str) else self.answer[index]

    def observe(self, on_event, on_tick):
        self._on_event, self._on_tick = on_event, on_tick

    def load(self):
        return Load(running=len(self.live), pages=64, pages_held=16, counts=self.counts)

    @contextlib.contextmanager
    def recorded(self):
        self.timelines.append(Timeline())
        yield self.timelines[-1]
        self.timelines[-1].stop()

    def drain(self):
        self.draining = True

    def close(self):
        self.closed = True

    async def generate(self, request):
        self._admit(request)
        outcome = "aborted"
        jobs = [self._continuation(request, i) for i in range(request.params.n)]
        try:
            for made in itertools.zip_longest(*(self._outputs(c) for c in jobs)):
                if self.hold is not None:
                    await self.hold.acquire()
                await asyncio.sleep(0)
                if self.error is not None:
                    raise EngineDead(str(self.error))
                self._on_tick()
                for output in filter(None, made):
                    yield output
            outcome = "finished"
        finally:
            self.live.pop(request.id)
            setattr(self.counts, outcome, getattr(self.counts, outcome) + 1)
            for c in jobs:
                self._say("ended", c)

    def _admit(self, request):
        self.loop = asyncio.get_running_loop()
        self.counts.received += 1
        self.seen.append(request)
        error = self.error and EngineDead(str(self.error))
        if self.draining:
            error = Draining("draining")
        if len(self.live) >= self.most:
            error = Overloaded("2 requests wait", 7)
        if request.id in self.live:
            error = InvalidRequest("id is in use")
        if error is not None:
            self.counts.rejected += 1
            raise error
        self.live[request.id] = request

    def _continuation(self, request, index):
        c = Sequence(
            request=request,
            index=index,
            order=(0, next(self._order), index),
            seed=0,
            limit=2048,
            stops=frozenset(),
            tokens=list(request.prompt),
            state=SequenceStatus.PREFILL,
        )
        self._say("admitted", c)
        c.state = SequenceStatus.DECODE
        return c

    def _say(self, kind, c):
        self._on_event(SchedulerEvent(kind=kind, sequence=c, time=0.0))

    def _outputs(self, c):
        request, params = c.request, c.request.params
        tokens = TOKENIZER.encode(self.text_of(request, c.index))
        stream = TextStream(TOKENIZER, request.prompt, params)
        limit = len(tokens) if params.max_tokens is None else params.max_tokens
        more = {"request": request.id, "index": c.index, "cached_tokens": 1}
        if params.prompt_logprobs is not None and c.index == 0:
            scored = [score(t, params.prompt_logprobs) for t in request.prompt[1:]]
            more["prompt_logprobs"] = (None, *scored)
        if limit == 0 or not tokens:
            yield Output(finish="length" if limit == 0 else "stop", **more)
            return
        for i, token in enumerate(tokens):
            finish = "stop" if i + 1 == len(tokens) else None
            finish = "length" if i + 1 == params.max_tokens else finish
            if self.fails is not None and i == 1:
                yield Output(finish=self.fails, error="not finite", **more)
                return
            text = stream.add([token], None)
            finish = "stop" if stream.stop is not None else finish
            if finish is not None and stream.stop is None:
                text += stream.add([], finish)
            self.counts.drawn_tokens += 1
            wanted = params.logprobs
            yield Output(
                tokens=(token,),
                text=text,
                logprobs=() if wanted is None else (score(token, wanted),),
                finish=finish,
                stop=stream.stop,
                **more,
            )
            more.pop("prompt_logprobs", None)
            if finish is not None:
                return


def score(token, most):
    top = tuple((token + i, -0.5 - i) for i in range(most))
    return TokenLogprobs(token=token, logprob=-0.5, top=top)


def text_model(engine, *, chat=True, template=CHATML, **more):
    chat = ChatTemplate(TOKENIZER, template) if chat else None
    found = {
        "tool_format": chat and chat.tool_format,
        "reasoning_format": chat and chat.reasoning_format,
    }
    return TextModel(
        name="tiny", backend=engine, tokenizer=TOKENIZER, chat=chat, **(found | more)
    )


def in_thread(function):
    """Run on a thread, as those of servers; what it raises comes out of `join`."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


class SlowEngine(FakeEngine):
    """A token takes it 10 ms, and prompts that ask it to wait an answer of seconds."""

    hold = property(lambda self: self, lambda self, value: None)

    async def acquire(self):
        await asyncio.sleep(0.01)

    def text_of(self, request, index):
        waits = TOKENIZER.decode(request.prompt) == "wait"
        return self.answer * 900 if waits else self.answer


if __name__ == "__main__":
    import sys

    from jaxscale.inference.server import ServerConfig, serve

    serve(lambda: text_model(SlowEngine("c")), ServerConfig(), port=int(sys.argv[1]))
