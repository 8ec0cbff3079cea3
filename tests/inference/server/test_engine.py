"""The server on the real engine, with a small LLaMA."""

import asyncio
import dataclasses
import itertools
import json
import re

import numpy as np
import pytest

from jaxscale.inference.chat import ChatTemplate
from jaxscale.inference.engine.engine import Engine
from jaxscale.inference.engine.scheduling.scheduler import Scheduler
from jaxscale.inference.grammar import GrammarCompiler
from jaxscale.inference.server import EngineBackend, TextModel
from tests.inference.conftest import in_step
from tests.inference.server.conftest import events
from tests.inference.server.endpoints.test_completions import joined
from tests.inference.server.fake_engine import TOKENIZER
from tests.inference.server.test_app import PATH, Client, settle


@pytest.fixture
def model(llama):
    """A model whose engine begins anew."""
    return make(llama)


def make(llama, **sizes):
    llama.runner.reset()
    scheduler = Scheduler(dataclasses.replace(llama.sizes, **sizes), seed=0)
    eos = TOKENIZER.eos_id
    compiler = GrammarCompiler(TOKENIZER, vocab_size=288, eos_ids=[eos])
    engine = Engine(llama.runner, scheduler, tokenizer=TOKENIZER, compiler=compiler)
    return TextModel(
        name="tiny",
        backend=EngineBackend(engine.start()),
        tokenizer=TOKENIZER,
        chat=ChatTemplate(TOKENIZER, "{{ messages[0].content }}"),
    )


def at_rest(model):
    """Whether all pages are free again, and every request is accounted for."""
    load = model.backend.load()
    c = load.counts
    ended = c.finished + c.aborted + c.rejected + c.timeout + c.failed
    return load.pages_held == load.running == load.waiting == 0 and c.received == ended


def test_many_at_a_time(harness, llama, model):
    """Each, whole or streamed, is what the model alone would say."""
    prompts = [TOKENIZER.encode(text) for text in ("to be", "or", "not to", "be or")]

    async def test(client):
        bodies = [
            {"prompt": p, "temperature": 0, "max_tokens": 8, "stream": stream}
            for p in prompts
            for stream in (False, True)
        ]
        calls = [client.post(PATH, json={**b, "logprobs": 0}) for b in bodies]
        answers = await asyncio.gather(*calls)
        await settle(lambda: at_rest(model))
        return answers

    answers = harness.run(test, model)
    for i, prompt in enumerate(prompts):
        whole, stream = answers[2 * i : 2 * i + 2]
        (choice,) = whole.json()["choices"]
        texts, reasons = joined(events(stream))
        assert texts[0] == choice["text"]
        assert reasons[0] == choice["finish_reason"] == "length"
        tokens = list(prompt)
        for logprob in choice["logprobs"]["token_logprobs"]:
            expected = llama.logprobs(tokens)[-1]
            tokens.append(int(expected.argmax()))
            np.testing.assert_allclose(logprob, expected.max(), atol=1e-4)
        known = [t for t in tokens[len(prompt) :] if t < TOKENIZER.vocab_size]
        assert choice["text"] == TOKENIZER.continuation(prompt, known)


def test_scores_of_a_prompt(harness, llama, model):
    prompt = TOKENIZER.encode("to be or not to be")
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 2}

    async def test(client):
        return await client.post(PATH, json=body)

    (choice,) = harness.run(test, model).json()["choices"]
    assert choice["text"] == "to be or not to be"
    first, *values = choice["logprobs"]["token_logprobs"]
    whole = llama.logprobs(prompt)
    expected = [whole[i, token] for i, token in enumerate(prompt[1:])]
    assert first is None
    np.testing.assert_allclose(values, expected, atol=1e-4)
    tops = choice["logprobs"]["top_logprobs"][1:]
    best = [max(top.values()) for top in tops if len(top) > 1]
    assert best and all(value <= 0 for value in best)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("length", "most", "count"), [(64, 0, 0), (63, 1, 1), (64, 1, None), (65, 0, None)]
)
def test_a_prompt_at_capacity_and_one_over(harness, model, stream, length, most, count):
    """There is room for 64 tokens of prompt and answer together."""
    body = {"prompt": [5] * length, "max_tokens": most, "ignore_eos": True}

    async def test(client):
        answer = await client.post(PATH, json={**body, "stream": stream})
        if count is None:
            assert answer.status_code == 400
            assert "more than the 64 that there is room for" in answer.text
        elif stream:
            assert joined(events(answer))[1][0] == "length"
        else:
            assert answer.json()["usage"]["completion_tokens"] == count
            assert answer.json()["choices"][0]["finish_reason"] == "length"
        # With no number given, it draws what there is room for.
        alone = await client.post(
            "/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": "to be"}],
                "ignore_eos": True,
            },
        )
        assert alone.json()["usage"]["total_tokens"] == 64
        await settle(lambda: at_rest(model))

    harness.run(test, model)


@pytest.mark.parametrize("pattern", ["(ab)*c?(ab)*", "(.|\\n)*", "((a+)+)+b", "a{3,}"])
def test_a_pattern_that_never_ends(harness, model, pattern):
    """The request ends at its most tokens, and its text is a beginning of a match."""

    async def test(client):
        body = {"prompt": "to", "max_tokens": 12, "guided_regex": pattern}
        answer = await client.post(PATH, json={**body, "logit_bias": {"0": -100}})
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] in ("length", "stop")
        if pattern.startswith("(("):
            assert re.fullmatch("a*b?", choice["text"])
        await settle(lambda: at_rest(model))

    harness.run(test, model)


def test_patterns_that_are_too_large(harness, model):
    """They are refused within the bounds of the compiler; the server goes on."""

    async def test(client):
        for pattern in ("(a{1,9999}){1,9999}", "[ab]{1000000000}", "(" * 100_000):
            body = {"prompt": "to", "max_tokens": 4, "guided_regex": pattern}
            answer = await client.post(PATH, json=body)
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400:
                assert answer.json()["error"]["message"]
        assert (await client.post(PATH, json={"prompt": "to"})).is_success
        await settle(lambda: at_rest(model))

    harness.run(test, model)


def test_guided_texts(harness, model):
    async def test(client):
        body = {"prompt": "to", "max_tokens": 20, "guided_choice": ["be", "not"]}
        choices = (await client.post(PATH, json={**body, "n": 2})).json()["choices"]
        assert {choice["text"] for choice in choices} <= {"be", "not"}
        schema = {"name": "x", "schema": {"enum": [True, False]}}
        form = {"type": "json_schema", "json_schema": schema}
        messages = [{"role": "user", "content": "to be?"}]
        answer = await client.post(
            "/v1/chat/completions",
            json={"messages": messages, "response_format": form, "max_tokens": 30},
        )
        (choice,) = answer.json()["choices"]
        assert json.loads(choice["message"]["content"]) in (True, False)
        assert choice["finish_reason"] == "stop"
        for wrong in ({"guided_regex": "("}, {"guided_json": "no"}):
            answer = await client.post(PATH, json={"prompt": "to", **wrong})
            assert answer.status_code == 400
            assert "malformed" in answer.text or "cannot be used" in answer.text
        await settle(lambda: at_rest(model))

    harness.run(test, model)


def test_requests_that_leave_little_to_draw(harness, model):
    """Extreme ones are served, impossible ones refused; nobody else is touched."""
    definitions = {"City": {"type": "object", "properties": {"x": {"type": "null"}}}}
    schema = {"properties": {"to": {"$ref": "#/$defs/City"}}, "$defs": definitions}
    schema |= {"type": "object", "required": ["to"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "go", "parameters": schema}}
    forced = {
        "messages": [{"role": "user", "content": "to"}],
        "tools": [tool],
        "tool_choice": "required",
        "max_tokens": 60,
    }

    async def test(client):
        for penalty in (1e-300, 1.0, 1e300):
            body = {**forced, "repetition_penalty": penalty}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            text = choice["message"]["content"] or ""
            for call in choice["message"].get("tool_calls", ()):
                text = call["function"]["arguments"]
            assert " " not in text.split('"x"')[0]
        few = {"prompt": "to", "max_tokens": 5, "allowed_token_ids": [20, 21]}
        answer = await client.post(PATH, json={**few, "return_token_ids": True})
        assert set(answer.json()["choices"][0]["token_ids"]) <= {20, 21}
        none = {**few, "stop_token_ids": [20, 21], "min_tokens": 3}
        everything = {"prompt": "to", "stop_token_ids": [*range(288)], "min_tokens": 3}
        for body in (none, everything):
            answer = await client.post(PATH, json=body)
            assert answer.status_code == 400, answer.text
            assert "leaves no token to be drawn" in answer.text
        await settle(lambda: at_rest(model))

    harness.run(test, model)


def test_overload(harness, llama):
    model = make(llama, max_waiting=1)

    async def test(client):
        body = {"prompt": "to be", "max_tokens": 30}
        calls = [client.post(PATH, json=body) for _ in range(20)]
        answers = await asyncio.gather(*calls)
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 1
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
        await settle(lambda: at_rest(model))
        counts = model.backend.load().counts
        assert counts.rejected == statuses.count(429)

    harness.run(test, model)


def test_ten_times_too_much(harness, llama):
    """Who is let in is not slowed, the others come back later, nothing is kept."""
    model = make(llama, max_waiting=4)
    ticks, ended = itertools.count(), []

    async def test(client):
        engine = model.backend.engine

        def tick():
            now = next(ticks)
            if engine.scheduler.counts.finished == 4:  # those that were let in
                ended.append(now)

        engine.after_tick.append(tick)
        body = {"prompt": "to be", "max_tokens": 40, "ignore_eos": True}
        with in_step(engine):
            await flood(client, body)
            await settle(lambda: at_rest(model))
        assert not engine._processors and harness.service.active == 0

    async def flood(client, body):
        admitted = [asyncio.create_task(client.post(PATH, json=body)) for _ in range(4)]
        await settle(lambda: model.backend.load().running == 4)
        start, refused, waiting = next(ticks), 0, []
        while not all(call.done() for call in admitted):
            answers = [client.post(PATH, json=body) for _ in range(20)]
            waiting += map(asyncio.ensure_future, answers)
            await asyncio.sleep(0.001)
        assert ended[0] - start <= 2 * 40
        for answer in await asyncio.gather(*waiting):
            assert answer.status_code in (200, 429)
            refused += answer.status_code == 429
            assert "retry-after" in answer.headers or answer.status_code == 200
        for answer in admitted:
            assert (await answer).json()["usage"]["completion_tokens"] == 40
        await settle(lambda: at_rest(model))
        assert refused and model.backend.load().counts.rejected == refused

    harness.run(test, model)


@pytest.mark.parametrize("stream", [False, True])
def test_deadlines(harness, model, stream):
    async def test(client):
        body = {"prompt": "to", "ignore_eos": True, "stream": stream}
        # Over before the first token, wherever the request is by then.
        answer = await client.post(PATH, json={**body, "timeout": 1e-6})
        if stream and answer.status_code == 200:
            error = events(answer)[-1]["error"]
        else:
            assert answer.status_code == 504
            error = answer.json()["error"]
        assert error["type"] == "timeout_error" and "deadline" in error["message"]
        assert (await client.post(PATH, json={**body, "timeout": 60})).is_success
        await settle(lambda: at_rest(model))

    harness.run(test, model)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(harness, model, stream):
    async def test(_):
        body = {"prompt": "to", "max_tokens": 60, "ignore_eos": True, "n": 8}
        with in_step(model.backend.engine):
            client = Client(harness.app, {**body, "stream": stream})
            await settle(lambda: model.backend.load().running)
            client.left.set()
            await client.task
            await settle(lambda: at_rest(model))
        counts = model.backend.load().counts
        assert (counts.aborted, counts.finished) == (1, 0)

    harness.run(test, model)


def test_a_dead_engine(harness, model, monkeypatch):
    async def test(client):
        def broken(*_, **__):
            raise RuntimeError("out of memory")

        runner = model.backend.engine.runner
        monkeypatch.setattr(runner, "decode", broken)
        monkeypatch.setattr(runner, "prefill", broken)
        calls = [client.post(PATH, json={"prompt": "to"}) for _ in range(3)]
        answers = await asyncio.gather(*calls)
        assert [answer.status_code for answer in answers] == [503] * 3
        health = await client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "dead"})
        assert "out of memory" in (await client.post(PATH, json={"prompt": "to"})).text

    harness.run(test, model)


def test_the_batch_is_seen(harness, model):
    async def test(client):
        body = {"prompt": [f"to {i}" for i in range(6)], "max_tokens": 20}
        await client.post(PATH, json=body)
        frames = []
        await settle(lambda: at_rest(model))
        frames = [*map(parse, harness.service.recorder._ring)]
        frames.append(harness.service.recorder.frame())
        return frames

    frames = harness.run(test, model)
    segments = [segment for frame in frames for segment in frame["segments"]]
    assert len({color for _, color, *_ in segments}) == 6
    assert {kind for _, _, kind, *_ in segments} >= {1}
    assert {lane for lane, *_ in segments} == {0, 1, 2, 3}
    assert frames[-1]["finished"] == 6 and frames[-1]["tokens"] == 120
    assert frames[-1]["ttft"] and frames[-1]["gap"] and frames[-1]["step"]


def parse(data):
    return json.loads(data.removeprefix(b"data: "))
