"""Generation against the whole sequence through the model for every token."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale.inference import SamplingParams, generate
from jaxscale.models import Decoder, preset
from jaxscale.sharding import MeshConfig, create, fsdp_tp, make_mesh
from tests.tiers import exhaustive


pytestmark = pytest.mark.usefixtures("compile_once")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [200], [3, 1, 4, 1, 5]]
SAMPLED = SamplingParams(temperature=0.9, top_k=40)


def make(name, **options):
    model = Decoder(preset(name), rngs=nnx.Rngs(0), **options)
    # At their initial size the blocks hardly change the token that goes in.
    model.blocks = jax.tree.map(lambda p: 12 * p if p.ndim == 3 else p, model.blocks)
    return model


@pytest.fixture(scope="module")
def llama():
    return make("llama_tiny")


@jax.jit
def most_likely(model, tokens):
    return model(tokens).argmax(-1)


def greedy_without_cache(model, prompt, num):
    """The whole sequence through the model for every token."""
    sequence = list(prompt)
    for _ in range(num):
        row = np.zeros((1, 24), np.int32)
        row[0, : len(sequence)] = sequence
        sequence.append(int(most_likely(model, row)[0, len(sequence) - 1]))
    return sequence[len(prompt) :]


def test_greedy_equals_the_whole_sequence_through_the_model(llama):
    expected = [greedy_without_cache(llama, prompt, 10) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 5
    assert generate(llama, PROMPTS, max_new_tokens=10) == expected


def test_a_continuation_ends_before_the_end_token(llama):
    whole = generate(llama, PROMPTS, max_new_tokens=10)
    eos_id = whole[0][4]
    expected = [
        tokens[: tokens.index(eos_id)] if eos_id in tokens else tokens
        for tokens in whole
    ]
    assert len(expected[0]) <= 4
    # Several tokens, of which any ends a row.
    others = [whole[1][2], whole[2][3]]
    ends = [eos_id, *others]
    cut = [next((i for i, t in enumerate(row) if t in ends), 10) for row in whole]
    expected_any = [row[:i] for row, i in zip(whole, cut, strict=True)]
    assert generate(llama, PROMPTS, max_new_tokens=10, eos_id=ends) == expected_any
    assert generate(llama, PROMPTS, max_new_tokens=10, eos_id=eos_id) == expected


def test_sampling_is_a_function_of_the_seed(llama):
    def run(seed):
        sampling = dataclasses.replace(SAMPLED, seed=seed)
        return generate(llama, [[7]] * 3, max_new_tokens=10, sampling=sampling)

    first = run(0)
    assert len({tuple(tokens) for tokens in first}) == 3  # each has its own
    assert run(1)[:2] == first[1:]


@pytest.mark.parametrize("kind", ["auto", *exhaustive("explicit")])
def test_a_sharded_model_generates_the_same_tokens(llama, kind):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2, axis_type=kind))
    rules = fsdp_tp()
    sharded = create(lambda: make("llama_tiny", rules=rules), mesh, rules)
    expected = [greedy_without_cache(llama, prompt, 10) for prompt in PROMPTS]
    assert generate(sharded, PROMPTS, max_new_tokens=10) == expected


def test_a_prompt_may_fill_the_table_of_learned_positions():
    model = make("gpt2_tiny")  # 64 positions
    prompts = [list(range(60)), [1, 2]]
    found = generate(model, prompts, max_new_tokens=4)
    assert [len(tokens) for tokens in found] == [4, 4]
    with pytest.raises(ValueError, match=r"max_len 65 exceeds 64, the longest"):
        generate(model, [list(range(61))], max_new_tokens=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1], []]}, r"prompt is empty; begin it with a token"),
        ({"prompts": [[1, 256]]}, r"prompt holds the token 256, outside the vo"),
        ({"prompts": [[-1]]}, r"prompt holds -1, which is no token id"),
        ({"max_new_tokens": -1}, "max_tokens -1 must be an integer of at least 0"),
        ({"eos_id": 300}, r"eos_ids \(300,\) must be tokens of the vocabulary of 256"),
    ],
)
def test_impossible_requests_are_refused(llama, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(llama, **{"prompts": [[1]], "max_new_tokens": 3} | arguments)


def test_logits_that_are_not_finite_are_an_error():
    model = make("llama_tiny")
    model.embed.table[...] = model.embed.table[...].at[:].set(np.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        generate(model, PROMPTS, max_new_tokens=3)


def test_no_prompts_give_no_continuations(llama):
    assert generate(llama, [], max_new_tokens=3) == []
