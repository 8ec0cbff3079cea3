"""What every call passes: names of the server, of calls and of sites; long texts."""

import logging
import threading

import pytest

from jaxscale.inference.output import Output
from jaxscale.inference.server import ServerConfig
from jaxscale.inference.server.run import _named
from jaxscale.inference.text_bound import TextBound
from tests.inference.server.conftest import Harness
from tests.inference.server.fake_engine import TOKENIZER, FakeEngine
from tests.inference.server.test_app import BODY, PATH


def test_names_of_the_server():
    """A name of another site that was made to mean this machine is refused."""
    config = _named(ServerConfig(), "127.0.0.1")
    harness = Harness(allowed_hosts=config.allowed_hosts)

    async def test(client):
        for host in ("127.0.0.1:8000", "LOCALHOST", "[::1]:80"):
            answer = await client.get("/version", headers={"host": host})
            assert answer.status_code == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example:8000", ""):
            answer = await client.post(PATH, json=BODY, headers={"host": host})
            assert answer.status_code == 403, host
            assert answer.json()["error"]["code"] == "host_not_allowed"

    harness.run(test)
    assert _named(ServerConfig(), "0.0.0.0").allowed_hosts is None
    chosen = ServerConfig(allowed_hosts=("a.example",))
    assert _named(chosen, "127.0.0.1") is chosen
    with pytest.raises(ValueError, match="the origin of a site"):
        ServerConfig(allowed_origins=("a.example",))


def test_names_of_calls(harness):
    async def test(client):
        given = await client.get("/version", headers={"x-request-id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"
        made = await client.post(PATH, json={}, headers={"x-request-id": "a b"})
        assert made.status_code == 400 and len(made.headers["x-request-id"]) == 32

    harness.run(test)


def test_heads_and_options(harness):
    async def test(client):
        head = await client.head("/health")
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) > 0
        assert (await client.head(PATH)).status_code == 405
        options = await client.options("/health")
        assert options.status_code == 204
        assert options.headers["allow"] == "GET, HEAD, OPTIONS"
        assert (await client.options(PATH)).headers["allow"] == "OPTIONS, POST"
        assert (await client.options("/nowhere")).status_code == 404

    harness.run(test)


def test_pages_of_other_sites():
    harness = Harness(allowed_origins=("https://a.example",), api_keys=("k",))

    async def test(client):
        ask = {"access-control-request-method": "POST"}
        for origin, allowed in (("https://a.example", True), ("https://b.x", False)):
            headers = {"origin": origin}
            asked = await client.options(PATH, headers={**headers, **ask})
            assert (asked.status_code == 200) == allowed
            # Refusals can be read by the page, too.
            answer = await client.post(PATH, json=BODY, headers=headers)
            assert answer.status_code == 401
            assert ("access-control-allow-origin" in answer.headers) == allowed

    harness.run(test)


def test_defects_are_counted_and_logged(harness, caplog):
    engine = FakeEngine()
    engine.text_of = lambda request, index: {}["secret"]

    async def test(client):
        headers = {"x-request-id": "mine-2"}
        answer = await client.post(PATH, json=BODY, headers=headers)
        assert answer.status_code == 500 and "secret" not in answer.text
        assert answer.headers["x-request-id"] == "mine-2"
        text = (await client.get("/metrics")).text
        assert f'requests_total{{path="{PATH}",status="500"}}' in text

    with caplog.at_level(logging.ERROR):
        harness.run(test, engine=engine)
    (record,) = caplog.records
    assert "mine-2" in record.getMessage() and record.exc_info


@pytest.mark.parametrize("blames", [False, True])
def test_what_is_not_finite_is_logged(harness, caplog, blames):
    """Unless the request is to blame, which is told that it is."""
    engine = FakeEngine()

    async def generate(request):
        yield Output(
            request=request.id,
            index=0,
            finish="error",
            error="not well",
            blames_request=blames,
        )

    engine.generate = generate
    answer = harness.post(PATH, BODY, engine=engine)
    assert answer.status_code == (400 if blames else 500)
    assert answer.json()["error"]["message"] == "not well"
    logged = [r.getMessage() for r in caplog.records if "not well" in r.getMessage()]
    assert len(logged) == (not blames)


LONG = "to be " * 2**20


def test_long_texts_are_refused_before_they_are_tokenized(harness, monkeypatch):
    """By a few of their characters, on every path."""
    seen, encode = [], type(TOKENIZER).encode

    def counted(self, text, **options):
        seen.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(type(TOKENIZER), "encode", counted)
    message = [{"role": "user", "content": LONG[: 2**20]}]
    for path, body in (
        (PATH, {"prompt": LONG[: 2**20]}),
        (PATH, {"prompt": ["a", LONG[: 2**20]]}),
        (PATH, {"prompt": LONG[: 2**19]}),
        ("/v1/completions/render", {"prompt": LONG[: 2**20]}),
        ("/v1/chat/completions", {"messages": message}),
        ("/v1/chat/completions/render", {"messages": message}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        (PATH, {"prompt": [1] * 2**18}),
        ("/detokenize", {"tokens": [1] * (2**20 + 1)}),
    ):
        answer = harness.post(path, body)
        assert answer.status_code == 400, path
        assert "characters" in answer.text or "tokens, more than" in answer.text
    assert sum(seen) < 2**18


def test_texts_of_which_a_tokenizer_drops_much_are_not_refused():
    """Spaces that it joins and words that it does not know make few tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({"[UNK]": 0, "to": 1, "be": 2}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    bound = TextBound(tokenizer=type(TOKENIZER)(backend), most=8)
    for text in ("to" + " " * 500_000 + "be", "x" * 500_000, "to be to be"):
        bound.check(text)
        assert bound.beginning(text) == text
    with pytest.raises(ValueError, match="more tokens than the 8"):
        bound.check("to be " * 50_000)
    cut = bound.beginning("to be " * 50_000)
    assert len(cut) < 10_000 and cut.count("to") > 8


def test_nobody_waits_for_a_long_text(monkeypatch):
    left = threading.Event()
    left.set()
    bound = TextBound(tokenizer=TOKENIZER, most=4, left=left.is_set)
    with pytest.raises(ValueError, match="the client has left"):
        bound.check("to be " * 10_000)
