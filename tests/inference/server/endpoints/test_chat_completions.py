"""``/v1/chat/completions``: conversations, tools and guided answers."""

import json

import pytest

from jaxscale.inference.chat import ChatTemplate
from tests.inference.server.conftest import events
from tests.inference.server.fake_engine import TOKENIZER, FakeEngine, text_model
from tests.inference.test_chat import CHATML, TOOL


PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "to be?"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
FORCED = '{"name": "weather", "arguments": {"city": "Bern"}}'


def chat(harness, more=(), **options):
    answer = harness.post(PATH, {"messages": USER, **dict(more)}, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(harness, more, **options):
    """What a client puts together: roles, contents, calls and reasons by choice."""
    body = {"messages": USER, "stream": True, **more}
    choices = {}
    for part in events(harness.post(PATH, body, **options)):
        assert part["object"] == "chat.completion.chunk"
        for choice in part["choices"]:
            made = choices.setdefault(choice["index"], {"content": "", "calls": []})
            delta = choice["delta"]
            if "role" in delta:
                made["role"] = delta["role"]
            made["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls", []):
                if "id" in part:
                    made["calls"].append(part)
                else:
                    call = made["calls"][part["index"]]["function"]
                    call["arguments"] += part["function"]["arguments"]
            made["finish"] = choice["finish_reason"] or made.get("finish")
    return choices


def test_a_conversation(harness):
    engine = FakeEngine("or not")
    answer = chat(harness, {"max_completion_tokens": 40}, engine=engine)
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"] == {
        "role": "assistant",
        "content": "or not",
        "refusal": None,
    }
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    (request,) = engine.seen
    expected = ChatTemplate(TOKENIZER, CHATML).encode(USER)
    assert list(request.prompt) == expected
    assert request.params.max_tokens == 40
    assert answer["usage"]["prompt_tokens"] == len(expected)


def test_a_stream(harness):
    engine = FakeEngine(["or 不", "not"])
    found = streamed(harness, {"n": 2}, engine=engine)
    assert [found[i]["content"] for i in (0, 1)] == ["or 不", "not"]
    assert all(made["role"] == "assistant" for made in found.values())
    assert all(made["finish"] == "stop" for made in found.values())
    assert engine.seen[0].params.max_tokens is None


def test_log_probabilities(harness):
    more = {"logprobs": True, "top_logprobs": 2, "max_tokens": 1}
    content = chat(harness, more)["choices"][0]["logprobs"]["content"]
    token = TOKENIZER.encode(" to be")[0]
    text = TOKENIZER.decode([token])
    (entry,) = content
    assert entry["token"] == text and entry["logprob"] == -0.5
    assert bytes(entry["bytes"]).decode() == text
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.5]
    body = {"messages": USER, "stream": True, **more}
    parts = events(harness.post(PATH, body))
    found = [c["logprobs"] for p in parts for c in p["choices"] if c["logprobs"]]
    assert found == [{"content": content}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [None, "auto"])
def test_tools_that_the_model_may_call(harness, stream, choice):
    engine = FakeEngine(f"Wait. {CALL}\n{CALL}")
    more = {"tools": [TOOL], "tool_choice": choice}
    if stream:
        (made,) = streamed(harness, more, engine=engine).values()
        content, calls, finish = made["content"], made["calls"], made["finish"]
        assert [call["index"] for call in calls] == [0, 1]
    else:
        (made,) = chat(harness, more, engine=engine)["choices"]
        content, finish = made["message"]["content"], made["finish_reason"]
        calls = made["message"]["tool_calls"]
    assert content.strip() == "Wait." and finish == "tool_calls"
    assert len({call["id"] for call in calls}) == 2
    for call in calls:
        assert call["type"] == "function" and call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}
    assert "weather" in TOKENIZER.decode(engine.seen[0].prompt)
    assert engine.seen[0].params.guided is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_tools_that_the_model_must_call(harness, stream, choice):
    engine = FakeEngine(FORCED)
    more = {"tools": [TOOL], "tool_choice": choice}
    if stream:
        (made,) = streamed(harness, more, engine=engine).values()
        (call,), content, finish = made["calls"], made["content"], made["finish"]
        assert content == ""
    else:
        (made,) = chat(harness, more, engine=engine)["choices"]
        (call,), finish = made["message"]["tool_calls"], made["finish_reason"]
        assert made["message"]["content"] is None
    assert finish == "tool_calls"
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}
    guide = engine.seen[0].params.guided
    assert guide.kind == "json_schema" and "weather" in guide.text


def test_tools_that_the_model_must_not_call(harness):
    engine = FakeEngine(CALL)
    more = {"tools": [TOOL], "tool_choice": "none"}
    message = chat(harness, more, engine=engine)["choices"][0]["message"]
    assert message["content"] == CALL and "tool_calls" not in message
    assert "weather" not in TOKENIZER.decode(engine.seen[0].prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_most(harness, stream):
    engine = FakeEngine(CALL + CALL)
    more = {"tools": [TOOL], "parallel_tool_calls": False}
    if stream:
        calls = streamed(harness, more, engine=engine)[0]["calls"]
    else:
        message = chat(harness, more, engine=engine)["choices"][0]["message"]
        calls = message["tool_calls"]
    assert len(calls) == 1


def test_results_of_tools_reach_the_template(harness):
    call = {"id": "a", "type": "function", "function": {"name": "weather"}}
    call["function"]["arguments"] = '{"city": "Bern"}'
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    engine = FakeEngine()
    chat(harness, {"messages": messages}, engine=engine)
    text = TOKENIZER.decode(engine.seen[0].prompt)
    assert '<tool_call>weather {"city": "Bern"}</tool_call>' in text and "rain" in text


@pytest.mark.parametrize(
    ("more", "kind", "text"),
    [
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "null"}},
                }
            },
            "json_schema",
            '{"type": "null"}',
        ),
        ({"guided_json": {"type": "null"}}, "json_schema", '{"type": "null"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
    ],
)
def test_guided_answers(harness, more, kind, text):
    engine = FakeEngine()
    chat(harness, more, engine=engine)
    guide = engine.seen[0].params.guided
    assert (guide and guide.kind, guide and guide.text) == (kind, text)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"messages": []}, "messages has 0 messages"),
        ({"messages": [{"role": "user"}]}, "neither content nor tool_calls"),
        ({"messages": [{"content": "a"}]}, "messages: Field required"),
        ({"messages": "to be"}, "messages: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "only text is understood",
        ),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "differ; give one"),
        ({"top_logprobs": 1}, "top_logprobs need logprobs true"),
        ({"tool_choice": "auto"}, "tool_choice 'auto' needs tools"),
        ({"tools": [{}]}, "tools[0] must be an object with function.name"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice: "),
        (
            {"tools": [TOOL], "tool_choice": {"function": {"name": "f"}}},
            "tool_choice 'f' is unknown",
        ),
        (
            {"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"},
            "give one of them",
        ),
        ({"function": []}, "function is no parameter"),
    ],
)
def test_mistakes(harness, more, message):
    answer = harness.post(PATH, {"messages": USER, **more})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_models_without_templates_or_formats(harness):
    body = {"messages": USER}

    async def post(client):
        return await client.post(PATH, json=body)

    answer = harness.run(post, text_model(FakeEngine(), chat=False))
    assert answer.status_code == 400
    assert "has no chat template" in answer.json()["error"]["message"]
    model = text_model(FakeEngine(), template="{{ messages[0].content }}")
    body["tools"] = [TOOL]
    answer = harness.run(post, model)
    assert answer.status_code == 400
    assert "shows no format of calls" in answer.json()["error"]["message"]


def test_tokens_of_conversations(harness):
    async def test(client):
        lone = await client.post("/tokenize", json={"prompt": "to be"})
        assert lone.json() == {
            "tokens": TOKENIZER.encode("to be"),
            "count": len(TOKENIZER.encode("to be")),
            "max_model_len": 2048,
        }
        many = await client.post("/tokenize", json={"messages": USER})
        assert many.json()["tokens"] == ChatTemplate(TOKENIZER, CHATML).encode(USER)
        for body in ({}, {"prompt": "a", "messages": USER}):
            assert (await client.post("/tokenize", json=body)).status_code == 400
        back = await client.post("/detokenize", json={"tokens": lone.json()["tokens"]})
        assert back.json() == {"prompt": "to be"}
        lost = await client.post("/detokenize", json={"tokens": [10**6]})
        assert lost.status_code == 400 and "outside the vocabulary" in lost.text

    harness.run(test)


OPENS = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
CLOSED = OPENS.replace("<think>\\n' }}{% endif", "<think></think>' }}{% endif")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content"),
    [
        (OPENS, f"Hm. {CALL}</think>\n\nSo.", f"Hm. {CALL}", "So."),
        (OPENS, "cut off", "cut off", ""),
        (CLOSED, "So. <think>no", "", "So. <think>no"),
        (OPENS + "{# </think> #}", "Hm.</think>So.", "Hm.", "So."),
    ],
)
def test_reasoning_that_the_template_begins(
    harness, stream, template, text, reasoning, content
):
    """Or ends: the answer has no tag of its own then."""
    model = text_model(FakeEngine(text), template=template, reasoning_format="qwen3")

    async def post(client):
        body = {"messages": USER, "tools": [TOOL], "stream": stream}
        return await client.post(PATH, json=body)

    answer = harness.run(post, model)
    if stream:
        deltas = [c["delta"] for p in events(answer) for c in p["choices"]]
        found = ["", ""]
        for delta in deltas:
            found[0] += delta.get("reasoning_content") or ""
            found[1] += delta.get("content") or ""
            assert "tool_calls" not in delta
    else:
        message = answer.json()["choices"][0]["message"]
        found = [message.get("reasoning_content", ""), message["content"]]
    assert found == [reasoning, content]


def test_reasoning_can_be_left_out_or_in(harness):
    text = "<think>Hm.</think>So."
    for more, reasoning, content in (
        ({}, "Hm.", "So."),
        ({"include_reasoning": False}, None, "So."),
        ({"separate_reasoning": False}, None, text),
        ({"guided_regex": "a"}, None, text),
    ):
        model = text_model(FakeEngine(text), reasoning_format="qwen3")

        async def post(client, more=more):
            return await client.post(PATH, json={"messages": USER, **more})

        message = harness.run(post, model).json()["choices"][0]["message"]
        assert message.get("reasoning_content") == reasoning
        assert message["content"] == content


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER, "reasoning_effort": "low"}),
        ("/v1/responses", {"input": "to be?", "reasoning": {"effort": "low"}}),
    ],
)
def test_reasoning_effort_is_for_the_template(harness, path, body):
    """As its other variables, which win; without a use for it the answer says so."""
    engine, asks = FakeEngine(), CHATML + "{{ reasoning_effort }}"

    async def test(client):
        told = await client.post(path, json=body)
        kwargs = {"chat_template_kwargs": {"reasoning_effort": "high"}}
        both = await client.post(path, json={**body, **kwargs})
        return told, both

    told, both = harness.run(test, text_model(engine, template=asks))
    ends = [TOKENIZER.decode(request.prompt)[-5:] for request in engine.seen]
    assert ends[0].endswith("low") and ends[1].endswith("high")
    for answer in (told, both):
        assert answer.status_code == 200
        assert "x-jaxscale-ignored" not in answer.headers
    plain, _ = harness.run(test, text_model(engine))
    assert plain.headers["x-jaxscale-ignored"] == "reasoning_effort"
