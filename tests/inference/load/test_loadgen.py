"""The load generator against a server whose times are known."""

import itertools
import math
import re

import numpy as np
import pytest

from jaxscale.inference.load.loadgen import LoadConfig, Outcome, run, summarize
from tests.inference.fake_server import FakeServer


def config(server, **changes):
    fields = {"url": server.url, "workload": "3/4", "requests": 5, "timeout": 120.0}
    return LoadConfig(**fields | {"warmup": 0} | changes)


def outcome(events, *, sent=0.0, tokens=None, error=None, status=200):
    return Outcome(
        prompt_tokens=10,
        output_tokens=len(events) if tokens is None else tokens,
        due=sent,
        sent=sent,
        events=tuple(events),
        ended=events[-1] if events else sent + 0.5,
        error=error,
        status=status,
    )


def test_definitions():
    """By hand: two good answers, one of a single token, one refused."""
    outcomes = [
        outcome([1.0, 1.5, 3.0], sent=0.5),
        outcome([2.0, 4.0], sent=1.0, tokens=5),
        outcome([5.0], sent=4.5),
        outcome([], sent=2.0, error="HTTP 429", status=429),
    ]
    figures = summarize(outcomes, LoadConfig(ttft_ms=600, tpot_ms=900))
    assert figures["duration"] == 5.0
    assert (figures["completed"], figures["failed"], figures["rejected"]) == (3, 1, 1)
    assert figures["total_output_tokens"] == 9 and figures["total_input_tokens"] == 30
    assert figures["output_throughput"] == pytest.approx(9 / 5)
    assert figures["total_token_throughput"] == pytest.approx(39 / 5)
    assert figures["mean_ttft_ms"] == pytest.approx(1e3 * (0.5 + 1 + 0.5) / 3)
    assert figures["mean_tpot_ms"] == pytest.approx(1e3 * (2 / 2 + 2 / 4) / 2)
    assert figures["median_itl_ms"] == pytest.approx(1500)
    assert figures["p99_e2el_ms"] == pytest.approx(np.percentile([2.5e3, 3e3, 500], 99))
    # The first is too slow a token, the second too late; the refused one is a miss.
    assert figures["request_goodput"] == pytest.approx(1 / 5)
    assert figures["max_concurrent_requests"] == 3
    assert math.isnan(summarize(outcomes[3:], LoadConfig())["mean_ttft_ms"])
    assert summarize([], LoadConfig())["request_throughput"] == 0


def test_times_are_those_of_the_server():
    with FakeServer(first=0.2, gap=0.05) as server:
        outcomes = run(config(server))
    figures = summarize(outcomes, config(server))
    assert figures["completed"] == 5 and figures["total_output_tokens"] == 40
    assert figures["total_input_tokens"] == 25  # as the server counts them
    # A slow machine adds to what the server waits, and never takes from it, but events
    # that it reads late may be close together.
    assert figures["p50_ttft_ms"] >= 200 and figures["p50_e2el_ms"] >= 350
    gaps = [b - a for o in outcomes for a, b in itertools.pairwise(o.events)]
    assert len(gaps) == 15
    assert figures["median_itl_ms"] == pytest.approx(1e3 * np.median(gaps))
    # Four events, which are eight tokens.
    assert figures["mean_tpot_ms"] == pytest.approx(
        1e3 * np.mean([(o.events[-1] - o.events[0]) / 7 for o in outcomes])
    )
    assert figures["max_concurrent_requests"] == 5 == server.most


def test_what_is_sent():
    with FakeServer() as server:
        load = config(server, warmup=1, max_concurrency=1, vocab_size=7)
        run(load, api_key="secret")
        assert server.most == 1
        run(config(server, endpoint="chat", requests=1, model="other"))
        run(config(server, requests=2, vocab_size=0))
    path, body = server.bodies[1]
    assert path == "/v1/completions" and body["model"] == "tiny"
    assert body["ignore_eos"] and body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] == 4 and len(body["prompt"]) == 3
    assert all(0 <= token < 7 for token in body["prompt"])
    assert server.headers[0]["authorization"] == "bearer secret"
    path, body = server.bodies[6]
    assert path == "/v1/chat/completions" and body["model"] == "other"
    assert len(body["messages"][0]["content"].split()) == 3
    assert "authorization" not in server.headers[6]
    assert isinstance(server.bodies[7][1]["prompt"], str)


def test_arrivals_are_kept():
    """Also where nobody is answered before all have come."""
    with FakeServer(together=5) as server:
        outcomes = run(config(server, rate=20.0, burstiness=math.inf, timeout=120.0))
    assert [o.due for o in outcomes] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.25])
    assert all(o.sent >= o.due and o.error is None for o in outcomes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (429, r'HTTP 429: {"error": {"message": "too much"}}'),
        (500, "HTTP 500"),
        ("error", "the stream ended with an error: .*out of luck"),
        ("cut", "RemoteProtocolError"),
        ("silent", "the stream ended early"),
        ("hang", r"no complete answer within (0\.3|3\.0|30\.0) seconds"),
    ],
)
def test_failures_are_counted_and_others_go_on(wrong, message):
    # The first is enough where nothing else computes.
    for seconds in (0.3, 3.0, 30.0) if wrong == "hang" else (120.0,):
        with FakeServer(behave=lambda number: wrong if number == 2 else None) as server:
            load = config(server, timeout=seconds)
            outcomes = run(load)
        if sum(o.error is not None for o in outcomes) == 1:
            break
    figures = summarize(outcomes, load)
    assert (figures["completed"], figures["failed"]) == (4, 1)
    assert figures["rejected"] == (wrong == 429)
    (bad,) = [o for o in outcomes if o.error is not None]
    assert re.search(message, bad.error)


def test_servers_that_cannot_be_asked():
    with FakeServer(behave=lambda number: 400) as server:
        with pytest.raises(ValueError, match="refuses the first request: HTTP 400"):
            run(config(server, warmup=1))
        url = server.url
    with pytest.raises(ConnectionError, match="does not answer"):
        run(LoadConfig(url=url))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "localhost:80"}, "must begin with http"),
        ({"endpoint": "embeddings"}, "endpoint 'embeddings' is unknown"),
        ({"workload": "x"}, "workload 'x' is unknown"),
        ({"requests": 0}, "requests 0 must be an integer"),
        ({"rate": 0.0}, "rate 0.0"),
        ({"burstiness": -1.0}, "burstiness -1.0"),
        ({"timeout": 0.0}, "timeout 0.0"),
        ({"max_concurrency": 0}, "max_concurrency 0"),
        ({"tpot_ms": -1.0}, "tpot_ms -1.0"),
    ],
)
@pytest.mark.usefixtures("no_shape_hook")
def test_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        LoadConfig(**fields)
