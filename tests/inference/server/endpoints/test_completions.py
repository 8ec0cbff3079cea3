"""``/v1/completions``: what is answered, at once and in parts."""

import itertools

import pytest

from jaxscale.inference.output import TokenLogprobs
from jaxscale.inference.request import Request
from jaxscale.inference.server.logprobs import CompletionLogprobs
from tests.inference.server.conftest import events
from tests.inference.server.fake_engine import TOKENIZER, FakeEngine, text_model


PATH = "/v1/completions"


def complete(harness, body, **options):
    answer = harness.post(PATH, body, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def joined(parts):
    """Texts and reasons by choice."""
    texts, reasons = {}, {}
    for part in parts:
        for choice in part["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            reasons[index] = choice["finish_reason"] or reasons.get(index)
    return texts, reasons


def test_a_text(harness):
    engine = FakeEngine(" to be 不")
    body = {"model": "tiny", "prompt": "or", "max_tokens": 99, "temperature": 0}
    answer = complete(harness, body, engine=engine)
    count = len(TOKENIZER.encode(" to be 不"))
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": " to be 不",
        "logprobs": None,
        "finish_reason": "stop",
    }
    prompt = len(TOKENIZER.encode("or"))
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "total_tokens": prompt + count,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    (request,) = engine.seen
    assert list(request.prompt) == TOKENIZER.encode("or")
    assert request.params.temperature == 0 and request.params.max_tokens == 99


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_prompts_are_rendered_for_gateways(harness, path):
    """As vllm-router and the pickers of Kubernetes ask for them; nothing is run."""
    engine = FakeEngine()
    added = {"stream": False, "no_stop_trim": False, "return_hidden_states": False}
    body = {"prompt": ["or", "not"]}
    if path != PATH:
        body = {"messages": [{"role": "user", "content": "or"}]}
        body |= {"separate_reasoning": True, "continue_final_message": False}
    answer = harness.post(f"{path}/render", {**body, **added}, engine=engine)
    assert answer.status_code == 200, answer.text
    assert not engine.seen
    assert harness.post(path, {**body, **added}, engine=engine).status_code == 200
    found = answer.json() if path == PATH else [answer.json()]
    assert [r["token_ids"] for r in found] == [list(r.prompt) for r in engine.seen]
    assert all(r["model"] == "tiny" and r["request_id"] for r in found)
    wrong = harness.post(f"{path}/render", {**body, "n": 0})
    assert wrong.status_code == 400


@pytest.mark.parametrize("prompt", ["or", [5, 6], ["or", "not"], [[5, 6], [7]]])
def test_prompts(harness, prompt):
    engine = FakeEngine([" a", " b"])
    answer = complete(harness, {"prompt": prompt, "n": 2}, engine=engine)
    found = [(c["index"], c["text"]) for c in answer["choices"]]
    many = isinstance(prompt[0], list) or (
        isinstance(prompt, list) and prompt[0] == "or"
    )
    texts = [" a", " b"] * (2 if many else 1)
    assert found == list(enumerate(texts))
    given = prompt if many else [prompt]
    ids = [TOKENIZER.encode(p) if isinstance(p, str) else p for p in given]
    assert [list(request.prompt) for request in engine.seen] == ids


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_says_the_same(harness, n):
    body = {"prompt": ["or", "not"], "n": n, "logprobs": 1, "echo": True}
    answer = [" to be 不", " or not"]
    whole = complete(harness, body, engine=FakeEngine(answer))
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = events(harness.post(PATH, body, engine=FakeEngine(answer)))
    texts, reasons = joined(parts)
    for choice in whole["choices"]:
        index = choice["index"]
        assert texts[index] == choice["text"]
        assert reasons[index] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            pieces = [
                c["logprobs"]
                for p in parts
                for c in p["choices"]
                if c["index"] == index
            ]
            found = list(itertools.chain.from_iterable(p[name] for p in pieces))
            assert found == choice["logprobs"][name]
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(part["usage"] is None for part in parts)
    assert len({part["id"] for part in [*parts, last]}) == 1


def test_prompt_log_probabilities(harness):
    """As lm-eval asks for them: nothing drawn, the prompt scored."""
    body = {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 1}
    (choice,) = complete(harness, body)["choices"]
    texts = [TOKENIZER.decode([token]) for token in (5, 6, 7)]
    assert choice["text"] == "".join(texts) and choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == texts
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5]
    assert logprobs["top_logprobs"] == [None, {texts[1]: -0.5}, {texts[2]: -0.5}]
    assert logprobs["text_offset"] == [0, len(texts[0]), len(texts[0] + texts[1])]


def test_prompt_log_probabilities_without_echo(harness):
    (choice,) = complete(harness, {"prompt": [5, 6], "prompt_logprobs": 0})["choices"]
    entry = {"logprob": -0.5, "decoded_token": TOKENIZER.decode([6])}
    assert choice["prompt_logprobs"] == [None, {"6": entry}]
    assert choice["text"] == " to be"


def test_a_stream_has_no_part_for_prompt_log_probabilities(harness):
    response = harness.post(
        PATH, {"prompt": [5, 6], "prompt_logprobs": 0, "stream": True}
    )
    assert response.status_code == 400 and "leave out stream" in response.text


def test_of_tokens_with_one_text_the_likeliest_counts():
    """And the token that stands there is among them, however unlikely."""
    model = text_model(FakeEngine())
    model._texts.update({1: "x", 2: "x", 7: "y", 9: "z"})
    top = ((2, -0.5), (7, -1.0), (1, -2.0))
    item = TokenLogprobs(token=9, logprob=-8.5, top=top)
    listed = CompletionLogprobs(model, Request(prompt=[5]), echo=None, special=False)
    made = listed.listed([], [item], 100)
    assert made["top_logprobs"] == [{"x": -0.5, "y": -1.0, "z": -8.5}]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_stay_within_the_text(harness, stream):
    """Tokens that are parts of a character stand where it begins."""
    body = {"prompt": "or", "logprobs": 1, "echo": True, "stop": "X", "stream": stream}
    answer = harness.post(
        PATH, {**body, "max_tokens": 50}, engine=FakeEngine("a不b不X")
    )
    if stream:
        parts = [c for p in events(answer) for c in p["choices"]]
    else:
        parts = answer.json()["choices"]
    text = "".join(part["text"] for part in parts)
    offsets = [o for p in parts for o in p["logprobs"]["text_offset"]]
    assert text == "ora不b不"
    prompt = len(TOKENIZER.encode("or"))
    assert offsets[prompt:] == [2, 3, 3, 3, 4, 5, 5, 5, 6]


def test_all_settings_arrive(harness):
    engine = FakeEngine()
    body = {
        "prompt": "or",
        "max_tokens": 50,
        "min_tokens": 2,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {"7": -100, "9": 3},
        "seed": -5,
        "stop": ["x", "y"],
        "include_stop_str_in_output": True,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "cache_salt": "s",
        "guided_choice": [" to", "be"],
        # They mean nothing here.
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
    }
    (choice,) = complete(harness, body, engine=engine)["choices"]
    assert choice["text"] == " to"
    (request,) = engine.seen
    params = request.params
    assert (params.max_tokens, params.min_tokens) == (50, 2)
    assert (params.top_p, params.top_k, params.min_p) == (0.5, 3, 0.1)
    assert params.repetition_penalty == 1.1
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, -0.3)
    assert params.logit_bias == {7: -100, 9: 3} and params.seed == -5
    assert params.stop == ("x", "y") and params.include_stop
    assert params.stop_token_ids == (3,) and params.ignore_eos
    assert not params.skip_special_tokens
    assert request.salt == "s" and params.guided.choices == (" to", "be")


def test_stop_strings(harness):
    """Ten thousand of them; none shows in the text, whole or streamed."""
    stop = [f"<{i}>" for i in range(10_000)] + ["be"]
    body = {"prompt": "or", "stop": stop, "max_tokens": 50}
    for stream in (False, True):
        answer = harness.post(
            PATH, {**body, "stream": stream}, engine=FakeEngine(" to be or")
        )
        if stream:
            texts, reasons = joined(events(answer))
            found = (texts[0], reasons[0])
        else:
            (choice,) = answer.json()["choices"]
            found = (choice["text"], choice["finish_reason"])
        assert found == (" to ", "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["不", "b不", "不c", "b不c"])
def test_stop_strings_of_several_tokens(harness, stop, stream):
    """A character is three tokens, and a stop string begins and ends within them."""
    assert len(TOKENIZER.encode("不")) == 3
    body = {"prompt": "or", "stop": stop, "max_tokens": 50, "stream": stream}
    answer = harness.post(PATH, body, engine=FakeEngine("a不b不cd"))
    if stream:
        texts, reasons = joined(events(answer))
        found = (texts[0], reasons[0])
    else:
        (choice,) = answer.json()["choices"]
        found = (choice["text"], choice["finish_reason"])
    assert found == ("a不b不cd".split(stop)[0], "stop")


@pytest.mark.parametrize(("most", "count"), [(0, 0), (1, 1), (None, 5)])
def test_most_tokens(harness, most, count):
    engine = FakeEngine("abcde")
    body = {"prompt": "or", "max_tokens": most}
    answer = complete(harness, body, engine=engine)
    assert answer["usage"]["completion_tokens"] == count
    reason = "length" if most is not None else "stop"
    assert answer["choices"][0]["finish_reason"] == reason
    assert engine.seen[0].params.max_tokens == (16 if most is None else most)


@pytest.mark.parametrize(
    ("more", "message", "param"),
    [
        ({"no_stop_trim": True}, "no_stop_trim: ", "no_stop_trim"),
        ({"timeout": 0}, "timeout 0", None),
        ({"timeout": "5"}, "timeout: ", "timeout"),
        ({"suffix": "x"}, "suffix is not supported", None),
        ({"best_of": 3}, "best_of 3 must equal n 1", None),
        ({"prompt": []}, "prompt is empty", None),
        ({"prompt": ""}, "prompt is empty", None),
        ({"prompt": ["a", ""]}, "prompt is empty", None),
        ({"prompt": [2**31]}, "which is no token id", None),
        ({"prompt": [10**30]}, "prompt", None),
        ({"prompt": [[]]}, "prompt is empty", None),
        ({"prompt": [300]}, "outside the vocabulary of 288", None),
        ({"prompt": [-1]}, "holds -1, which is no token id", None),
        ({"prompt": {"a": 1}}, "prompt: ", "prompt"),
        ({"prompt": ["a", 1]}, "prompt: ", "prompt"),
        ({"prompt": "a" * 5000}, "more than the 2048 that there is room for", None),
        ({"prompt": ["a"] * 300}, "the call has 300 prompts, at most 256", None),
        ({"prompt": ["a"] * 100, "n": 100}, "make 10000 continuations", None),
        ({"n": 0}, "n 0 must be an integer of at least 1", None),
        ({"n": 1.5}, "n: Input should be a valid integer", "n"),
        ({"n": True}, "n: Input should be a valid integer", "n"),
        ({"n": "1"}, "n: Input should be a valid integer", "n"),
        ({"n": 10**30}, "n 10000", None),
        ({"max_tokens": -1}, "max_tokens -1 must be", None),
        ({"max_tokens": 10**9}, "shorten the prompt or lower max_tokens", None),
        ({"temperature": -0.1}, "temperature -0.1 must be at least 0", None),
        ({"top_p": -0.1}, "top_p -0.1", None),
        ({"logprobs": 21}, "logprobs 21", None),
        ({"logit_bias": {"x": 1}}, "logit_bias holds 'x'", None),
        ({"logit_bias": {"5": 101}}, "logit_bias of token 5", None),
        ({"logit_bias": {"500": 1}}, "outside the vocabulary", None),
        ({"stop": ["a"] * 20_000}, "stop has 20000 strings", None),
        ({"stop": ""}, "expected strings, none empty", None),
        ({"priority": 1}, "this server lets no call choose its priority", None),
        ({"stream_options": {"include_usage": True}}, "need stream true", None),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "exclude each other", None),
        ({"response_format": {"type": "json_schema"}}, "lacks its json_schema", None),
        ({"max_token": 5}, "max_token is no parameter of this call", "max_token"),
    ],
)
def test_mistakes(harness, more, message, param):
    engine = FakeEngine()
    answer = harness.post(PATH, {"prompt": "or", **more}, engine=engine)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"] and error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not engine.seen


def test_another_model(harness):
    answer = harness.post(PATH, {"prompt": "or", "model": "other"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found" and error["param"] == "model"


@pytest.mark.parametrize("finish", ["error", "timeout", "aborted"])
@pytest.mark.parametrize("stream", [False, True])
def test_failures_of_the_engine(harness, finish, stream):
    engine = FakeEngine()
    engine.fails = finish
    body = {"prompt": ["or", "not"], "stream": stream}
    answer = harness.post(PATH, body, engine=engine)
    assert not engine.live
    if stream:
        error = events(answer)[-1]["error"]
    else:
        status = {"error": 500, "timeout": 504, "aborted": 503}[finish]
        assert answer.status_code == status
        error = answer.json()["error"]
    assert error["message"] == "not finite" and error["code"] == finish
