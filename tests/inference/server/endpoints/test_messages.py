"""``/v1/messages`` and ``/v1/responses`` as they are on the wire."""

import gzip
import json

import pytest

from tests.inference.server.conftest import Harness
from tests.inference.server.endpoints.test_chat_completions import CALL
from tests.inference.server.fake_engine import TOKENIZER, FakeEngine, text_model
from tests.inference.test_chat import CHATML, TOOL


PATH = "/v1/messages"
USER = [{"role": "user", "content": "to be?"}]
THINKS = CHATML + "{# </think> #}"
TOOLS = [{"name": "weather", "input_schema": TOOL["function"]["parameters"]}]
IMAGE = [{"type": "image"}]
ASK = {"model": "tiny", "max_tokens": 500, "messages": USER}


def ask(harness, path, body, answer="So.", *, status=200, **options):
    """What is answered, and the requests that the engine has seen."""
    engine = FakeEngine(answer)
    model = text_model(engine, template=THINKS, aliases=("other",), **options)

    async def post(client):
        return await client.post(path, json=body)

    response = harness.run(post, model)
    assert response.status_code == status, response.text
    return response, engine.seen


def named_events(response):
    """The events of a stream; each has the name of its type."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for part in response.text.strip().split("\n\n"):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def test_a_message(harness):
    text = f"<think>Hm.</think>\n\nSo. {CALL}\n"
    body = {**ASK, "tools": TOOLS, "system": [{"type": "text", "text": "Be."}]}
    answer, seen = ask(harness, PATH, body, text)
    found = answer.json()
    thought, said, call = found["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert said == {"type": "text", "text": "So. "}
    assert (call["type"], call["name"]) == ("tool_use", "weather")
    assert call["input"] == {"city": "Bern"} and call["id"]
    assert found["stop_reason"] == "tool_use" and found["stop_sequence"] is None
    assert found["role"] == "assistant" and found["type"] == "message"
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(
        seen[0].prompt
    )
    assert "system\nBe.<|im_end|>" in TOKENIZER.decode(seen[0].prompt)
    assert seen[0].params.max_tokens == 500
    streamed, _ = ask(harness, PATH, {**body, "stream": True}, text)
    events = named_events(streamed)
    assert [event["type"] for event in (events[0], *events[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == usage["output_tokens"]
    keys = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
    for index, block in enumerate(found["content"]):
        own = [e for e in events if e.get("index") == index]
        begin, *deltas, end = own
        assert (begin["type"], end["type"]) == (
            "content_block_start",
            "content_block_stop",
        )
        assert begin["content_block"]["type"] == block["type"]
        text = "".join(d["delta"][keys[block["type"]]] for d in deltas)
        if block["type"] == "tool_use":
            assert json.loads(text) == block["input"] and len(deltas) > 1
        else:
            assert text == block[keys[block["type"]]]


def test_messages_of_blocks(harness):
    """As agents send their history back."""
    messages = [
        *USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "wet"},
                {"type": "text", "text": "And?", "cache_control": {"type": "e"}},
            ],
        },
    ]
    body = {**ASK, "messages": messages, "tools": TOOLS}
    _, seen = ask(harness, PATH, body)
    text = TOKENIZER.decode(seen[0].prompt)
    assert 'I look.<tool_call>weather {"x": 1}</tool_call>' in text
    assert "<|im_start|>tool\nwet<|im_end|>\n<|im_start|>user\nAnd?" in text
    counted, _ = ask(harness, f"{PATH}/count_tokens", body)
    assert counted.json() == {"input_tokens": len(seen[0].prompt)}


def test_a_message_that_is_begun_for_the_model(harness):
    messages = [*USER, {"role": "assistant", "content": "or no"}]
    _, seen = ask(harness, PATH, {**ASK, "messages": messages})
    assert TOKENIZER.decode(seen[0].prompt).endswith("assistant\nor no")


@pytest.mark.parametrize(
    ("more", "answer", "reason"),
    [
        ({}, "So.", ("end_turn", None)),
        ({"max_tokens": 1}, "So.", ("max_tokens", None)),
        ({"stop_sequences": ["o"]}, "So.", ("stop_sequence", "o")),
    ],
)
def test_reasons_for_the_end(harness, more, answer, reason):
    found = ask(harness, PATH, {**ASK, **more}, answer)[0].json()
    assert (found["stop_reason"], found["stop_sequence"]) == reason


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "any"}, "weather"),
        ({"type": "tool", "name": "weather"}, "weather"),
        ({"type": "auto"}, None),
        ({"type": "none"}, None),
    ],
)
def test_choices_of_tools(harness, choice, expected):
    answer = '{"name":"weather","arguments":{"city":"\\ud800"}}'
    body = {**ASK, "tools": TOOLS, "tool_choice": choice, "thinking": {"type": "x"}}
    response, seen = ask(harness, PATH, body, answer)
    guide = seen[0].params.guided
    assert (guide is not None) == (expected is not None)
    if expected:
        (call,) = response.json()["content"]
        # No text holds what the model wrote there; its escape does.
        assert call["input"] == {"arguments": '{"city":"\\ud800"}'}
    assert response.headers["x-jaxscale-ignored"] == "thinking"


RESULT = {"type": "tool_result", "tool_use_id": "a"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (PATH, {"max_tokens": None}, "max_tokens: Field required"),
        (PATH, {"messages": []}, "0 messages"),
        (
            PATH,
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "only t",
        ),
        (
            PATH,
            {"messages": [{"role": "user", "content": [{**RESULT, "content": 5}]}]},
            "a block that is no text",
        ),
        (PATH, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "runs no tools"),
        (PATH, {"top_q": 1}, "top_q is no parameter"),
        (
            "/v1/responses",
            {"input": [{"type": "image"}]},
            "input[0] is of type 'image'",
        ),
        ("/v1/responses", {"input": [{"role": "user"}]}, "part that is no text"),
        ("/v1/responses", {"input": []}, "0 messages"),
        ("/v1/responses", {"input": "a", "background": True}, "background: "),
        ("/v1/responses", {"input": "a", "tools": [{"type": "mcp"}]}, "no other tools"),
        ("/v1/responses", {"input": "a", "temperature": -1}, "temperature -1"),
    ],
)
def test_mistakes(harness, path, body, message):
    base = ASK if path == PATH else {}
    answer, seen = ask(harness, path, {**base, **body}, status=400)
    assert message in answer.json()["error"]["message"] and not seen


def test_failures_within_streams(harness):
    engine = FakeEngine("to be or not")
    engine.fails = "error"

    async def test(client):
        body = {**ASK, "stream": True}
        first = await client.post(PATH, json=body)
        body = {"input": "a", "stream": True}
        return first, await client.post("/v1/responses", json=body)

    for response in harness.run(test, engine=engine):
        event = named_events(response)[-1]
        assert event["type"] == "error" and event["error"]["message"] == "not finite"


def test_responses_that_are_not_stored(harness):
    engine = FakeEngine("So.")

    async def test(client):
        path = "/v1/responses"
        body = {"input": "a", "store": False}
        first = (await client.post(path, json=body)).json()
        again = {"input": "b", "previous_response_id": first["id"]}
        return first, await client.post(path, json=again)

    first, again = harness.run(test, engine=engine)
    assert first["output"][0]["content"][0]["text"] == "So."
    assert again.status_code == 404 and "is not kept" in again.text


def test_keys_as_clients_of_anthropic_send_them():
    harness = Harness(api_keys=("secret",))

    async def test(client):
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"x-api-key": "other"}, 401),
            ({}, 401),
        ):
            answer = await client.post(PATH, json=ASK, headers=headers)
            assert answer.status_code == status

    harness.run(test)


def test_other_names_of_the_model(harness):
    model = text_model(FakeEngine(), aliases=("gpt-4o",))

    async def test(client):
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["tiny", "gpt-4o"]
        assert listed[1]["root"] == "tiny"
        answer = await client.post(PATH, json={**ASK, "model": "gpt-4o"})
        assert answer.is_success
        assert (await client.get("/v1/models/gpt-4o")).json()["id"] == "gpt-4o"

    harness.run(test, model)


def test_bodies_that_come_compressed():
    harness = Harness(max_body_bytes=4096)
    body = json.dumps({"prompt": "to be"}).encode()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}

    async def test(client):
        async def post(content, **more):
            options = {"content": content, "headers": {**headers, **more}}
            return await client.post("/v1/completions", **options)

        assert (await post(gzip.compress(body))).is_success
        large = gzip.compress(json.dumps({"prompt": "a" * 10**6}).encode())
        assert len(large) < 4096 and (await post(large)).status_code == 413
        assert (await post(b"no")).status_code == 400
        cut = await post(gzip.compress(body)[:-9])
        assert cut.status_code == 400 and "ends before" in cut.text
        other = await post(body, **{"content-encoding": "br"})
        assert other.status_code == 415

    harness.run(test)


def test_defaults_of_the_authors_of_a_model(harness):
    """They hold where a call says nothing."""
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    _, seen = ask(harness, PATH, {**ASK, "top_p": 0.5}, defaults=defaults)
    params = seen[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.5)
    _, seen = ask(harness, PATH, {**ASK, "top_k": 0}, defaults=defaults)
    assert seen[0].params.top_k is None
