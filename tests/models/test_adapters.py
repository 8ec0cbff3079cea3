"""Adapters that are served together: the numbers of peft, and of merged weights.

The fixtures come from ``tests/fixtures/make_adapters.py``.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxscale.models import Decoder, load, preset, quantize
from jaxscale.models.adapters import (
    Adapter,
    adapter_names,
    adapter_of,
    checkpoint_config,
    use_adapters,
    with_adapters,
)
from jaxscale.models.hf.peft import read_peft
from jaxscale.nn import LoraConfig, add_adapters, merge_adapters
from jaxscale.nn.quantized_linear import QuantizedLinear
from jaxscale.pruning import PruneConfig
from jaxscale.sharding import create, fsdp_tp, make_mesh
from tests.models.test_serving import perturbed
from tests.pruning.test_convert import pruned


FIXTURES = Path(__file__).parents[1] / "fixtures"
ADAPTERS = FIXTURES / "adapters"
MODELS = {"llama3_patterns": "llama3_gqa"}


def base_of(name):
    return FIXTURES / "models" / MODELS.get(name, name)


def trained(model, seed, rank, layers=("*",)):
    """`model` with adapters that do something."""
    adapted = add_adapters(model, LoraConfig(rank=rank, layers=layers), seed=seed)
    rng = np.random.default_rng(seed)
    for path, leaf in nnx.iter_graph(adapted):
        if path[-2:] == ("low_rank", "b"):
            leaf[...] = jnp.asarray(0.1 * rng.standard_normal(leaf.shape), leaf.dtype)
    return adapted


@pytest.mark.parametrize("name", ["llama3_gqa", "llama3_patterns", "gpt2", "neox"])
def test_logits_are_those_of_peft(name):
    """Of each prompt, in a batch in which another row uses no adapter."""
    model = load(base_of(name))
    adapters = {"other": adapter_of(trained(model, 1, 5)), "it": None}
    adapters["it"] = read_peft(ADAPTERS / name, model.config)
    served = with_adapters(model, adapters)
    assert adapter_names(served) == ("other", "it")
    prompts = safetensors.numpy.load_file(base_of(name) / "expected.safetensors")
    expected = safetensors.numpy.load_file(ADAPTERS / name / "expected.safetensors")
    for i in range(len(expected)):
        ids = prompts[f"ids.{i}"].astype(np.int32)
        rows = np.stack([ids, ids])
        index = jnp.array([[2] * len(ids), [0] * len(ids)])
        found = np.asarray(use_and_run(served, rows, index))
        np.testing.assert_allclose(found[0], expected[f"logits.{i}"], atol=1e-4)
        np.testing.assert_allclose(found[1], prompts[f"logits.{i}"], atol=1e-4)
        assert np.abs(found[0] - found[1]).max() > 0.1


def test_scale_and_order_of_factors():
    """``W + s B A``, straight from the files."""
    name = "llama3_patterns"
    adapter = read_peft(ADAPTERS / name, load(base_of(name)).config)
    tensors = safetensors.numpy.load_file(ADAPTERS / name / "adapter_model.safetensors")
    scales = {  # alpha / sqrt(r), with patterns of both
        ("attention.query", 0): ("self_attn.q_proj", 5 / 4**0.5),
        ("attention.query", 1): ("self_attn.q_proj", 5 / 2**0.5),
        ("mlp.down", 1): ("mlp.down_proj", 9 / 4**0.5),
    }
    for (ours, layer), (theirs, scale) in scales.items():
        module = f"base_model.model.model.layers.{layer}.{theirs}"
        a, b = (tensors[f"{module}.lora_{x}.weight"] for x in "AB")
        down, up = (x[layer] for x in adapter.factors[ours])
        np.testing.assert_allclose((down @ up).T, scale * b @ a, atol=1e-6)
    assert sorted(adapter.factors) == ["attention.query", "mlp.down"]


@pytest.mark.parametrize("devices", [1, 4])
def test_tokens_use_their_own_adapter(devices):
    """Within a row too; on four devices two share a key/value head."""
    make = lambda **x: perturbed(Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0), **x))  # noqa: E731
    model = make()
    adapted = [trained(model, 1, 3), trained(model, 2, 2, ("value", "*.out", "gate"))]
    base = model
    if devices > 1:
        mesh = make_mesh({"tensor": devices}, jax.devices()[:devices])
        base = create(lambda: make(rules=fsdp_tp()), mesh, fsdp_tp())
    adapters = {str(i): adapter_of(each) for i, each in enumerate(adapted)}
    served = with_adapters(base, adapters)
    assert checkpoint_config(served) == model.config == checkpoint_config(model)
    tokens = np.random.default_rng(0).integers(0, 256, (3, 6), np.int32)
    rows = np.repeat(np.array([[0], [1], [2]], np.int32), 6, axis=1)
    found = np.asarray(use_and_run(served, tokens, rows))
    whole = [model, *(merge_adapters(each) for each in adapted)]
    for row, one in enumerate(whole):
        expected = run(one, tokens[row : row + 1])[0]
        np.testing.assert_allclose(found[row], expected, atol=1e-4)
    # A token sees what those before it have computed, by whatever adapter.
    mixed = np.array([[2, 2, 1, 1, 0, 0]], np.int32)
    found = np.asarray(use_and_run(served, tokens[:1], mixed))
    alone = np.asarray(run(whole[2], tokens[:1]))[0, :2]
    np.testing.assert_allclose(found[0, :2], alone, atol=1e-4)


@jax.jit
def run(model, tokens):
    return model(tokens)


@jax.jit
def use_and_run(model, tokens, index):
    return use_adapters(model, index)(tokens)


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_weights_of_8_bits(weights):
    """As dense weights that are as round."""
    model = perturbed(Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0)))
    adapter = adapter_of(trained(model, 3, 4))
    quantized = quantize(model, weights)
    dense = model.for_inference()
    dense = jax.tree.map(lambda p: p, dense)
    for (_, one), (_, other) in zip(
        nnx.iter_modules(dense.blocks), nnx.iter_modules(quantized.blocks), strict=True
    ):
        if isinstance(other, QuantizedLinear):
            kernel = other.kernel[...].astype(jnp.float32) * other.scale[...][:, None]
            one.kernel.set_value(kernel.T[:, : other.features])
    quantized.lm_head = nnx.data(dense.lm_head)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 5), np.int32)
    index = np.array([[1] * 5, [0] * 5], np.int32)
    found, expected = (
        np.asarray(use_and_run(with_adapters(each, {"it": adapter}), tokens, index))
        for each in (quantized, dense)
    )
    np.testing.assert_allclose(found, expected, atol=1e-3)
    without = np.asarray(run(quantized, tokens))
    np.testing.assert_allclose(found[1], without[1], atol=1e-5)
    assert np.abs(found[0] - without[0]).max() > 0.1


def test_adapters_that_do_not_fit():
    model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))
    a, b = np.ones((2, 32, 1), np.float32), np.ones((2, 1, 32), np.float32)
    infinite = a.copy()
    infinite[1, 3] = np.inf
    for factors, message in (
        ({}, "adapter 'it' is for no layer"),
        ({"mlp.over": (a, b)}, r"for the layer mlp\.over, which the model lacks; its "),
        (
            {"attention.query": (a[:1], b[:1])},
            r"\[1, 32, 32\] for attention\.query, but",
        ),
        ({"attention.key": (a, b)}, r"but the model \[2, 32, 16\]; it was trained on"),
        ({"attention.query": (infinite, b)}, "attention.query that is NaN or infinite"),
    ):
        with pytest.raises(ValueError, match=message):
            with_adapters(model, {"it": Adapter(factors=factors)})
    query = {"it": Adapter(factors={"attention.query": (a, b)})}
    *_, sparse = pruned(model, PruneConfig(sparsity=0.5, tile=8), separate=True)
    with pytest.raises(ValueError, match="pruning has made a TileSparseLinear; serve"):
        with_adapters(sparse, query)
    assert adapter_names(with_adapters(with_adapters(model, query), {})) == ()


@pytest.fixture
def copy(tmp_path):
    """An adapter that a test may change."""
    return Path(shutil.copytree(ADAPTERS / "llama3_gqa", tmp_path / "adapter"))


CONFIG = "adapter_config.json"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "has use_dora True, which is not supported: adapters are"),
        ({"bias": "lora_only"}, "has bias 'lora_only', which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save .*, which is not"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights 'pissa', which is not"),
        ({"alora_invocation_tokens": [1]}, "has alora_invocation_tokens .*, which is"),
        ({"something_new": 3}, "has something_new 3, which is not supported"),
        ({"peft_type": "IA3"}, "has peft_type 'IA3', which is not supported"),
        ({"peft_type": None}, "has peft_type None, which is not supported"),
        ({"r": "3"}, "has r '3' and lora_alpha 6, expected numbers"),
        ({"r": 4}, r"shapes \(3, 56\) and \(32, 3\), expected \(4, 56\) and \(32, 4\)"),
    ],
)
def test_kinds_that_are_refused(copy, changes, message):
    settings = json.loads((copy / CONFIG).read_text())
    (copy / CONFIG).write_text(json.dumps(settings | changes))
    with pytest.raises(ValueError, match=message):
        read_peft(copy, load(base_of("llama3_gqa")).config)


def test_files_that_are_refused(copy):
    config = load(base_of("llama3_gqa")).config
    file = copy / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    query = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    embedding = {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones(3)}
    head = {"base_model.model.lm_head.lora_A.weight": np.ones((3, 32))}
    for changed, message in (
        (
            tensors | embedding,
            "lora_embedding_A', which is no factor of a linear layer",
        ),
        (tensors | head, r"lm_head\.lora_A\.weight', which is no factor of a linear"),
        ({k: v for k, v in tensors.items() if k != query}, "has one factor of model"),
        (
            {k: v for k, v in tensors.items() if "layers.1.mlp.up_proj" not in k},
            r"lacks the factors of model\.layers\.1\.mlp\.up_proj, which target_mod",
        ),
        (
            tensors | {query: tensors[query][:, :31]},
            r"\(3, 31\) and \(64, 3\), expected",
        ),
    ):
        safetensors.numpy.save_file(changed, file)
        with pytest.raises(ValueError, match=message):
            read_peft(copy, config)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        read_peft(copy, config)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="safe_serialization=True"):
        read_peft(copy, config)
