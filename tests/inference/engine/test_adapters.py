"""Requests for several adapters in one batch, against models with merged weights."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxscale.inference.engine.runner import Runner
from jaxscale.inference.request import InvalidRequest
from jaxscale.models.adapters import adapter_of, with_adapters
from jaxscale.sharding import make_mesh
from tests.inference.conftest import LLAMA, SIZES, Greedy, Served
from tests.models.test_adapters import trained
from tests.tiers import exhaustive


RNG = np.random.default_rng(0)
LORAS = (None, "all", "some")
DRAFTS = dataclasses.replace(
    SIZES, drafts=3, draft_bucket=2, shortest_ngram=1, longest_ngram=3
)


def prompt(length):
    return RNG.integers(0, 256, length).tolist()


def adapt(model):
    """Of other ranks, for other layers."""
    some = ("value", "*.out", "gate")
    return {"all": trained(model, 1, 3), "some": trained(model, 2, 2, some)}


@pytest.fixture(scope="module")
def served():
    return Served(LLAMA, sizes=DRAFTS, adapt=adapt)


@pytest.fixture(scope="module")
def split():
    """Over four devices, of which two share a key/value head."""
    mesh = make_mesh({"tensor": 4}, jax.devices()[:4])
    return Served(LLAMA, mesh=mesh, adapt=adapt, kind=Greedy)


def without_logprobs(name):
    """Those would need the full sampler, which `Greedy` does not compile."""
    return {"logprobs": None} if name == "split" else {}


@pytest.mark.parametrize("name", ["served", *exhaustive("split")])
def test_tokens_are_those_of_merged_weights(name, request):
    """Of prompts that are alike, in chunks and together, and of others that join."""
    served = request.getfixturevalue(name)
    run, options = served.run(poison=True), without_logprobs(name)
    same, longer = prompt(7), prompt(21)
    for lora in LORAS:
        run.add(f"{lora} same", same, lora=lora, max_tokens=9, **options)
    for lora in LORAS[1:]:
        run.add(f"{lora} longer", longer, lora=lora, max_tokens=6, **options)
    run.finish()
    found = set()
    for each, text in (("same", same), ("longer", longer)):
        for lora in LORAS:
            if f"{lora} {each}" not in run.told:
                continue
            tokens, logprobs, _ = run.result(f"{lora} {each}")
            found.add(tuple(tokens))
            if logprobs:
                run.check(f"{lora} {each}", text, lora=lora)
            whole = served.logits((*text, *tokens), lora)[len(text) - 1 : -1]
            at = np.take_along_axis(whole, np.array(tokens)[:, None], axis=1)[:, 0]
            assert (at > whole.max(axis=1) - 1e-4).all()
    assert len(found) == 5  # the adapters change what is said


def test_pages_are_never_those_of_another_adapter(served):
    run, text = served.run(), prompt(37)
    for name, lora in (("base", None), ("all", "all"), ("some", "some")):
        run.add(name, text, lora=lora, max_tokens=4)
        run.finish()
        assert run.told[name][0][0].cached_tokens == 0
        run.check(name, text, lora=lora)
    for name, lora in (("base 2", None), ("all 2", "all"), ("some 2", "some")):
        run.add(name, text, lora=lora, max_tokens=4)
        run.finish()
        assert run.told[name][0][0].cached_tokens == 36
        assert run.result(name) == run.result(name.removesuffix(" 2"))


def test_drafts(served):
    """What repeats itself is guessed, and is what it was without guesses."""
    text, results = [7, 8, 9] * 6, []
    for drafts in (0, 3):
        run = served.run(sizes=dataclasses.replace(served.sizes, drafts=drafts))
        for lora in LORAS[1:]:
            settings = {"logprobs": None, "max_tokens": 20, "lora": lora}
            run.add(f"{lora}", text, **settings)
        run.finish()
        results.append([run.result(lora) for lora in LORAS[1:]])
        assert (run.scheduler.counts.drafted_tokens > 0) == (drafts > 0)
    assert results[0] == results[1]


def test_preemption_samples_and_scores(served, short_answers):
    """Pages are short, rows move, and each request goes on with its own adapter."""
    text = prompt(9)
    sizes = dataclasses.replace(served.sizes, num_pages=16)
    run = served.run(sizes=sizes, poison=True)
    for i, lora in enumerate((*LORAS, "all")):
        run.add(f"{i}", text, lora=lora, max_tokens=24 - 4 * i)
    run.finish()
    assert run.scheduler.counts.preempted > 0
    for i, lora in enumerate((*LORAS, "all")):
        run.check(f"{i}", text, lora=lora)
    run = served.run()
    warm = {"temperature": 1.0, "seed": 3, "max_tokens": 6}
    run.add("n", text, lora="all", n=2, prompt_logprobs=1, **warm)
    run.add("one", text, lora="all", **warm)
    run.finish()
    assert run.result("n")[0] == run.result("one")[0] != run.result("n", index=1)[0]
    scores = [x for news in run.told["n"] for o in news for x in o.prompt_logprobs]
    expected = served.logprobs(text, "all")
    for i, score in enumerate(scores[1 : len(text)]):
        np.testing.assert_allclose(score.logprob, expected[i][text[i + 1]], atol=1e-4)


def test_batches_without_adapters_run_the_same_programs(served):
    called = []
    run = served.run()
    run.engine.runner.on_dispatch = lambda key, _: called.append(key[0])
    try:
        run.add("base", prompt(5), max_tokens=4)
        run.finish()
        assert not [name for name in called if name.endswith("_lora")]
        run.add("all", prompt(5), lora="all", max_tokens=4, logprobs=None)
        run.add("base 2", prompt(5), max_tokens=4, logprobs=None)
        run.finish()
        assert {"prefill_lora", "decode_lora"} <= {*called} | {
            name.replace("speculate", "decode") for name in called
        }
    finally:
        run.engine.runner.on_dispatch = None
    sizes = dataclasses.replace(SIZES, prefill_tokens=16)
    options = {"prefill_tokens": (16,), "buckets": (4,)}
    plain = Runner(served.model, sizes, **options)
    adapted = with_adapters(
        served.model, {"it": adapter_of(trained(served.model, 1, 2))}
    )
    other = Runner(adapted, dataclasses.replace(sizes, adapters=("it",)), **options)
    texts = [
        {
            key: fn.trace(*shapes).lower().as_text()
            for key, fn, shapes in runner.programs()
            if key[0] in ("decode", "forward", "prefill") and key[-1] is not True
        }
        for runner in (plain, other)
    ]
    assert len(texts[0]) == 4 and texts[0] == texts[1]


def test_names_that_are_unknown(served, llama):
    run = served.run()
    with pytest.raises(InvalidRequest, match="lora 'other' is no adapter of the model, "
                       "which has all, some"):  # fmt: skip
        run.add("a", [1], lora="other")
    with pytest.raises(InvalidRequest, match=r"lora 'all' .* which has none"):
        llama.run().add("a", [1], lora="all")
    with pytest.raises(
        ValueError, match=r"adapters of config are \['a'\], but the mod"
    ):
        Runner(llama.model, dataclasses.replace(SIZES, adapters=("a",)))
