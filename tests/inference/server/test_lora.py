"""Adapters as models of their own, by the name that a call gives."""

import dataclasses
import shutil

import pytest

from jaxscale.inference.server import load
from jaxscale.models.adapters import adapter_names
from tests.inference.server.conftest import events
from tests.inference.server.fake_engine import FakeEngine, text_model
from tests.models.test_adapters import ADAPTERS, base_of


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def model(engine):
    adapters = {"sql": "adapters/sql", "notes": "runs/notes"}
    return dataclasses.replace(text_model(engine), aliases=("b",), adapters=adapters)


def test_models_are_listed(harness, model):
    async def test(client):
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["tiny", "b", "sql", "notes"]
        assert [card.get("root") for card in cards] == [
            *(None, "tiny", "adapters/sql", "runs/notes")
        ]
        assert [card.get("parent") for card in cards] == [None, None, "tiny", "tiny"]
        assert (await client.get("/v1/models/sql")).json() == cards[2]
        assert (await client.get("/v1/models/other")).status_code == 404

    harness.run(test, model)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "to"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "to"}]}),
        ("/v1/responses", {"input": "to"}),
        (
            "/v1/messages",
            {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
        ),
    ],
)
def test_calls_choose_by_name(harness, engine, model, path, body):
    async def test(client):
        for name, lora in (("sql", "sql"), ("tiny", None), ("b", None)):
            answer = await client.post(path, json={**body, "model": name})
            assert answer.status_code == 200, answer.text
            assert engine.seen[-1].lora == lora
            assert answer.json()["model"] == ("tiny" if lora is None else lora)
        answer = await client.post(path, json={**body, "model": "other"})
        assert answer.status_code == 404
        assert "the model 'other' is not served here" in answer.text

    harness.run(test, model)


def test_streams_name_the_adapter(harness, engine, model):
    async def test(client):
        body = {"prompt": "to", "model": "notes", "stream": True}
        return await client.post("/v1/completions", json=body)

    assert {part["model"] for part in events(harness.run(test, model))} == {"notes"}
    assert engine.seen[-1].lora == "notes"


def test_a_directory_with_adapters(tmp_path, monkeypatch):
    made = {}

    def text_model_of(model, tokenizer, **options):
        made.update(options, names=adapter_names(model))
        return text_model(FakeEngine())

    monkeypatch.setattr(load, "text_model", text_model_of)
    monkeypatch.setattr(load.Tokenizer, "from_file", lambda path: None)
    base = base_of("llama3_gqa")
    modules = {"it": ADAPTERS / "llama3_gqa", "other": ADAPTERS / "llama3_patterns"}
    load.served(base, lora_modules=modules)
    assert made["names"] == ("it", "other")
    assert made["adapters"]["it"] == str(modules["it"])
    with pytest.raises(ValueError, match="the name 'it', which is the model's; choose"):
        load.served(base, aliases=("it",), lora_modules=modules)
    with pytest.raises(
        ValueError, match=r"adapter 'it': .* has the tensor .*, which is no factor"
    ):
        load.served(base_of("gpt2"), lora_modules=modules)
    with pytest.raises(ValueError, match="holds an encoder; leave them out"):
        encoder = base.parents[1] / "encoders" / "bert"
        load.served(encoder, lora_modules=modules)
    shutil.copy(base / "config.json", tmp_path)
    with pytest.raises(
        ValueError, match=r"has neither adapter_config\.json nor run\.j"
    ):
        load.served(base, lora_modules={"it": tmp_path})
