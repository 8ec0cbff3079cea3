"""Nothing that a client can ask for gets past the edge unchecked."""

import math

import numpy as np
import pytest

from jaxscale.inference.request import Guide, InvalidRequest, Request, SamplingParams


pytestmark = pytest.mark.usefixtures("no_shape_hook")
NAN, INFINITY = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, NAN, INFINITY, "1", True, None]),
        ("top_k", [0, -1, 1.5, True]),
        ("top_p", [0, -0.5, 1.01, NAN, False]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("repetition_penalty", [0, -1, NAN, INFINITY]),
        ("presence_penalty", [-2.1, 2.1, NAN]),
        ("frequency_penalty", [-2.1, 2.1, NAN]),
        ("logit_bias", [{-1: 0}, {0: 101}, {0: NAN}, {"0": 1}, [1], {1.5: 1}]),
        ("logit_bias", [dict.fromkeys(range(301), 1.0)]),
        ("seed", [2**63, -(2**63) - 1, 1.0, True]),
        ("n", [0, 129, 1.0, True]),
        ("logprobs", [-1, 21, True]),
        ("prompt_logprobs", [-1, 21]),
        ("max_tokens", [-1, 1.0, True]),
        ("min_tokens", [-1, None, True]),
        ("stop", ["", [""], ["a", 1], 5, ["a"] * 16_385, ["x" * 4097]]),
        ("stop_token_ids", [[-1], [1.5], ["1"], [True], 3, "12", [2**31]]),
        ("include_stop", [1]),
        ("ignore_eos", [None]),
        ("skip_special_tokens", ["yes"]),
        ("guided", ["json"]),
    ],
)
def test_bounds_of_params(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


def test_params_at_their_bounds():
    params = SamplingParams(
        temperature=0,
        top_k=1,
        top_p=1e-9,
        min_p=1,
        repetition_penalty=1e-9,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={np.int32(5): -100, 6: 100.0},
        seed=-(2**63),
        n=128,
        logprobs=20,
        max_tokens=0,
        stop=["a" * 64] * 10_000,
        stop_token_ids=np.arange(10_000),
    )
    assert params.greedy and params.needs_sampler
    assert params.logit_bias == {5: -100, 6: 100.0}
    assert params.stop_token_ids == tuple(range(10_000))
    assert all(type(token) is int for token in params.stop_token_ids)
    assert SamplingParams(stop="end").stop == ("end",)
    assert not SamplingParams(temperature=0.7, logprobs=0, seed=1).needs_sampler
    with pytest.raises(ValueError, match="min_tokens 3 must not exceed max_tokens 2"):
        SamplingParams(min_tokens=3, max_tokens=2)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "xml"},
        {"kind": "regex"},
        {"kind": "json_schema", "text": ""},
        {"kind": "json_object", "text": "{}"},
        {"kind": "choice"},
        {"kind": "choice", "choices": [""]},
        {"kind": "regex", "text": "a", "choices": ["a"]},
        {"kind": "regex", "text": "a" * (2**20 + 1)},
        {"kind": "regex", "text": b"a"},
    ],
)
def test_guides(fields):
    with pytest.raises(ValueError, match=r"guided|choices|must be a string"):
        Guide(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [-1]}, "prompt holds -1, which is no token id"),
        ({"prompt": [True]}, "prompt holds True"),
        ({"prompt": [1.0]}, "prompt holds 1.0"),
        ({"prompt": "text"}, "prompt 'text' must be a sequence of token ids"),
        ({"prompt": 7}, "prompt 7 must be a sequence"),
        ({"id": ""}, "id '' must be a string"),
        ({"id": "x" * 257}, "must be a string of 1 to 256"),
        ({"client": "x" * 1025}, "client must be a string"),
        ({"salt": 5}, "salt must be a string"),
        ({"params": None}, "params None must be SamplingParams"),
        ({"priority": 1.0}, "priority 1.0 must be an integer"),
        ({"priority": 2**31}, "priority 2147483648 must be"),
        ({"deadline": NAN}, "deadline nan must be"),
        ({"arrival": INFINITY}, "arrival inf must be"),
        ({"echo": "yes"}, "echo 'yes' must be True or False"),
    ],
)
def test_requests(fields, message):
    with pytest.raises(ValueError, match=message):
        Request(**{"prompt": [1]} | fields)


def test_room():
    """max_tokens 0 and 1, at the limit and behind it."""
    for most, length in ((0, 8), (0, 9), (1, 7), (1, 8)):
        request = Request(prompt=[1] * length, params=SamplingParams(max_tokens=most))
        if most + length <= 8:
            request.check(vocab_size=2, max_len=8)
            assert request.limit(8) == length + most
        else:
            with pytest.raises(InvalidRequest, match="more than the 8 that there is"):
                request.check(vocab_size=2, max_len=8)
    open_end = Request(prompt=np.array([1] * 7))
    open_end.check(vocab_size=2, max_len=8)
    assert open_end.limit(8) == 8 and open_end.prompt == (1,) * 7
    for params in (
        SamplingParams(stop_token_ids=[2]),
        SamplingParams(logit_bias={2: 1.0}),
        SamplingParams(top_k=3),
        SamplingParams(min_tokens=8),
    ):
        with pytest.raises(InvalidRequest):
            Request(prompt=[1], params=params).check(vocab_size=2, max_len=8)
