"""Long bodies: what reads, checks and tokenizes them keeps no other call waiting."""

import asyncio
import threading

import pytest
from pydantic_core import to_json

from jaxscale.inference.server.endpoints import bodies
from jaxscale.inference.server.schema.encoders import Embedding
from tests.inference.server.endpoints.test_encoders import served
from tests.inference.server.fake_engine import TOKENIZER
from tests.inference.server.test_app import PATH


MANY = 2**15
TEXT = "to be " * MANY
DECODER = {
    "/tokenize": {"prompt": TEXT},
    "/detokenize": {"tokens": [1] * MANY},
    PATH: {"prompt": [1] * MANY},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
}
ENCODER = {
    "/v1/embeddings": {"input": [TEXT], "truncate": True},
    "/v1/score": {"text_1": "a", "text_2": TEXT, "truncate": True},
    "/v1/rerank": {"query": "a", "documents": [TEXT], "truncate": True},
}


@pytest.fixture(scope="module")
def encoder():
    model = served()
    yield model
    model.close()


@pytest.mark.parametrize(
    ("owner", "name", "path"),
    [(bodies, "from_json", path) for path in (*DECODER, *ENCODER)]
    + [(type(TOKENIZER), "encode", "/tokenize")]
    + [(type(TOKENIZER), "encode_inputs", path) for path in ENCODER],
)
def test_others_are_answered_meanwhile(
    harness, encoder, monkeypatch, owner, name, path
):
    begun, release = threading.Event(), threading.Event()
    function = getattr(owner, name)

    def waits(*args, **options):
        begun.set()
        assert release.wait(600), "the event loop waits for this"
        return function(*args, **options)

    monkeypatch.setattr(owner, name, waits)
    monkeypatch.setattr(encoder, "close", lambda: None)  # others need it too

    async def test(client):
        body = DECODER.get(path) or ENCODER[path]
        call = asyncio.create_task(client.post(path, json=body))
        try:
            assert await asyncio.to_thread(begun.wait, 600)
            assert not call.done()
            assert (await client.get("/health")).status_code == 200
        finally:
            release.set()
        assert (await call).status_code in (200, 400)

    harness.run(test, encoder if path in ENCODER else None)


def test_the_first_of_many_mistakes_is_told():
    """Millions of them would take gigabytes."""
    for given in ([1, "a"] * MANY, [[1], "a"] * MANY, [None] * MANY):
        with pytest.raises(bodies.ApiError) as error:
            bodies.parsed(to_json({"input": given}), Embedding)
        assert error.value.status_code == 400 and len(error.value.detail) < 300
        assert "input" in error.value.detail
