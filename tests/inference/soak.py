"""Requests without end through the engine for asyncio, and clients of every temper.

``python -m tests.inference.soak 20000`` sends so many. Clients share prompts, leave in
the middle, are canceled, have deadlines and priorities, and ask for what there is not;
pages and the queue are too small for all of them. Whoever reads to the end gets what
its request gets by itself, bit for bit. Whenever nothing is left, everything must be
accounted for and given back.
"""

import asyncio
import collections
import contextlib
import dataclasses
import os
import random
import resource
import sys
import time

from jaxscale.inference import InvalidRequest, Overloaded, Request, SamplingParams
from jaxscale.inference.engine.async_engine import AsyncEngine
from jaxscale.inference.engine.engine import Engine
from jaxscale.inference.engine.scheduling.scheduler import Scheduler
from jaxscale.inference.grammar import GrammarCompiler
from jaxscale.models import Tokenizer
from tests.inference.conftest import LLAMA, SIZES, Served
from tests.inference.typical import REQUESTS, TEXT_REQUESTS, alone, prompt


CLIENTS = 36
"""Clients at a time."""

FEW = dataclasses.replace(SIZES, num_pages=16, max_waiting=32, watermark=0.0)

_OUTCOMES = {
    "stop": "finished",
    "length": "finished",
    "aborted": "aborted",
    "timeout": "timeout",
}
_WORST = ("finished", "aborted", "timeout", "failed")


class Soak:
    """An engine that runs on, and what was seen of it."""

    def __init__(self, served, seed=0):
        tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=260)
        self.compiler = GrammarCompiler(
            tokenizer, vocab_size=288, eos_ids=[tokenizer.eos_id]
        )
        options = {"tokenizer": tokenizer, "compiler": self.compiler}
        self.requests = [*REQUESTS, *TEXT_REQUESTS]
        self.expected = alone(served, self.requests, **options)
        served.runner.reset()
        scheduler = Scheduler(FEW, seed=seed)
        self.engine = Engine(served.runner, scheduler, **options)
        self.counts = scheduler.counts
        self.random = random.Random(seed)
        self.open = collections.Counter()
        self.outcomes = {}
        self.rejected = self.sent = self.read = 0
        self.engine.observers.append(self._observe)
        self.clients = AsyncEngine(self.engine)
        self.engine.start()

    def run(self, count):
        """Send so many requests, wait until nothing is left, and check."""
        asyncio.run(self._all(count))
        self._wait()
        self._check()

    def close(self):
        self.engine.close()
        self.compiler.close()

    def _observe(self, event):
        name = event.sequence.request.id
        if event.kind == "queued":
            self.open[name] += 1
        elif event.kind == "ended":
            self.open[name] -= 1
            outcome = _OUTCOMES.get(event.finish, "failed")
            before = self.outcomes.get(name, "finished")
            self.outcomes[name] = max(before, outcome, key=_WORST.index)

    async def _all(self, count):
        places = asyncio.Semaphore(CLIENTS)

        async def one(how):
            async with places:
                task = asyncio.ensure_future(self._client(how))
                if how == "canceled":
                    await asyncio.sleep(self.random.random() / 50)
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

        tempers = ("reads", "leaves", "canceled", "late", "impossible")
        chosen = self.random.choices(tempers, (70, 14, 6, 7, 3), k=count)
        await asyncio.gather(*map(one, chosen))

    async def _client(self, how):
        which = self.random.randrange(len(self.requests))
        tokens, wanted = self.requests[which]
        if how == "impossible":
            tokens = prompt(70)
        late = self.random.random() / 50 if how == "late" else None
        request = Request(
            prompt=tokens,
            id=str(self.sent),
            params=SamplingParams(**{"temperature": 0.0, "logprobs": 0} | wanted),
            priority=self.random.choice((0, 0, 0, 1)),
            client=self.random.choice("abc"),
            salt=self.random.choice(("", "", "x")),
            deadline=None if late is None else time.monotonic() + late,
        )
        self.sent += 1
        outputs, most = [], self.random.randint(0, 6) if how == "leaves" else 1000
        try:
            stream = self.clients.generate(request)
            async with contextlib.aclosing(stream):
                async for output in stream:
                    outputs.append(output)
                    if len(outputs) > most:
                        return
        except (Overloaded, InvalidRequest):
            self.rejected += 1
            await asyncio.sleep(0.02)
            return
        for index, expected in enumerate(self.expected[which]):
            mine = [o for o in outputs if o.index == index]
            found = [t for o in mine for t in o.tokens]
            values = [x.logprob for o in mine for x in o.logprobs]
            if mine[-1].finish == "timeout":
                length = len(found)
                assert (found, values) == (expected[0][:length], expected[1][:length])
            else:
                assert (found, values, mine[-1].finish) == expected, which
                self.read += 1

    def _wait(self):
        """Until the engine has heard that the last clients have left."""
        end = time.monotonic() + 120
        while not self.engine.idle or self.engine._processors:
            assert time.monotonic() < end, "requests are left"
            time.sleep(0.002)
        asked = self.engine.admit(
            Request(prompt=[1], params=SamplingParams(max_tokens=0)), lambda news: None
        )
        asked.result(timeout=120)  # whatever came before has been done
        while not self.engine.idle or self.engine._processors:
            time.sleep(0.002)

    def _check(self):
        engine, scheduler, counts = self.engine, self.engine.scheduler, self.counts
        assert engine.error is None
        assert not any(self.open.values())
        ended = collections.Counter(self.outcomes.values())
        names = ("finished", "aborted", "timeout", "failed")
        truth = tuple(ended[name] for name in names)
        assert tuple(getattr(counts, name) for name in names) == truth
        assert counts.received == sum(truth) + counts.rejected
        assert self.rejected <= counts.rejected  # the canceled do not hear of it
        pool = scheduler.pool
        assert pool.num_held == scheduler.num_running == scheduler.num_waiting == 0
        assert pool.num_free + pool.num_cached == pool.num_pages
        assert not any(map(pool.holders, range(pool.num_pages)))
        assert not engine._counted and not engine._changed and not engine._flying
        assert sorted(engine._uncounted) == list(range(FEW.num_slots))
        assert len(list(scheduler.sequences())) == scheduler.waiting_tokens == 0


def resident():
    """Megabytes that the process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main(count):
    soak, start = Soak(Served(LLAMA, sizes=SIZES)), time.monotonic()
    sizes = []
    for _ in range(20):
        soak.run(count // 20)
        sizes.append(resident())
        counts = soak.counts
        print(
            f"{soak.sent} sent, {counts.finished} finished, {counts.aborted} aborted, "
            f"{counts.rejected} rejected, {counts.failed} failed, {counts.preempted} "
            f"preemptions, {counts.cached_tokens} tokens found, {sizes[-1]:.0f} MB",
            flush=True,
        )
    soak.close()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(
        f"{time.monotonic() - start:.0f} s, {soak.read} answers read to their end are "
        f"equal bit for bit; {sizes[4]:.0f} MB after a quarter, {sizes[-1]:.0f} MB at "
        f"the end, {most:.0f} MB at most"
    )
    assert sizes[-1] < sizes[4] + 8, "memory grows"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
