"""An encoder that is served: what it answers is what the library computes."""

import asyncio
import base64
import dataclasses
import functools
import gc
import json
import threading

import numpy as np
import pytest
from flax import nnx

from jaxscale.inference import Encoder
from jaxscale.inference.server import ServedEncoder
from jaxscale.models import EncoderModel, HeadConfig, encoder_preset
from tests.inference.server.fake_engine import TOKENIZER
from tests.inference.server.test_app import Client, settle


CONFIG = dataclasses.replace(encoder_preset("bert_tiny"), vocab_size=288)
TEXTS = ["to be", "or not to be", "not"]


def served(head=None):
    model = EncoderModel(CONFIG, head=head, rngs=nnx.Rngs(0))
    encoder = Encoder(model, TOKENIZER)
    return ServedEncoder(encoder, "tiny", token_budget=64)


@pytest.fixture(scope="module")
def model():
    model = served()
    yield model
    model.close()


@pytest.fixture
def post(harness, model, monkeypatch):
    monkeypatch.setattr(model, "close", lambda: None)  # others need it too

    def call(path, body):
        async def test(client):
            return await client.post(path, json=body)

        return harness.run(test, model)

    return call


def tokens(texts):
    return sum(len(encoded.ids) for encoded in TOKENIZER.encode_inputs(texts))


def test_the_heap_is_frozen_again_once_all_is_compiled(post, model, monkeypatch):
    calls, compiled = [], [1, 2]
    for name in ("collect", "freeze"):
        monkeypatch.setattr(gc, name, functools.partial(calls.append, name))
    monkeypatch.setattr(Encoder, "num_compiled", property(lambda self: compiled))
    monkeypatch.setattr(model, "_heap", None)  # afterwards, too
    model.freeze_gc_heap()
    for frozen in (1, 2, 2):
        post("/v1/embeddings", {"input": TEXTS, "model": "tiny"})
        assert calls == ["collect", *["freeze"] * frozen]
        compiled[0] = 2


def test_embeddings(post, model):
    expected = model.encoder.encode(TEXTS, token_budget=128)
    answer = post("/v1/embeddings", {"input": TEXTS, "model": "tiny"}).json()
    rows = np.array([entry["embedding"] for entry in answer["data"]])
    np.testing.assert_allclose(rows, expected, atol=1e-5)
    count = tokens(TEXTS)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    # The client of OpenAI's asks for this form.
    body = {"input": TEXTS[0], "encoding_format": "base64"}
    (entry,) = post("/v1/embeddings", body).json()["data"]
    row = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    np.testing.assert_allclose(row, expected[0], atol=1e-5)


def test_embeddings_of_token_ids(post, model):
    """As they are, control tokens included."""
    (encoded,) = TOKENIZER.encode_inputs(TEXTS[:1])
    (expected,) = model.encoder.encode(TEXTS[:1], token_budget=128)
    for given in (encoded.ids, [encoded.ids]):
        answer = post("/v1/embeddings", {"input": given}).json()
        (entry,) = answer["data"]
        np.testing.assert_allclose(entry["embedding"], expected, atol=1e-5)
        assert answer["usage"]["prompt_tokens"] == len(encoded.ids)
    many = post("/v1/embeddings", {"input": [[7]] * 2048}).json()["data"]
    assert len(many) == 2048


def test_embeddings_of_fewer_dimensions(post, model):
    (whole,) = model.encoder.encode(TEXTS[:1], token_budget=128)
    body = {"input": TEXTS[0], "dimensions": 3}
    (entry,) = post("/v1/embeddings", body).json()["data"]
    expected = whole[:3] / np.linalg.norm(whole[:3])
    np.testing.assert_allclose(entry["embedding"], expected, atol=1e-5)


def test_documents_in_order(post, model):
    rows = model.encoder.encode(TEXTS, token_budget=64).astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    scores = rows[1:] @ rows[0]
    documents = [TEXTS[1], {"text": TEXTS[2]}]
    body = {"query": TEXTS[0], "documents": documents}
    results = post("/v1/rerank", body).json()["results"]
    assert [r["index"] for r in results] == np.argsort(-scores).tolist()
    for result in results:
        np.testing.assert_allclose(
            result["relevance_score"], scores[result["index"]], atol=1e-5
        )
        assert result["document"] == {"text": TEXTS[1 + result["index"]]}
    (best,) = post(
        "/v1/rerank", {**body, "top_n": 1, "return_documents": False}
    ).json()["results"]
    assert best == {k: v for k, v in results[0].items() if k != "document"}


@pytest.fixture
def passes(model, monkeypatch):
    """The token ids of each pass; the first one waits until it may go on."""
    monkeypatch.setattr(model, "close", lambda: None)
    found, launch = [], model.encoder.launch
    go_on = threading.Event()

    def held(method, texts, *arguments, **options):
        found.append([text.ids for text in texts])
        assert len(found) > 1 or go_on.wait(120)
        return launch(method, texts, *arguments, **options)

    monkeypatch.setattr(model.encoder, "launch", held)
    return found, go_on


def test_calls_that_wait_are_computed_together(harness, model, passes):
    seen, go_on = passes

    async def test(client):
        def call(text):
            body = {"input": text}
            return asyncio.create_task(client.post("/v1/embeddings", json=body))

        calls = [call(TEXTS[0])]
        await settle(lambda: seen)
        calls += [call(text) for text in TEXTS[1:]]
        gone = call("to")
        await settle(lambda: model.load().waiting == 3)
        gone.cancel()
        await settle(gone.done)
        go_on.set()
        answers = [await one for one in calls]
        return answers, (await client.get("/metrics")).text

    answers, metrics = harness.run(test, model)
    assert [len(texts) for texts in seen] == [1, 2]
    rows = [answer.json()["data"][0]["embedding"] for answer in answers]
    expected = model.encoder.encode(TEXTS, token_budget=64)
    np.testing.assert_allclose(rows, expected, atol=1e-5)
    assert model.load().waiting == 0
    for name in ("pass_texts_count", "pass_tokens_sum", "request_queue_seconds_count"):
        (line,) = (x for x in metrics.splitlines() if x.startswith(f"jaxscale_{name}"))
        assert float(line.split()[1]) > 0


def test_many_texts_hold_up_nobody(harness, model, passes):
    """A call of one text is in the next pass, not behind all of a large one."""
    seen, go_on = passes
    large, small = [[7 + i % 9] * 10 for i in range(60)], [250, 9]

    async def test(client):
        def call(texts):
            body = {"input": texts}
            return asyncio.create_task(client.post("/v1/embeddings", json=body))

        first = call(large)
        await settle(lambda: seen)
        second = call([small])
        await settle(lambda: model.load().waiting == 1)
        go_on.set()
        return await first, await second

    answers = harness.run(test, model)
    assert small in seen[1] and len(seen) > 5  # six texts of ten tokens in each
    for answer, given in zip(answers, (large, [small]), strict=True):
        rows = [entry["embedding"] for entry in answer.json()["data"]]
        expected = model.encoder.encode(given, token_budget=64)
        np.testing.assert_allclose(rows, expected, atol=1e-5)


def test_a_pass_that_fails_ends_its_own_calls(harness, model, monkeypatch):
    monkeypatch.setattr(model, "close", lambda: None)
    read = model.encoder.read
    monkeypatch.setattr(model.encoder, "read", lambda launched: 1 / 0)

    async def test(client):
        body = {"input": TEXTS}
        broken = await client.post("/v1/embeddings", json=body)
        monkeypatch.setattr(model.encoder, "read", read)
        whole = await client.post("/v1/embeddings", json=body)
        ready = await client.get("/ready")
        return broken.status_code, whole.status_code, ready.json()

    *codes, ready = harness.run(test, model)
    assert codes == [500, 200] and model.load().waiting == 0
    assert ready["status"] == "ready" and 0 < ready["compiled"] <= ready["programs"]


def test_scores_by_angle(post, model):
    rows = model.encoder.encode(TEXTS, token_budget=64).astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    answer = post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
    scores = [entry["score"] for entry in answer["data"]]
    np.testing.assert_allclose(scores, rows[1:] @ rows[0], atol=1e-5)


def test_scores_by_a_head(harness):
    model = served(HeadConfig(kind="sequence", num_labels=1))
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[2], TEXTS[0])]
    expected = 1 / (1 + np.exp(-model.encoder.predict(pairs, token_budget=64)[:, 0]))
    first, second = map(list, zip(*pairs, strict=True))

    async def test(client):
        body = {"text_1": first, "text_2": second}
        return await client.post("/v1/score", json=body)

    answer = harness.run(test, model).json()
    scores = [entry["score"] for entry in answer["data"]]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == tokens(pairs)
    assert not model._batching.thread.is_alive()


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("embeddings", {"input": []}, 400, "input has 0 texts"),
        ("embeddings", {"input": [[1, 300]]}, 400, "outside the vocabulary of 288"),
        ("embeddings", {"input": [[]]}, 400, "texts[0] is empty"),
        ("embeddings", {"input": "a", "dimensions": 0}, 400, "dimensions 0 must"),
        ("embeddings", {"input": "a", "dimensions": 33}, 400, "at most 32"),
        ("embeddings", {"input": ["a", ""]}, 400, "texts[1]"),
        ("embeddings", {"input": "to be " * 500}, 400, "more than max_length"),
        ("embeddings", {"input": ["a"] * 2049}, 400, "input has 2049 texts"),
        ("embeddings", {"input": "a", "model": "x"}, 404, "is not served here"),
        ("score", {"text_1": ["a"] * 2, "text_2": ["b"] * 3}, 400, "as many"),
        ("rerank", {"query": "a", "documents": []}, 400, "documents has 0 texts"),
        ("rerank", {"query": "a", "documents": [{}]}, 400, "an object with a text"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, 400, "top_n 0"),
        ("score", {"text_1": [], "text_2": []}, 400, "text_2 has 0 texts"),
        ("completions", {"prompt": "a"}, 404, "the model is an encoder"),
    ],
)
def test_mistakes(post, path, body, status, message):
    answer = post(f"/v1/{path}", body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_long_texts_can_be_cut(post):
    body = {"input": "to be " * 500, "truncate": True}
    answer = post("/v1/embeddings", body).json()
    assert answer["usage"]["prompt_tokens"] == CONFIG.max_seq_len


def test_the_live_page_shows_an_encoder(harness, model, monkeypatch):
    monkeypatch.setattr(model, "close", lambda: None)

    async def test(client):
        await client.post("/v1/embeddings", json={"input": TEXTS})
        page = Client(harness.app, None, path="/live/events")
        await settle(lambda: len(page.sent) > 2)
        page.left.set()
        await page.task
        frame = json.loads(page.sent[-1]["body"].removeprefix(b"data: "))
        assert (frame["model"], frame["slots"], frame["open"]) == ("tiny", 0, [])
        assert frame["finished"] and frame["tokens"] >= tokens(TEXTS)
        assert (frame["running"], frame["waiting"]) == (0, 0)

    harness.run(test, model)
