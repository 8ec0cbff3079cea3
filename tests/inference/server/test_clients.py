"""Clients as they are published, unchanged, against the server."""

import json
from typing import Literal

import numpy as np
import pydantic
import pytest

from jaxscale.inference.server import background
from tests.inference.server.conftest import LiveServer
from tests.inference.server.endpoints.test_encoders import TEXTS, served
from tests.inference.server.fake_engine import TOKENIZER, FakeEngine, text_model
from tests.inference.test_chat import CHATML, TOOL


USER = [{"role": "user", "content": "to be?"}]
FORCED = '{"name":"weather","arguments":{"city":"Bern"}}'
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
THINKS = CHATML + "{# </think> #}"


class City(pydantic.BaseModel):
    name: str


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: City
    unit: Literal["C", "F"]


class Server(LiveServer):
    """Serves any model."""

    def __init__(self, engine, template=CHATML, **more):
        super().__init__(engine)
        service = self.server.service
        service._load = lambda: text_model(engine, template=template, **more)


@pytest.fixture(scope="module")
def thinking():
    with Server(FakeEngine(), THINKS) as running:
        yield running


@pytest.fixture
def say(thinking):
    """Let the model say something, and return what it was asked."""

    def say(text):
        thinking.engine.answer = text
        thinking.engine.seen.clear()
        return thinking.engine.seen

    return say


@pytest.fixture
def openai(thinking):
    library = pytest.importorskip("openai")
    url = f"{thinking.url}/v1"
    with library.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


def test_openai_tools_of_nested_models(openai, say):
    """As pydantic writes their schemas, with definitions."""
    from openai import pydantic_function_tool

    arguments = '{"city":{"name":"Bern"},"unit":"C"}'
    seen = say(f'{{"name":"Weather","arguments":{arguments}}}')
    answer = openai.chat.completions.parse(
        model="tiny",
        messages=USER,
        tools=[pydantic_function_tool(Weather)],
        tool_choice="required",
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city=City(name="Bern"), unit="C")
    guide = json.loads(seen[0].params.guided.text)
    assert "$ref" in json.dumps(guide["$defs"]["tool0"]["properties"]["city"])
    assert guide["$defs"]["tool0"]["$defs"]["City"]["type"] == "object"


def test_openai_parses_what_it_asked_for(openai, say):
    class Answer(pydantic.BaseModel):
        city: str
        unit: Literal["C", "F"]

    say('{"city": "Bern", "unit": "C"}')
    answer = openai.chat.completions.parse(
        model="tiny", messages=USER, response_format=Answer
    )
    assert answer.choices[0].message.parsed == Answer(city="Bern", unit="C")


def test_openai_streams_calls(openai, say):
    """The client puts the parts of the arguments together."""
    say(f"<think>Is it?</think>So. {CALL}")
    with openai.chat.completions.stream(
        model="tiny", messages=USER, tools=[TOOL]
    ) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        message = stream.get_final_completion().choices[0].message
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    thought = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert thought == "Is it?" and message.content == "So. "
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Bern"}
    assert sum(bool(delta.tool_calls) for delta in deltas) > 3


def test_openai_reasoning(openai, say):
    """What looks like a call within it is none."""
    say(f"<think>\n{CALL}\n</think>\n\nNo.")
    message = openai.chat.completions.create(
        model="tiny", messages=USER, tools=[TOOL], reasoning_effort="low"
    )
    found = message.choices[0].message
    assert found.reasoning_content == f"{CALL}\n" and found.content == "No."
    assert not found.tool_calls and message.choices[0].finish_reason == "stop"
    whole = openai.chat.completions.create(
        model="tiny", messages=USER, extra_body={"separate_reasoning": False}
    )
    assert whole.choices[0].message.content.startswith("<think>")


def test_openai_says_what_was_ignored(openai, say):
    say("{}")
    schema = {"type": "array", "uniqueItems": True, "items": {"format": "url"}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    raw = openai.chat.completions.with_raw_response.create(
        model="tiny",
        messages=USER,
        verbosity="low",
        response_format=form,
        extra_body={"unknown": None},
    )
    ignored = raw.headers["x-jaxscale-ignored"]
    assert ignored == "verbosity, uniqueItems, format=url"


def test_openai_histories_of_any_arguments(openai, say):
    """A turn that a model once got wrong refuses no later one."""
    seen = say("So.")
    for arguments in ('{"city": ', '{"city": "\\ud800"}', '{"city": 1e400}', "5"):
        function = {"name": "weather", "arguments": arguments}
        call = {"id": "a", "type": "function", "function": function}
        history = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "?"},
        ]
        openai.chat.completions.create(model="tiny", messages=history, tools=[TOOL])
        assert f"weather {arguments}" in TOKENIZER.decode(seen[-1].prompt)


@pytest.mark.parametrize("arguments", ['{"city": "\\ud800"}', '{"city": 1e400}'])
def test_openai_answers_of_any_arguments(openai, say, arguments):
    say(f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>')
    answer = openai.chat.completions.create(model="tiny", messages=USER, tools=[TOOL])
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.arguments == arguments


def test_openai_log_probabilities_of_parts_of_characters(openai, say):
    say("不")
    answer = openai.chat.completions.create(
        model="tiny", messages=USER, logprobs=True, top_logprobs=1
    )
    entries = answer.choices[0].logprobs.content
    assert bytes(b for e in entries for b in e.bytes).decode() == "不"
    assert len(entries) == 3


def test_openai_extras(openai, say):
    """Names of vLLM's, as its documentation gives them to this client."""
    seen = say("to be")
    extra = {
        "allowed_token_ids": [5, 6],
        "bad_words": ["not"],
        "structured_outputs": {
            "json": {"type": "null"},
            "disable_any_whitespace": True,
        },
        "truncate_prompt_tokens": 3,
        "return_token_ids": True,
        "top_k": 0,
    }
    answer = openai.completions.create(
        model="tiny", prompt="to be or not", top_p=0, extra_body=extra
    )
    (request,) = seen
    params = request.params
    assert params.allowed_token_ids == (5, 6) and params.greedy
    assert params.bad_token_ids == (
        tuple(TOKENIZER.encode("not")),
        tuple(TOKENIZER.encode(" not")),
    )
    assert params.guided.compact and params.guided.text == '{"type": "null"}'
    assert list(request.prompt) == TOKENIZER.encode("to be or not")[-3:]
    (choice,) = answer.choices
    assert choice.prompt_token_ids == list(request.prompt)
    assert choice.token_ids == TOKENIZER.encode("to be")
    messages = [*USER, {"role": "assistant", "content": "or no"}]
    more = {"continue_final_message": True, "return_token_ids": True}
    chat = openai.chat.completions.create(
        model="tiny", messages=messages, extra_body=more
    )
    text = TOKENIZER.decode(chat.prompt_token_ids)
    assert text.endswith("<|im_start|>assistant\nor no")
    assert chat.choices[0].token_ids == TOKENIZER.encode("to be")


def test_openai_usage_in_each_part(openai, say):
    say("to be or")
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = openai.completions.create(
        model="tiny", prompt="or", stream=True, stream_options=options
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == [*range(1, len(counts)), len(counts) - 1]


def test_openai_responses(openai, say):
    seen = say(f"<think>Hm.</think>So. {CALL}")
    tool = {"type": "function", **TOOL["function"], "strict": False}
    first = openai.responses.create(
        model="tiny", instructions="Be.", input="to be?", tools=[tool]
    )
    assert [item.type for item in first.output] == [
        "reasoning",
        "message",
        "function_call",
    ]
    thought, said, call = first.output
    assert thought.content[0].text == "Hm." and first.output_text == "So. "
    assert call.name == "weather" and json.loads(call.arguments) == {"city": "Bern"}
    assert said.status == first.status == "completed"
    assert first.usage.total_tokens > first.usage.output_tokens > 0
    say("Rain.")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
    second = openai.responses.create(
        model="tiny", previous_response_id=first.id, input=[result]
    )
    text = TOKENIZER.decode(seen[-1].prompt)
    assert "to be?" in text and "<tool_call>weather" in text and "wet" in text
    assert "Be." not in text  # instructions are those of one call
    assert second.output_text == "Rain."
    import openai as library

    with pytest.raises(library.NotFoundError, match="is not kept"):
        openai.responses.create(model="tiny", previous_response_id="x", input="a")


def test_openai_streams_responses(openai, say):
    say(f"<think>Hm.</think>So. {CALL}")
    tool = {"type": "function", **TOOL["function"], "strict": False}
    with openai.responses.stream(model="tiny", input="a", tools=[tool]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    texts = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(texts) == "So. " and len(texts) > 1
    deltas = [
        e.delta for e in events if e.type == "response.function_call_arguments.delta"
    ]
    assert json.loads("".join(deltas)) == {"city": "Bern"} and len(deltas) > 1
    assert [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
    ]


def test_openai_parses_responses(openai, say):
    class Answer(pydantic.BaseModel):
        city: str

    say('{"city": "Bern"}')
    answer = openai.responses.parse(model="tiny", input="a", text_format=Answer)
    assert answer.output_parsed == Answer(city="Bern")
    say("to be or not")
    cut = openai.responses.create(model="tiny", input="a", max_output_tokens=1)
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"


@pytest.fixture(scope="module")
def embeds():
    with background(served) as url:
        yield f"{url}/v1"


def test_openai_embeddings(embeds):
    library = pytest.importorskip("openai")
    with library.OpenAI(base_url=embeds, api_key="any", max_retries=0) as client:
        given = [TOKENIZER.encode(text) for text in TEXTS]
        answer = client.embeddings.create(model="tiny", input=given, dimensions=4)
        rows = np.array([entry.embedding for entry in answer.data])
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
        assert rows.shape == (3, 4)


def test_langchain(thinking, say, embeds):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        base_url=f"{thinking.url}/v1", api_key="any", model="tiny"
    )
    say(CALL)
    (call,) = chat.bind_tools([TOOL]).invoke("to be?").tool_calls
    assert call["args"] == {"city": "Bern"}
    embeddings = langchain.OpenAIEmbeddings(
        base_url=embeds, api_key="any", model="tiny", check_embedding_ctx_length=False
    )
    assert len(embeddings.embed_documents(TEXTS)) == 3


@pytest.mark.filterwarnings("ignore")  # of its own models, by the pydantic it brings
def test_litellm(thinking, say):
    litellm = pytest.importorskip("litellm")
    say("So.")
    answer = litellm.completion(
        model="openai/tiny", messages=USER, api_base=f"{thinking.url}/v1", api_key="any"
    )
    assert answer.choices[0].message.content == "So."


def test_anthropic(thinking, say):
    library = pytest.importorskip("anthropic")
    client = library.Anthropic(base_url=thinking.url, api_key="any", max_retries=0)
    schema = TOOL["function"]["parameters"]
    tools = [{"name": "weather", "input_schema": schema}]
    say(f"<think>Hm.</think>So. {CALL}")
    call = {"model": "tiny", "max_tokens": 500, "messages": USER, "tools": tools}
    with client:
        answer = client.messages.create(**call)
        assert [block.type for block in answer.content] == [
            "thinking",
            "text",
            "tool_use",
        ]
        assert answer.content[2].input == {"city": "Bern"}
        with client.messages.stream(**call) as stream:
            final = stream.get_final_message()
        assert final.content[2].input == {"city": "Bern"}
        assert final.stop_reason == answer.stop_reason == "tool_use"
