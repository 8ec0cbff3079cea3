"""Models for scripts: prompts in, texts out; how many pages there are."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxscale.inference import (
    LLM,
    EngineConfig,
    InvalidRequest,
    SamplingParams,
    generate,
)
from jaxscale.inference.engine import memory, programs, runner
from jaxscale.inference.engine.kv_scales import check_scales, measure_kv_scales
from jaxscale.inference.engine.memory import fit
from jaxscale.inference.engine.runner import Runner
from jaxscale.models import Decoder, Tokenizer, load, preset, save
from jaxscale.models.generation import GenerationConfig
from jaxscale.nn import RopeScaling
from jaxscale.sharding import create, fsdp_tp, make_mesh
from tests.decoding import decode
from tests.models.test_adapters import ADAPTERS, base_of


TEXT = ["to be or not to be, that is the question"] * 4
SIZES = EngineConfig(
    num_slots=2, buckets=(2,), prefill_tokens=(16,), page_size=8, max_len=64, steps=1
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    config = dataclasses.replace(preset("llama_tiny"), vocab_size=289)
    save(Decoder(config, rngs=nnx.Rngs(0)), path)
    Tokenizer.train(TEXT, vocab_size=280).save(path)
    GenerationConfig(eos_ids=(281, 282)).save(path)
    return path


@pytest.fixture(scope="module")
def llm(directory):
    with LLM.from_pretrained(directory, config=SIZES, quiet=True) as llm:
        yield llm


def test_texts_and_ids(llm):
    texts = ["to be", "or not", "that is the question"]
    found = llm.generate(texts, GREEDY)
    ids = [llm.tokenizer.encode(text) for text in texts]
    assert [r.tokens for r in llm.generate(ids, GREEDY)] == [r.tokens for r in found]
    for text, result in zip(texts, found, strict=True):
        assert list(result.prompt) == llm.tokenizer.encode(text)
        known = [t for t in result.tokens if t < llm.tokenizer.vocab_size]
        ends = result.continuations[0].finish == "stop"
        expected = llm.tokenizer.continuation(result.prompt, known[: -1 if ends else 6])
        assert result.text == expected
    (single,) = llm.generate("to be", GREEDY)
    assert single.tokens == found[0].tokens
    assert llm.generate([], GREEDY) == []


def test_texts_begin_as_the_tokenizer_says(llm, monkeypatch):
    tokenizer = Tokenizer.train(TEXT, 280, special_tokens=("<s>", "</s>"))
    monkeypatch.setattr(llm, "tokenizer", tokenizer)
    (result,) = llm.generate("to be", GREEDY)
    assert list(result.prompt) == [tokenizer.bos_id, *tokenizer.encode("to be")]


def test_adapters_of_peft():
    """The first token of each prompt, of both adapters and of none in one batch."""
    prompts = safetensors.numpy.load_file(
        base_of("llama3_gqa") / "expected.safetensors"
    )
    names = {"a": "llama3_gqa", "b": "llama3_patterns"}
    logits = {None: prompts} | {
        name: safetensors.numpy.load_file(ADAPTERS / of / "expected.safetensors")
        for name, of in names.items()
    }
    modules = {name: ADAPTERS / of for name, of in names.items()}
    chosen = [(i, name) for i in range(4) for name in logits]
    texts = [prompts[f"ids.{i}"].tolist() for i, _ in chosen]
    lora = [name for _, name in chosen]
    one = SamplingParams(temperature=0.0, max_tokens=1)
    model = load(base_of("llama3_gqa"))
    with LLM(model, lora_modules=modules, config=SIZES, quiet=True) as llm:
        found = llm.generate(texts, one, lora=lora)
        for (i, name), result in zip(chosen, found, strict=True):
            assert result.tokens == (logits[name][f"logits.{i}"][-1].argmax(),)
        (single,) = llm.generate([[3, 4]], one, lora="b")
        assert single.tokens == llm.generate([[3, 4]], one, lora=["b"])[0].tokens
        with pytest.raises(ValueError, match="1 lora for 2 prompts"):
            llm.generate([[3], [4]], one, lora=["a"])
        with pytest.raises(InvalidRequest, match="lora 'c' is no adapter of the model"):
            llm.generate([[3]], one, lora="c")


def test_conversations(llm):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    user = [{"role": "user", "content": "to be"}]
    begun = [*user, {"role": "assistant", "content": "or"}]
    first, second = llm.chat([user, begun], GREEDY, chat_template=template)
    (alone,) = llm.chat(user, GREEDY, chat_template=template)
    assert alone.tokens == first.tokens
    assert llm.tokenizer.decode(second.prompt) == "user: to be;assistant: or;"
    options = {"chat_template": template, "continue_final_message": True}
    (goes_on,) = llm.chat(begun, GREEDY, **options)
    assert llm.tokenizer.decode(goes_on.prompt) == "user: to be;assistant: or"
    with pytest.raises(ValueError, match="has no chat_template"):
        llm.chat(user)


def test_log_probabilities_of_prompts_are_those_of_the_model(llm, directory):
    """As lm-eval asks for them, in chunks and beside others."""
    prompts = [list(range(3, 40)), [7, 7, 9]]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    model = load(directory)
    for result in llm.generate([*prompts, prompts[0]], params):
        logits = np.asarray(model(jnp.asarray([result.prompt]))[0], np.float64)
        whole = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        first, *found = result.continuations[0].prompt_logprobs
        assert first is None and [x.token for x in found] == list(result.prompt[1:])
        wanted = whole[np.arange(len(found)), list(result.prompt[1:])]
        np.testing.assert_allclose([x.logprob for x in found], wanted, atol=1e-4)
        assert result.tokens == ()


@pytest.mark.exhaustive  # the engine and the command serve from four on every push
def test_four_devices(directory, llm):
    """They split a vocabulary that does not divide."""
    mesh = make_mesh({"tensor": 4}, jax.devices()[:4])
    drawn = SamplingParams(seed=3, temperature=2.0, top_p=0.999, logprobs=20, n=2)
    prompts, params = ["to be", "or not"], [GREEDY, drawn]
    with LLM.from_pretrained(directory, mesh=mesh, config=SIZES, quiet=True) as split:
        assert split.engine.runner.model_config.vocab_size == 289
        found = split.generate(prompts, params)
        # As many key/value heads as devices, each with a page's part of its own.
        shards = split.engine.runner.pages.kv.addressable_shards
        assert [shard.data.shape[3] for shard in shards] == [1] * 4
    for a, b in zip(found, llm.generate(prompts, params), strict=True):
        assert a.continuations.keys() == b.continuations.keys()
        for x, y in zip(
            a.continuations.values(), b.continuations.values(), strict=True
        ):
            assert x.tokens == y.tokens
            for p, q in zip(x.logprobs or (), y.logprobs or (), strict=True):
                assert p.logprob == pytest.approx(q.logprob, abs=1e-4)
                assert all(t < 289 for t, _ in p.top)


def test_ends_of_the_directory_count(llm):
    ends = {llm.tokenizer.eos_id, 281, 282}
    assert set(llm.engine.scheduler.config.eos_ids) == ends
    params = SamplingParams(logit_bias={282: 100}, max_tokens=5)
    (result,) = llm.generate([[1]], params)
    assert result.tokens == (282,)
    assert result.continuations[0].stop == 282


def test_more_prompts_than_rows_each_with_its_settings(llm):
    params = [SamplingParams(seed=i, n=1 + i % 2, max_tokens=1 + i) for i in range(7)]
    llm.engine.scheduler.config, before = (
        dataclasses.replace(llm.engine.scheduler.config, max_waiting=2),
        llm.engine.scheduler.config,
    )
    results = llm.generate([[1, 2]] * 7, params)
    llm.engine.scheduler.config = before
    for i, result in enumerate(results):
        assert sorted(result.continuations) == list(range(1 + i % 2))
        for output in result.continuations.values():
            assert len(output.tokens) == 1 + i or output.finish == "stop"


def test_what_cannot_be_served_is_refused_before_anything_runs(llm):
    before = llm.engine.scheduler.counts.received
    with pytest.raises(InvalidRequest, match="outside the vocabulary of 289"):
        llm.generate([[1], [300]], GREEDY)
    with pytest.raises(ValueError, match="2 params for 1 prompts"):
        llm.generate([[1]], [GREEDY, GREEDY])
    assert llm.engine.scheduler.counts.received == before


def test_requests_end_where_dynamic_rotary_scaling_begins():
    dynamic = RopeScaling(
        kind="dynamic", factor=2.0, original_max_position_embeddings=32
    )
    limited = dataclasses.replace(preset("llama_tiny"), rope_scaling=dynamic)
    default = EngineConfig().scheduler(limited, (), on_cpu=True)
    assert default.max_len == 32
    message = r"max_len 33 exceeds 32, .* original length of dynamic rotary scaling"
    with pytest.raises(ValueError, match=message):
        EngineConfig(max_len=33).scheduler(limited, (), on_cpu=True)
    # Nor does the engine start with sizes that were made without the model.
    longer = dataclasses.replace(default, max_len=33)
    with pytest.raises(ValueError, match=message):
        Runner(Decoder(limited, rngs=nnx.Rngs(0)), longer)


def test_keys_and_values_in_fp8(directory, llm):
    """Scales are measured, and what the model says stays about the same."""
    config = dataclasses.replace(SIZES, kv_dtype="fp8")
    params = dataclasses.replace(GREEDY, logprobs=0, prompt_logprobs=0)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3]]
    with LLM.from_pretrained(directory, config=config, quiet=True) as narrow:
        found = narrow.generate(prompts, params)
        scales = np.asarray(narrow.engine.runner.pages.scales)
    for a, b in zip(found, llm.generate(prompts, params), strict=True):
        (a,), (b,) = a.continuations.values(), b.continuations.values()
        for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
            np.testing.assert_allclose(x.logprob, y.logprob, atol=0.05)
        np.testing.assert_allclose(a.logprobs[0].logprob, b.logprobs[0].logprob,
                                   atol=0.05)  # fmt: skip
    # Powers of two that leave room for twice the largest.
    assert (np.frexp(scales)[0] == 0.5).all() and (scales < 1).all()
    with pytest.raises(ValueError, match="kv_scales are for kv_dtype 'fp8'"):
        LLM.from_pretrained(directory, config=SIZES, kv_scales=scales[:, 0])


def test_weights_of_8_bits(directory, llm):
    """The engine says what the model says, in half of the memory and less."""
    params = dataclasses.replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    prompt = [5, 6, 7, 8, 9, 10, 11]
    options = {"config": SIZES, "quiet": True, "quantization": "int8"}
    with LLM.from_pretrained(directory, **options) as narrow:
        (found,) = narrow.generate([prompt], params)
        sizes = [sum(p.nbytes for p in x.engine.runner.params) for x in (narrow, llm)]
    model = load(directory, quantization="int8")
    expected = jax.nn.log_softmax(model(jnp.array([prompt]))[0])
    (output,) = found.continuations.values()
    assert output.tokens == (int(expected[-1].argmax()),)
    for i, entry in enumerate(output.prompt_logprobs[1:]):
        np.testing.assert_allclose(entry.logprob, expected[i, prompt[i + 1]], atol=1e-5)
    table = 289 * 32 * 4
    assert sizes[0] - table < 0.4 * (sizes[1] - table)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (np.ones((2, 2)), r"shape \(2, 2\), expected \[L, 2, K\] = \(2, 2, 2\)"),
        (np.full((2, 2, 2), -1.0), "must be positive and finite, got -1.0"),
        (np.full((2, 2, 2), np.nan), "must be positive and finite, got nan"),
    ],
)
def test_scales_that_do_not_fit_are_refused(scales, message):
    with pytest.raises(ValueError, match=message):
        check_scales(preset("llama_tiny"), scales)


def test_scales_hold_twice_the_largest_key_and_value():
    model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))
    tokens = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    scales = measure_kv_scales(model, tokens)
    pages = [decode(model.for_inference(), jnp.asarray(t)[None], 3)[1] for t in tokens]
    largest = jnp.nan_to_num(jnp.abs(jnp.concatenate(pages, 1))).max((1, 4, 5))
    assert (largest * 2 <= 448 * scales).all()
    assert (largest * 4 > 448 * scales).all()
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2])
    make = lambda: Decoder(preset("llama_tiny"), rules=fsdp_tp(), rngs=nnx.Rngs(0))  # noqa: E731
    sharded = create(make, mesh, fsdp_tp())
    np.testing.assert_array_equal(measure_kv_scales(sharded, tokens), scales)
    value = sharded.blocks.attention.value.kernel
    value[...] = value[...].at[1, :, :8].set(0)  # a head that is always zero
    scales[1, 1, 0] = 1
    np.testing.assert_array_equal(measure_kv_scales(sharded, tokens), scales)
    model.blocks.attention.key.kernel[...] *= jnp.nan
    with pytest.raises(ValueError, match="not finite, so that they have no scale"):
        measure_kv_scales(model, tokens)


def test_pages_fill_the_memory(llm):
    model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0)).for_inference()
    options = EngineConfig(num_slots=2, page_size=16, max_len=128)
    config = options.scheduler(model.config, (), on_cpu=True)
    sizes, memory = fit(model, config, options)
    assert sizes.num_pages == 2 * 8  # no more than all slots can use
    assert memory.weights == sum(p.nbytes for p in jax.tree.leaves(model))
    c = model.config
    assert memory.page == 4 * 16 * c.num_layers * 2 * c.num_kv_heads * c.head_dim
    said = str(memory)
    assert "16 pages (256 tokens)" in said
    with pytest.raises(ValueError, match=r"do not fit into .* device; lower max_len"):
        fit(model, config, dataclasses.replace(options, memory_fraction=1e-6))
    with pytest.raises(ValueError, match="max_len 100 exceeds 64"):
        limited = dataclasses.replace(preset("gpt2_tiny"), max_seq_len=64)
        EngineConfig(max_len=100).scheduler(limited, (), on_cpu=True)
    _, narrow = fit(model, config, dataclasses.replace(options, kv_dtype="fp8"))
    # A byte a number, and a scale for those of a head.
    assert narrow.page == (16 * c.head_dim + 4) * c.num_layers * 2 * c.num_kv_heads
    for wrong in (
        {"memory_fraction": 1.5},
        {"page_size": 0},
        {"num_slots": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            EngineConfig(**wrong)
    assert np.isfinite(memory.computation)


@pytest.mark.parametrize(
    ("share", "fraction", "expected"),
    [
        ("0.95", 0.9, 0.9),  # of the whole GPU
        ("0.95", 0.3, 0.3),
        ("0.95", 0.95, 0.9025),
        ("0.4", 0.9, 0.38),
        ("", 0.9, 0.7125),
        ("", 0.5, 0.5),
    ],
)
def test_a_fraction_is_one_of_the_whole_gpu(
    share, fraction, expected, monkeypatch, caplog
):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    whole = 140 << 30
    limit = int(whole * float(share or 0.75))
    found = memory.usable(limit, fraction, given=False)
    assert found == pytest.approx(expected * whole) and not caplog.text
    assert memory.usable(limit, fraction, given=True) == found
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION" if share else "XLA_CLIENT_MEM_FRACTION"
    said = f"Set {name}=0.95 before"
    assert (said in caplog.text) == (expected < fraction)


def test_a_server_reserves_its_gpus_unless_told_otherwise():
    code = """
import os, jax
from jaxscale.inference.engine import device_share
device_share._smallest_gpu = lambda: 13 * 10**9
reserve = device_share.reserve_for_serving
old, new = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
said = []
for given in ({old: "0.5"}, {new: "0.5"}, {}):
    os.environ |= given
    reserve()
    said.append((os.environ.pop(old, None), os.environ.pop(new, None)))
assert said == [("0.5", None), (None, "0.5"), (None, "0.9")], said
assert jax.device_count() == 1  # as before
reserve()
assert new not in os.environ
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("gathers", [True, False])
def test_gathered_keys_have_room_and_no_tails_where_attention_gathers(
    gathers, monkeypatch
):
    for module in (memory, runner):
        monkeypatch.setattr(module, "gathers_pages", lambda *_: gathers)
    cleared = []
    clear = programs.clear_tails
    monkeypatch.setattr(
        programs, "clear_tails", lambda *x: cleared.append(1) or clear(*x)
    )
    model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0)).for_inference()
    options = EngineConfig(num_slots=2, page_size=16, max_len=128)
    config = options.scheduler(model.config, (), on_cpu=True)
    few, many = (
        fit(model, dataclasses.replace(config, prefill_keys=keys), options)[1]
        for keys in (2**14, 2**15)
    )
    assert (few.computation < many.computation) is gathers
    made = runner.Runner(model, config)
    _, program, shapes = next(p for p in made.programs() if p[0][0] == "prefill")
    program.trace(*shapes)
    assert bool(cleared) is not gathers


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (
            [1, 2, 3],
            r"prompts\[0\] is 1, expected a sequence of token ids; pass a list",
        ),
        (["hi"], r"prompts are texts, expected token ids; .* LLM.from_pretrained"),
        ("hi", "prompts are texts, expected token ids"),
        (np.arange(3), r"prompts\[0\] is .*0.*, expected a sequence of token ids"),
    ],
)
def test_prompts_that_are_no_lists_of_ids(prompts, message, no_shape_hook):
    model = jax.eval_shape(lambda: Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=message):
        generate(model, prompts, max_new_tokens=2)


def test_a_prompt_that_is_a_number(llm, no_shape_hook):
    with pytest.raises(TypeError, match=r"prompts\[0\] is 1, expected a sequence"):
        llm.generate([1, 2, 3])
