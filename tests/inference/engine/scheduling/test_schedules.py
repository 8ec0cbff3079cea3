"""Many requests at once against each by itself, bit for bit."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.inference.engine.scheduling.page_forecast import AnswerLengths
from tests.inference.conftest import SIZES
from tests.inference.soak import Soak
from tests.inference.typical import REQUESTS, alone, prompt


@pytest.fixture(scope="module")
def expected(llama):
    return alone(llama, REQUESTS)


@pytest.fixture(scope="module", autouse=True)
def short_answers():
    """As the fixture of this name, for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerLengths, "left", lambda *_: 0.0)
        yield


def check_bits(run, name, which, expected):
    for index, result in enumerate(expected[which]):
        assert run.result(name, index) == result, (name, which, index)


def test_eight_pages_and_64_requests(llama, expected):
    """Of 4 tokens: the preempted go on as if nothing had been, to the bit."""
    few = dataclasses.replace(SIZES, num_pages=8, max_waiting=100, watermark=0.0)
    run = llama.run(sizes=few, poison=True)
    for i in range(64):
        tokens, wanted = REQUESTS[i % len(REQUESTS)]
        run.add(str(i), tokens, **wanted)
    run.finish(limit=10_000)
    for i in range(64):
        check_bits(run, str(i), i % len(REQUESTS), expected)
    counts = run.scheduler.counts
    assert counts.finished == 64 and counts.preempted > 10


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pages=st.integers(8, 40),
    steps=st.sampled_from((1, 2)),
    cache=st.booleans(),
)
def test_schedules(llama, expected, seed, pages, steps, cache):
    """Whatever joins, leaves, is aborted, preempted, or shares a prompt: equal bits."""
    rng = random.Random(seed)
    sizes = dataclasses.replace(
        SIZES, num_pages=pages, steps=steps, prefix_cache=cache, watermark=0.0
    )
    run, chosen, given_up = llama.run(sizes=sizes, poison=True), [], set()
    for i in range(10):
        chosen.append(rng.randrange(len(REQUESTS)))
        tokens, wanted = REQUESTS[chosen[-1]]
        run.add(str(i), tokens, priority=rng.choice((0, 0, 1)), **wanted)
        for _ in range(rng.choice((0, 0, 1, 4, 12))):
            run.engine.step()
        if rng.random() < 0.2:
            given_up.add(str(rng.randrange(i + 1)))
            run.engine.abort(max(given_up))
    run.finish(limit=2000)
    for i, which in enumerate(chosen):
        if str(i) not in given_up:
            check_bits(run, str(i), which, expected)


def test_nan_reaches_nobody_else(llama, expected):
    """In free pages while others run, and in the pages of one request."""
    run = llama.run(poison=True)
    for which in (0, 1, 5):
        run.add(str(which), *REQUESTS[which][:1], **REQUESTS[which][1])
    run.add("bad", prompt(30), max_tokens=30)
    pool = run.scheduler.pool
    bad = next(c for c in run.scheduler.sequences() if c.request.id == "bad")
    while bad.num_drawn < 3:
        run.engine.step()
    free = [page for page in range(pool.num_pages) if not pool.holders(page)]
    assert free and all(pool.holders(page) == 1 for page in bad.pages)
    pages = np.array([*free, *bad.pages])
    held = llama.runner.pages
    llama.runner.pages = held._replace(kv=held.kv.at[:, pages].set(np.nan))
    run.add("late", *REQUESTS[4][:1], **REQUESTS[4][1])
    run.finish()
    assert run.result("bad")[2] == "error"
    for which in (0, 1, 5):
        check_bits(run, str(which), which, expected)
    check_bits(run, "late", 4, expected)


def test_soak(llama):
    """`tests.inference.soak` runs it with as many requests as one likes."""
    soak = Soak(llama)
    for _ in range(2):
        soak.run(100)
    counts = soak.counts
    assert counts.received > 150
    assert min(counts.finished, counts.aborted, counts.rejected, counts.timeout) > 0
    assert counts.preempted > 0 and counts.cached_tokens > 0
    soak.close()
