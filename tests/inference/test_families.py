"""Every family of decoders through the whole engine, against transformers."""

import queue

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.inference import Engine, Request, SamplingParams
from jaxscale.inference.engine.scheduling.scheduler import Scheduler
from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.models import load
from tests.inference.conftest import Greedy
from tests.models.test_hf import MODELS, expected, forward, padded
from tests.tiers import first


# Gemma 1 has nothing that Gemma 2 lacks; its logits through pages are in `test_hf`.
FAMILIES = (
    *("gpt2", "gptj", "neox", "llama3_gqa", "mistral", "qwen2", "qwen3_windows"),
    *("gemma2", "gemma3"),
)
NEW = 5
SIZES = SchedulerConfig(
    num_pages=40,
    vocab_size=128,
    max_len=40,
    page_size=4,
    num_slots=4,
    prefill_tokens=16,
    prefill_requests=2,
    split=8,
    steps=1,
)


@pytest.mark.parametrize(
    "name", first(FAMILIES, "gemma3", "gpt2", "gptj", "llama3_gqa")
)
def test_tokens_are_those_of_the_family(name):
    """Prompts in chunks, side by side, then token by token."""
    ids, logits = expected(name)
    assert len(ids[3]) == SIZES.max_len
    prompts = [prompt.tolist() for prompt in (*ids[:3], ids[3][:-NEW])]
    model = load(MODELS / name, dtype=jnp.float32)
    runner = Greedy(model, SIZES, prefill_tokens=(16,), buckets=(4,))
    runner.compile()
    engine, told = Engine(runner, Scheduler(SIZES)), queue.SimpleQueue()
    params = SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=0)
    for i, prompt in enumerate(prompts):
        engine.admit(Request(prompt=prompt, params=params, id=str(i)), told.put)
    engine.step()
    while not engine.idle:
        engine.step()
    tokens, logprobs = [[] for _ in prompts], [[] for _ in prompts]
    while not told.empty():
        for output in told.get():
            tokens[int(output.request)] += output.tokens
            logprobs[int(output.request)] += [x.logprob for x in output.logprobs]
    rows = [prompt + drawn for prompt, drawn in zip(prompts, tokens, strict=True)]
    whole = np.asarray(forward(model, padded([np.array(row) for row in rows])))
    for i, prompt in enumerate(prompts):
        at = slice(len(prompt) - 1, len(prompt) - 1 + NEW)
        scores = whole[i, at].astype(np.float64)
        assert tokens[i] == scores.argmax(-1).tolist()
        scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
        np.testing.assert_allclose(logprobs[i], scores.max(-1), atol=1e-4)
        # The first follows the prompt, of which transformers' logits are known.
        last = logits[i][len(prompt) - 1].astype(np.float64)
        assert tokens[i][0] == last.argmax()
        last -= np.log(np.exp(last).sum())
        np.testing.assert_allclose(logprobs[i][0], last.max(), atol=1e-4)
