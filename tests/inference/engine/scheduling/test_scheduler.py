"""The policy, driven against a device without a model."""

import collections
import contextlib
import dataclasses
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.inference.engine.scheduling.batch_rows import OutFlag
from jaxscale.inference.engine.scheduling.block_pool import BlockPool
from jaxscale.inference.engine.scheduling.page_forecast import (
    AnswerLengths,
    PageForecast,
    forecast,
)
from jaxscale.inference.engine.scheduling.scheduler import Scheduler
from jaxscale.inference.engine.scheduling.scheduler_config import (
    SchedulerConfig,
    bucket_of,
    bucket_sizes,
)
from jaxscale.inference.engine.scheduling.scheduler_output import Drawn
from jaxscale.inference.engine.scheduling.sequence import (
    Sequence,
    SequenceStatus,
)
from jaxscale.inference.fair_queue import FairQueue
from jaxscale.inference.request import (
    Draining,
    InvalidRequest,
    Overloaded,
    Request,
    SamplingParams,
)
from tests.inference.engine.fake_device import VOCAB, FakeDevice, solo


def config(**changes):
    sizes = {
        "num_pages": 16,
        "vocab_size": VOCAB,
        "max_len": 40,
        "page_size": 4,
        "num_slots": 8,
        "prefill_tokens": 16,
        "prefill_requests": 3,
        "split": 8,
        "eos_ids": (0,),
        "watermark": 0.05,
    }
    return SchedulerConfig(**sizes | changes)


class Server:
    """The loop of the engine, with results that come `lag` dispatches late."""

    def __init__(self, config, lag=1, seed=0):
        self.scheduler = Scheduler(config, seed=seed)
        self.device = FakeDevice(self.scheduler, seed)
        self.lag, self.time = lag, 0.0
        self.hints = dict  # for each plan
        self.flying = collections.deque()
        self.received = collections.defaultdict(list)
        self.ended = {}
        self.events = []
        self.sequences = {}

    def add(self, *requests):
        for request in requests:
            self.scheduler.add(request, now=self.time)
        for c in self.scheduler.sequences():
            self.sequences[c.request.id, c.index] = c

    def tick(self):
        self.time += 0.001
        plan = self.scheduler.schedule(now=self.time, **self.hints())
        if plan is not None:
            self.flying.append((plan, *self.device.dispatch(plan)))
            self.check_plan(plan)
        self.check_pages()
        while self.flying and (plan is None or len(self.flying) > self.lag):
            self._read()
        self._events()
        return plan

    def run(self, ticks=5000):
        for _ in range(ticks):
            if self.scheduler.idle and not self.flying:
                break
            plan = self.tick() or self.tick()  # what was under way may have been all
            assert plan is not None or self.scheduler.idle
        assert self.scheduler.idle, "requests are left"
        self.check_pages()
        pool = self.scheduler.pool
        assert pool.num_held == 0 and self.scheduler.num_running == 0
        assert pool.num_free + pool.num_cached == pool.num_pages

    def check_solo(self):
        """Everyone who was not given up got what it gets alone."""
        for key, c in self.sequences.items():
            expected = solo(c)
            if self.ended[key] in ("stop", "length"):
                assert self.received[key] == expected, key
            else:
                assert self.received[key] == expected[: len(self.received[key])]

    def check_plan(self, plan):
        config, decode = self.scheduler.config, plan.decode
        for chunk in plan.prefill:
            assert len(chunk.pages) == -(-chunk.end // config.page_size)
        if decode is not None:  # as programs are compiled
            assert decode.drafts == config.drafts_of(decode.bucket) or decode.steps == 1
            alone = any(chunk.sequence.needs_own_prefill for chunk in plan.prefill)
            assert not (decode.mixed and alone)
            assert not {*decode.full} & {*decode.replayed}

    def check_pages(self):
        pool = self.scheduler.pool
        holders = collections.Counter()
        for c in self.scheduler.sequences():
            assert len(set(c.pages)) == len(c.pages)
            if self.scheduler.config.prefix_cache:  # full pages can be found at once
                assert c.named == c.kv // self.scheduler.config.page_size
            holders.update(c.pages)
        for page in range(pool.num_pages):
            assert pool.holders(page) == holders[page]
        assert pool.num_held == len(holders)
        assert pool.num_free + pool.num_cached + pool.num_held == pool.num_pages

    def _read(self):
        plan, prefill, decode = self.flying.popleft()
        # Both results of a plan at once, or one after the other.
        if plan.tick % 2:
            news = self.scheduler.update(plan, prefill=prefill, now=self.time)
            news += self.scheduler.update(plan, decode=decode, now=self.time)
        else:
            both = {"prefill": prefill, "decode": decode}
            news = self.scheduler.update(plan, **both, now=self.time)
        for item in news:
            c = item.sequence
            assert (c.request.id, c.index) not in self.ended
            self.received[c.request.id, c.index] += item.tokens
        self._events()

    def _events(self):
        for event in self.scheduler.take_events():
            self.events.append(event)
            if event.kind == "ended":
                key = event.sequence.request.id, event.sequence.index
                assert key not in self.ended
                self.ended[key] = event.finish


def prompt(rng, most=20):
    """Few different tokens, so that prompts begin alike."""
    return [rng.choice((3, 3, 3, 7)) for _ in range(rng.randint(1, most))]


def params(rng):
    most = rng.choice((0, 1, 2, 5, 12, None))
    return SamplingParams(
        max_tokens=most,
        min_tokens=min(rng.choice((0, 0, 3)), 5 if most is None else most),
        n=rng.choice((1, 1, 1, 3)),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=rng.sample(range(VOCAB), rng.choice((0, 2, 12))),
        top_p=rng.choice((1.0, 1.0, 0.5)),
        seed=rng.choice((None, -5)),
        prompt_logprobs=rng.choice((None, None, 0)),
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lag=st.integers(0, 2),
    pages=st.integers(8, 24),
    steps=st.sampled_from((1, 4)),
    drafts=st.sampled_from((0, 2)),
    cache=st.booleans(),
    trouble=st.floats(0, 0.2),
    mixes=st.sampled_from((0, 0.5, 1)),
    share=st.sampled_from((0.0, 0.5, None)),
)
def test_everything_is_answered_as_if_alone(
    seed, lag, pages, steps, drafts, cache, trouble, mixes, share
):
    """Whatever joins, leaves, is aborted, expires or is preempted."""
    rng = random.Random(seed)
    server = Server(
        config(
            num_pages=pages,
            num_slots=rng.choice((2, 8)),
            draft_bucket=rng.choice((2, 4)),
            steps=steps,
            drafts=drafts,
            prefix_cache=cache,
        ),
        lag,
        seed,
    )
    scheduler = server.scheduler
    if share is not None:  # of their tokens that answers are expected to take
        scheduler._lengths.left = lambda c: share * (c.limit - len(c.tokens))
    # At first only two may run, as where larger programs are not compiled yet.
    scheduler.max_running = 2
    server.hints = lambda: {
        **{h: rng.random() < 0.2 for h in ("soon", "plain")},
        "mixes": lambda tokens, keys, rows: rng.random() < mixes,
    }
    for number in range(12):
        if number == 4:
            scheduler.max_running = scheduler.config.num_slots
        deadline = server.time + rng.random() / 20 if rng.random() < trouble else None
        request = Request(
            prompt=prompt(rng),
            id=str(number),
            params=params(rng),
            priority=rng.choice((0, 0, 1)),
            client=rng.choice("ab"),
            salt=rng.choice(("", "", "x")),
            deadline=deadline,
        )
        with contextlib.suppress(InvalidRequest):
            server.add(request)
        for _ in range(rng.choice((0, 0, 1, 5))):
            server.tick()
        if rng.random() < trouble:
            scheduler.abort(str(rng.randint(0, number)), now=server.time)
        if rng.random() < trouble and (some := list(scheduler.sequences())):
            scheduler.finish(rng.choice(some), "stop", now=server.time)
            server.sequences = {
                k: c for k, c in server.sequences.items() if c.finish != "stop"
            }
    server.run()
    server.sequences = {k: c for k, c in server.sequences.items() if k in server.ended}
    server.check_solo()
    counts = scheduler.counts
    assert counts.accepted_tokens <= counts.drafted_tokens
    assert counts.received == 12
    assert counts.received == (
        counts.finished
        + counts.aborted
        + counts.rejected
        + counts.timeout
        + counts.failed
    )


def requests(count, *, length=6, most=6, **fields):
    return [
        Request(
            prompt=[(7 * i + j) % VOCAB for j in range(length)],
            id=f"{fields.get('client', '')}{i}",
            params=SamplingParams(max_tokens=most, ignore_eos=True),
            **fields,
        )
        for i in range(count)
    ]


def test_long_prompts_beside_many_that_decode():
    """A split of a step, and none of a step that is for short prompts."""
    server = Server(
        config(
            num_pages=400, max_len=300, prefill_tokens=40, steps=4, prefix_cache=False
        )
    )
    long = Request(prompt=[1] * 200, id="long", params=SamplingParams(max_tokens=2))
    server.add(long)
    assert [len(c.tokens) for c in server.tick().prefill] == [40]
    server.add(*requests(3, length=4, most=250))
    server.tick(), server.tick()  # two, then one of them
    sizes = []
    while (c := server.sequences["long", 0]).state is SequenceStatus.PREFILL:
        if len(sizes) == 3:
            server.add(*requests(1, length=7, most=250, client="b"))
        sizes.append(
            {x.sequence.request.id: len(x.tokens) for x in server.tick().prefill}
        )
    assert c.target == 200
    assert sizes[:3] == [{"long": 8}] * 3
    assert sorted(map(str, sizes[3:5])) == ["{'b0': 7}", "{'long': 8}"]
    assert sizes[5:] == [{"long": 8}] * len(sizes[5:]) != []
    plan = server.tick()
    assert plan.decode.steps == 4 and plan.decode.drafts == 0
    server.hints = lambda: {"soon": True}
    assert server.tick().decode.steps == 1
    server.run()
    server.check_solo()


def test_eight_pages_and_64_requests():
    """Nobody is preempted where answers are as long as those before."""
    server = Server(config(num_pages=8, num_slots=64, max_waiting=64))
    server.add(*requests(64, length=9, most=20))
    server.run()
    server.check_solo()
    assert server.scheduler.counts.finished == 64
    assert server.scheduler.counts.preempted == 0


def test_eight_pages_and_64_requests_that_are_longer_than_expected(short_answers):
    server = Server(config(num_pages=8, num_slots=64, max_waiting=64))
    server.add(*requests(64, length=9, most=20))
    server.run()
    server.check_solo()
    assert server.scheduler.counts.finished == 64
    assert server.scheduler.counts.preempted > 0


@pytest.mark.parametrize("room", [12, 13, 14])
def test_a_forecast_is_the_most_that_are_ever_held(room):
    """Against all steps; a page more every 4."""
    rng = random.Random(room)
    for _ in range(200):
        held = [(rng.randint(1, 4), 4 * rng.randint(0, 6)) for _ in range(3)]
        forecast = PageForecast(room, page_size=4)
        for pages, left in held[:2]:
            forecast.add(pages, left // 4, left)
        most = max(
            sum(pages + step / 4 for pages, left in held if left >= step)
            for step in range(25)
        )
        pages, left = held[2]
        assert forecast.fits(pages, left // 4, left) == (most <= room)


def test_nobody_waits_where_there_are_pages_for_all_that_all_slots_may_have():
    server = Server(config(num_pages=8 * 10))
    server.add(*requests(8, length=9, most=31))
    server.tick(), server.tick(), server.tick(), server.tick(), server.tick()
    assert server.scheduler.num_running == 8
    server.run()
    assert server.scheduler.counts.preempted == 0


@pytest.mark.parametrize(("most", "running"), [(None, 35), (2000, 4)])
def test_answers_without_a_bound_are_not_expected_to_be_as_long_as_may_be(
    most, running
):
    """Those with a bound are trusted to take it, until some have ended."""
    sizes = {"num_pages": 600, "page_size": 16, "max_len": 2048, "num_slots": 64}
    sizes |= {"prefill_requests": 64, "prefill_tokens": 64, "split": 16}
    scheduler = Scheduler(config(**sizes))
    for i in range(64):
        params = SamplingParams(max_tokens=most)
        scheduler.add(Request(prompt=[1], id=str(i), params=params), now=0.0)
    scheduler.schedule(now=0.0)
    assert scheduler.num_running == running


@pytest.mark.parametrize("bounded", [True, False])
def test_lengths_are_learned_from_those_that_do_not_end_by_themselves(bounded):
    lengths = AnswerLengths()
    first, second, new = (
        Sequence(
            request=Request(
                prompt=[1], params=SamplingParams(max_tokens=1000 if bounded else None)
            ),
            index=0,
            order=(0, 1, 0),
            seed=0,
            limit=1001,
            stops=frozenset(),
            tokens=[1] * (1 + drawn),
        )
        for drawn in (100, 700, 0)
    )
    for _ in range(300):
        lengths.ended(first)
    assert lengths.left(new) == pytest.approx(100, rel=0.1)
    lengths.watch([first, second, new])
    raised = lengths.left(new)
    assert 104 < raised < 120  # one more than was expected, which still runs
    lengths.watch([])
    assert lengths.left(new) < 104
    lengths.ended(new, itself=False)  # aborted before it had much: it says nothing
    assert lengths.left(new) == pytest.approx(100, rel=0.04)
    lengths.ended(second, itself=False)
    assert lengths.left(new) == pytest.approx(raised, rel=0.02)
    assert lengths.left(second) > 20


def test_a_shared_page_is_held_until_the_last_of_its_holders_ends():
    pool = BlockPool(num_pages=12, page_size=4)
    shared = pool.allocate(4)
    pool.hold(shared)
    low = pool.allocate(2)
    pool.hold(low)

    def running(pages, left, priority):
        length = len(pages) * 4
        params = SamplingParams(max_tokens=left)
        return Sequence(
            request=Request(prompt=[1] * length, params=params),
            index=0,
            order=(-priority, 1, 0),
            seed=0,
            limit=length + left,
            stops=frozenset(),
            tokens=[1] * length,
            pages=pages,
        )

    these = [running(shared, 4, 1), running(shared, 20, 1)]
    these += [running(low, 8, 0), running(low, 8, 0)]
    found = forecast(these, AnswerLengths(), pool, -1)
    # Then the second one holds 9 of 12, when the first has ended, and others yield.
    assert found.fits(1, 2, 8) and not found.fits(1, 5, 20)
    assert not found.fits(2, 5, 18)


def test_who_ends_early_makes_room_for_more():
    """From the second load on; one that takes all is served as if none had been."""
    server = Server(config(num_pages=40, watermark=0.0), lag=0)
    most = []
    for stops in ((), range(VOCAB), ()):
        server.add(
            *(
                dataclasses.replace(
                    each, params=params_of(30, stop_token_ids=list(stops))
                )
                for each in requests(9, length=4, client=str(len(most)))
            )
        )
        most.append(0)
        while not server.scheduler.idle:
            server.tick()
            most[-1] = max(most[-1], server.scheduler.num_running)
    assert most[0] == 5 and most[2] > 5
    server.check_solo()


def test_who_was_refused_is_looked_at_again_before_anybody_ends():
    """It fits once the one that runs will have ended before both need all pages."""
    server = Server(config(num_pages=12, watermark=0.0, eos_ids=()), lag=0)
    server.add(*requests(2, length=2, most=30))
    while server.scheduler.num_running < 2:
        server.tick()
    assert not server.ended and len(server.received["0", 0]) < 25
    server.run()
    server.check_solo()
    assert server.scheduler.counts.preempted == 0


def test_the_newest_of_the_lowest_priority_is_preempted(short_answers):
    server = Server(config(num_pages=8, watermark=0.0))
    for i, priority in enumerate((0, 1, 0, 1)):
        request = requests(i + 1, length=7, most=20)[i]
        server.add(dataclasses.replace(request, priority=priority))
    server.run()
    order = [e.sequence.request.id for e in server.events if e.kind == "preempted"]
    assert order[:2] == ["2", "0"]
    finished = [e.sequence.request.id for e in server.events if e.kind == "ended"]
    assert finished[:2] == ["1", "3"]
    server.check_solo()


def preempted(server):
    return [e.sequence.request.id for e in server.events if e.kind == "preempted"]


def test_a_higher_priority_takes_the_slot_of_the_newest():
    server = Server(config(num_pages=64, num_slots=2))
    server.add(*requests(2, most=25))
    while len(server.received) < 2:
        server.tick()
    server.add(*requests(1, client="same"))
    server.add(*requests(1, client="high", priority=1))
    plan = server.tick()
    assert [chunk.sequence.request.id for chunk in plan.prefill] == ["high0"]
    server.run()
    # Once, and the one that was there goes on before the one that came.
    assert preempted(server) == ["1"]
    order = [e.sequence.request.id for e in server.events if e.kind == "admitted"]
    assert order == ["0", "1", "high0", "1", "same0"]
    server.check_solo()


@pytest.mark.parametrize("needed", [1, 2, 3, 6, 8])
def test_a_higher_priority_takes_no_more_pages_than_it_needs(needed):
    """From three that hold two pages each; two more are free."""
    server = Server(config(num_pages=8, watermark=0.0, eos_ids=()))
    low = requests(5, length=6, most=2, client="low")
    server.add(*low[:3])
    server.tick()
    assert server.scheduler.pool.num_available == 2
    server.add(*low[3:])  # it waits for pages as the high one does
    server.add(Request(prompt=[9] * (4 * needed - 2), params=params_of(2), priority=1))
    server.tick()
    assert preempted(server) == ["low2", "low1", "low0"][: max(0, needed - 1) // 2]
    server.run()
    server.check_solo()


def test_nobody_is_preempted_in_vain():
    """For one that would not fit all the same, nor for one of equal priority."""
    server = Server(config(num_pages=8, watermark=0.0, num_slots=4, eos_ids=()))
    server.add(*requests(1, length=12, most=8, client="first", priority=1))
    server.add(*requests(1, length=8, most=4, client="low"))
    server.tick()
    server.add(Request(prompt=[9] * 24, params=params_of(4), priority=1))
    server.add(*requests(4, length=2, most=2, client="equal"))
    while ("first0", 0) not in server.ended:
        server.tick()
        assert not preempted(server) or ("low0", 0) in server.ended
    server.run()
    server.check_solo()


def test_pages_that_those_who_yield_share(short_answers):
    """They become free when the last one has yielded; those found are held again."""
    server = Server(config(num_pages=12, watermark=0.0, num_slots=8, eos_ids=()))
    stem = list(range(16))
    server.add(Request(prompt=stem, id="low", params=params_of(12, n=4)))
    while len(server.received) < 4:
        server.tick()
    high = Request(prompt=[*stem, 1, 2], id="high", params=params_of(20), priority=1)
    other = Request(prompt=[5] * 20, id="other", params=params_of(4), priority=2)
    server.add(high, other)
    del server.events[:]
    server.tick()
    admitted = [e.sequence for e in server.events if e.kind == "admitted"]
    assert [c.request.id for c in admitted] == ["other", "high"]
    assert [e.cached_tokens for e in server.events if e.kind == "admitted"] == [0, 16]
    assert len(preempted(server)) == 3  # the fewest
    server.run()
    server.check_solo()


def test_clients_get_equal_shares():
    """Of two that always wait, neither is served more than a request ahead."""
    server = Server(config(num_slots=2, num_pages=64, eos_ids=()))
    server.add(*requests(30, length=4, most=4, client="short"))
    server.add(*requests(30, length=20, most=18, client="long"))
    server.add(*requests(8, length=20, most=18, client="late", priority=-1))
    admitted = collections.Counter()
    served = collections.Counter()
    for _ in range(400):
        server.tick()
        admitted = {e.sequence for e in server.events if e.kind == "admitted"}
        served = {
            name: sum(
                len(c.request.prompt) + c.num_drawn
                for c in admitted
                if c.request.client == name
            )
            for name in ("short", "long", "late")
        }
        if sum(c.request.client == "short" for c in admitted) == 30:
            break
        assert abs(served["short"] - served["long"]) <= 2 * 38
        assert not served["late"]
    assert served["long"] > 3 * 38
    server.run()


def test_clients_who_stay_away_save_nothing():
    queue = FairQueue()
    for i in range(4):
        queue.push(f"a{i}", priority=0, client="a")
    for _ in range(3):
        queue.peek()
        queue.pop()
        queue.charge(100, priority=0, client="a")
    assert queue.peek() == "a3"
    for i in range(4):
        queue.push(f"b{i}", priority=0, client="b")
    order = []
    while (item := queue.peek()) is not None:
        queue.pop()
        queue.charge(100, priority=0, client=item[0])
        order.append(item)
    assert order.index("a3") <= 1


def test_a_queue_forgets_who_is_gone():
    queue = FairQueue()
    queue.push("x", priority=0, client="x")
    for i in range(6000):
        queue.push(i, priority=1, client=str(i))
        assert queue.peek() == i
        if i % 2:
            queue.pop()
        else:
            queue.remove(i, priority=1, client=str(i))
        queue.charge(5, priority=1, client=str(i))
        queue.push(i, priority=0, client=str(i))
        queue.remove(i, priority=0, client=str(i))
        queue.charge(5, priority=0, client=str(i))
    level = queue._levels[0]
    assert len(level._served) < 5000 and len(level._heap) < 100
    assert queue.peek() == "x" and list(queue._levels) == [0] and len(queue) == 1


def test_a_large_request_is_not_passed_by():
    """Small ones that come all the time do not keep the pages from it."""
    server = Server(config(num_pages=10, num_slots=8))
    small = requests(200, length=4, most=8)
    server.add(*small[:4])
    server.tick()
    (large,) = requests(1, length=36, most=2, client="large")
    server.add(large)
    for i in range(4, 60):
        if ("large0", 0) in server.ended:
            break
        server.add(small[i])
        server.tick()
    assert server.ended["large0", 0] == "length"
    server.run()


def test_a_long_prompt_holds_up_no_short_one():
    server = Server(config(num_pages=64, max_len=200, prefill_tokens=16, split=8))
    server.add(*requests(1, length=150, client="long"))
    server.tick()
    server.add(*requests(4, length=6, client="short"))
    ticks = 0
    while not all((f"short{i}", 0) in server.received for i in range(4)):
        server.tick()
        ticks += 1
    assert ticks <= 6 and ("long0", 0) not in server.received
    while ("long0", 0) not in server.received:
        server.tick()
        ticks += 1
    assert ticks <= 150 // 8 + 3  # half of the budget at least was its own
    server.run()


def test_short_prompts_that_keep_coming_leave_steps_to_a_long_one():
    server = Server(
        config(num_pages=400, max_len=300, prefill_tokens=40, prefix_cache=False)
    )
    server.add(*requests(3, length=4, most=250))
    while len(server.received) < 3:
        server.tick()
    server.add(*requests(1, length=100, most=2, client="long"))
    for i in range(60):
        server.add(*requests(1, length=4, most=1, client=f"short{i} "))
        server.tick()
    assert ("long0", 0) in server.received
    server.run()


def test_clients_are_charged_for_what_was_computed(monkeypatch):
    server = Server(config(num_pages=32))
    charged = []
    monkeypatch.setattr(
        server.scheduler._waiting,
        "charge",
        lambda served: charged.extend((c.request.id, n) for c, n in served),
    )
    for name in ("first", "again"):
        server.add(Request(prompt=list(range(12)), id=name, params=params_of(2)))
        server.run()
    cached = server.scheduler.counts.cached_tokens
    admitted = {name: next(n for of, n in charged if of == name) for name, _ in charged}
    assert cached > 0 and admitted == {"first": 12, "again": 12 - cached}


def test_prompts_share_pages():
    """Of the same salt; the tail of a prompt is computed again in any case."""
    server = Server(config(num_pages=32))
    ids = list(range(12))
    for name, salt in (("first", ""), ("again", ""), ("other", "x")):
        server.add(Request(prompt=ids, id=name, salt=salt))
        computed = server.scheduler.counts.prompt_tokens
        server.run()
        computed = server.scheduler.counts.prompt_tokens - computed
        assert computed == (4 if name == "again" else 12), name
    server.check_solo()
    assert server.received["again", 0] != []
    assert server.scheduler.counts.cached_tokens == 8


def test_a_conversation_finds_what_prefill_computed():
    """Not its answers: prefill would have rounded them differently."""
    server = Server(config(num_pages=32))
    server.add(*requests(1, length=6, most=7))
    server.run()
    whole = [*server.sequences["0", 0].request.prompt, *server.received["0", 0]]
    server.add(Request(prompt=[*whole, 1, 2], id="next", params=params_of(most=1)))
    server.run()
    assert server.scheduler.counts.cached_tokens == 4
    server.check_solo()


def params_of(most, **fields):
    return SamplingParams(max_tokens=most, ignore_eos=True, **fields)


def test_samples_share_the_pages_of_the_prompt():
    server = Server(config(num_pages=40), lag=1)
    server.add(Request(prompt=list(range(13)), id="a", params=params_of(9, n=5)))
    most = 0
    while not server.scheduler.idle:
        server.tick()
        pool = server.scheduler.pool
        most = max(most, max(map(pool.holders, range(pool.num_pages))))
    assert most == 5
    server.check_solo()
    drawn = [tuple(server.received["a", i]) for i in range(5)]
    assert len(set(drawn)) == 5 and server.scheduler.counts.finished == 1
    # Once the prompt, then the last token and what was not full for each other.
    assert server.scheduler.counts.prompt_tokens == 13 + 4


def test_batch_sizes_leave_few_rows_empty():
    sizes = config(num_slots=512)
    assert bucket_sizes(sizes, None) == [
        *(2, 8, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
    ]
    for rows in range(64, 512):
        assert bucket_of(rows, sizes.batches) < 1.34 * rows + 32
    with pytest.raises(ValueError, match=r"buckets \[80, 512\] must be among"):
        bucket_sizes(sizes, [80, 512])


def test_rows_move_up_when_a_smaller_batch_is_enough_twice():
    server = Server(config(num_pages=160, max_len=100), lag=0)
    server.add(*(r for r in requests(4, length=4, most=50)))
    server.add(*requests(4, length=4, most=80, client="z"))
    while len(server.received) < 8:
        plan = server.tick()
    assert plan.decode.bucket == 8
    for i in range(4):
        server.scheduler.abort(str(i), now=server.time)
    first, second = server.tick(), server.tick()
    assert (first.decode.bucket, first.source) == (8, None)
    assert second.decode.bucket == 4 and second.source is not None
    assert sorted(second.source[:4]) == [4, 5, 6, 7]
    assert server.scheduler.counts.compactions == 1
    server.run()
    server.check_solo()


def test_several_steps_where_nothing_waits():
    server = Server(config(num_pages=64, max_len=100))
    server.add(*requests(2, most=40))
    plans = [server.tick() for _ in range(6)]
    assert [plan.decode.steps for plan in plans] == [1, 4, 4, 4, 4, 4]
    server.add(*requests(1, client="z"))
    joins = server.tick()
    assert joins.prefill and joins.decode.steps == 1 and len(joins.placed) == 1
    server.run()


def test_one_step_where_pages_for_several_are_missing():
    """Before anyone is preempted for steps that nobody asked for."""
    server = Server(config(num_pages=3, max_len=12, watermark=0.0), lag=0)
    server.add(*requests(2, length=2, most=8))
    plans = [server.tick() for _ in range(2)]
    assert plans[0].decode.steps == 1 and not plans[1].prefill
    assert plans[1].decode.steps == 1 and server.scheduler.counts.preempted == 0
    server.run()
    server.check_solo()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_nothing_is_dispatched_in_vain(lag):
    """Once all tokens are on their way, the device waits."""
    server = Server(config(num_pages=64, steps=1), lag)
    server.add(*requests(1, most=9))
    plans = [server.tick() for _ in range(20)]
    assert [bool(plan) for plan in plans] == [True] * 8 + [False] * 12
    server.run()


def test_the_preempted_come_back_before_others_come(short_answers):
    server = Server(config(num_pages=8, watermark=0.0))
    server.add(*requests(3, length=10, most=18))
    while not server.scheduler.counts.preempted:
        server.tick()
    server.add(*requests(3, length=1, client="new"))
    server.run()
    away = set()
    for event in server.events:
        if event.kind == "preempted":
            away.add(event.sequence)
        elif event.kind == "admitted" and event.sequence in away:
            away.remove(event.sequence)
        else:
            assert event.kind != "admitted" or not away
    assert server.scheduler.counts.preempted > 1
    server.check_solo()


def test_the_full_sampler_runs_only_while_a_row_needs_it():
    server = Server(config(num_pages=64, max_len=100))
    server.add(*requests(1, most=60))
    server.add(Request(prompt=[1, 2], id="k", params=params_of(5, top_k=3)))
    plans = []
    while not server.scheduler.idle:
        plans += filter(None, [server.tick()])
    full = [bool(p.decode.full) for p in plans if p.decode]
    # One more than it draws: its last results come a dispatch late.
    assert full[0] and sum(full) in (5, 6) and not any(full[8:])
    server.check_solo()


def test_queue_is_bounded():
    server = Server(config(max_waiting=3, max_waiting_tokens=40))
    server.add(*requests(3))
    with pytest.raises(Overloaded, match=r"^3 requests with 18 tokens wait, at most 3"):
        server.add(*requests(1, client="z"))
    server.run()
    server.add(*requests(2, length=15, client="x"))
    with pytest.raises(Overloaded) as caught:
        server.add(*requests(1, length=15, client="z"))
    assert 1 <= caught.value.retry_after <= 60
    server.scheduler.drain()
    with pytest.raises(Draining):
        server.add(*requests(1, client="y"))
    server.run()
    counts = server.scheduler.counts
    assert (counts.received, counts.finished, counts.rejected) == (8, 5, 3)


def test_impossible_requests_are_refused():
    server = Server(config(num_pages=5))
    for request, message in (
        (Request(prompt=[VOCAB]), "token 50, outside the vocabulary of 50"),
        (Request(prompt=[1] * 20), "with at least 1 makes 21, more than the 20"),
        (
            Request(prompt=[1] * 16, params=SamplingParams(max_tokens=5)),
            "with max_tokens 5 makes 21",
        ),
        (
            Request(prompt=[1], params=SamplingParams(top_k=51)),
            "top_k 51 exceeds the vocabulary",
        ),
    ):
        with pytest.raises(InvalidRequest, match=message):
            server.add(request)
    server.add(Request(prompt=[1] * 16, id="a", params=SamplingParams(max_tokens=4)))
    with pytest.raises(InvalidRequest, match="id 'a' is in use"):
        server.add(Request(prompt=[1], id="a"))
    server.run()
    assert server.scheduler.counts.finished == 1


def test_deadlines():
    server = Server(config(num_pages=8))
    server.add(*requests(3, length=8, most=24, deadline=0.01))
    server.add(*requests(1, client="z"))
    server.run()
    assert [server.ended[str(i), 0] for i in range(3)] == ["timeout"] * 3
    assert server.ended["z0", 0] == "length"
    counts = server.scheduler.counts
    assert (counts.timeout, counts.failed, counts.finished) == (3, 0, 1)


def test_a_deadline_is_not_that_of_the_next_with_the_same_id():
    scheduler = Scheduler(config())
    for deadline in (1.0, None):
        (request,) = requests(1, deadline=deadline)
        scheduler.add(request, now=0.0)
        if deadline is not None:
            scheduler.abort(request.id, now=0.5)
    scheduler.schedule(now=2.0)
    assert not scheduler.idle and scheduler.counts.failed == 0


def test_an_empty_queue_takes_the_largest_request():
    server = Server(config(max_waiting_tokens=5))
    server.add(*requests(1, length=20))
    with pytest.raises(Overloaded):
        server.add(*requests(1, length=1, client="z"))
    server.run()
    assert server.scheduler.counts.finished == 1


def test_log_probabilities_of_a_prompt_need_all_of_it():
    """What others have computed says nothing of them; its samples share as always."""
    server = Server(config(num_pages=32))
    ids = list(range(12))
    for name, fields in (("a", {}), ("b", {"prompt_logprobs": 0, "n": 2})):
        params = params_of(3, **fields)
        server.add(Request(prompt=ids, id=name, params=params))
        server.run()
    assert server.scheduler.counts.prompt_tokens == 12 + 12 + 4
    server.add(Request(prompt=ids, id="c", params=params_of(0, prompt_logprobs=2)))
    server.run()
    assert server.scheduler.counts.prompt_tokens == 12 + 12 + 4 + 12
    assert server.ended["c", 0] == "length"
    server.check_solo()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_pages": 0}, "num_pages 0 must be an integer"),
        ({"num_slots": 6}, "num_slots 6 must be a power of two"),
        ({"num_slots": 1}, "num_slots 1 must be an integer of at least 2"),
        ({"split": 6}, "split 6 must be a multiple of page_size 4"),
        ({"prefill_tokens": 7}, "prefill_tokens 7 must be at least split 8"),
        ({"watermark": 1.0}, "watermark 1.0 must be"),
        ({"watermark": float("nan")}, "watermark nan must be"),
        ({"eos_ids": (50,)}, "eos_ids .* must be tokens of the vocabulary of 50"),
        ({"prefill_keys": 39}, "prefill_keys 39 must be an integer of at least 40"),
        ({"drafts": -1}, "drafts -1 must be"),
        ({"shortest_ngram": 5}, "longest_ngram 4 must be at least shortest_ngram 5"),
        ({"longest_ngram": 33}, "longest_ngram 33 must .* at most 32"),
    ],
)
def test_sizes_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_logits_that_are_not_finite_end_their_request_alone():
    server = Server(config(num_pages=32), lag=0)
    server.add(*requests(2, length=9, most=9))
    while len(server.received) < 2:
        server.tick()
    plan = server.scheduler.schedule(now=1.0)
    _, decode = server.device.dispatch(plan)
    row = server.sequences["0", 0].slot
    decode.flags[0][row][0] |= OutFlag.NOT_FINITE
    news = server.scheduler.update(plan, decode=decode, now=1.0)
    (bad,) = [item for item in news if item.finish]
    assert (bad.sequence.request.id, bad.finish) == ("0", "error")
    assert not bad.tokens and bad.sequence.state is SequenceStatus.ENDED
    assert server.scheduler.pool.num_cached == 0  # nobody finds its pages
    server.received["1", 0] += next(n.tokens for n in news if not n.finish)
    server.run()
    assert server.ended["0", 0] == "error"
    assert server.received["1", 0] == solo(server.sequences["1", 0])


def test_a_row_that_the_device_does_not_know_is_an_error():
    """It would be decoded for ever."""
    server = Server(config(), lag=0)
    server.add(*requests(1, most=9))
    server.tick()
    plan = server.scheduler.schedule(now=1.0)
    empty = Drawn(tokens=[[[-1], [-1]]] * plan.decode.steps, flags=[])
    (news,) = server.scheduler.update(plan, decode=empty, now=1.0)
    assert news.finish == "error" and server.scheduler.idle


def test_unknown_requests_are_no_error():
    scheduler = Scheduler(config())
    assert not scheduler.abort("nobody", now=0.0)
    assert scheduler.schedule(now=0.0) is None and scheduler.idle


def test_seeds():
    """Those of requests are kept, those of others differ; sequences differ."""
    scheduler = Scheduler(config(), seed=1)
    for i, seed in enumerate((7, 7, -7, None, None)):
        params = SamplingParams(seed=seed, n=2)
        scheduler.add(Request(prompt=[1], id=str(i), params=params), now=0.0)
    seeds = [c.seed for c in scheduler.sequences()]
    assert seeds[0] == 7 == seeds[2] and seeds[4] == 2**64 - 7
    assert len(set(seeds)) == 8


def calls_of_a_tick(waiting):
    """Python calls of a tick in which 32 rows are decoded and one request ends."""
    server = Server(
        SchedulerConfig(num_pages=4096, vocab_size=VOCAB, max_len=4096, num_slots=32)
    )
    scheduler = server.scheduler
    server.add(*requests(32, length=16, most=4000))
    while scheduler.num_running < 32 or scheduler._prefilling:
        server.tick()
    server.add(*requests(waiting, length=16, client="w"))
    for _ in range(3):
        server.tick()
    scheduler.abort("5", now=server.time)
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call" and "jaxscale/inference" in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        plan = scheduler.schedule(now=server.time)
    finally:
        sys.setprofile(None)
    assert len(plan.placed) == 1 and plan.decode.bucket == 32
    return count


def test_those_who_wait_cost_nothing():
    few, many = calls_of_a_tick(10), calls_of_a_tick(300)
    assert many <= few + 10
