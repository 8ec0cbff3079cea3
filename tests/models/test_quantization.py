"""Decoders with weights of 8 bits: the logits, and how they are made."""

import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale.models import load, quantize, save
from jaxscale.models.hf import load as loading
from jaxscale.nn import Linear, QuantizedLinear, TileSparseLinear
from jaxscale.pruning import PruneConfig
from jaxscale.sharding import create, fsdp_tp, make_mesh
from pallas_kernels.matmul.activations import activate
from tests.models.test_serving import logits, make
from tests.pruning.test_convert import pruned
from tests.tolerances import relative_error


FIXTURES = Path("tests/fixtures/models")
WEIGHTS: Any = ["int8", "fp8", "fp8_dynamic"]


class Dequantized(QuantizedLinear):
    """The same weights, multiplied in fp32."""

    def __call__(self, x, activation=None):
        kernel = self.kernel[...].astype(jnp.float32) * self.scale[...][:, None]
        y = jnp.einsum("bti,oi->bto", x, kernel, precision="highest")
        y = y[..., : self.features]
        return activate(y if self.bias is None else y + self.bias[...], activation)


def of_kind(model, kind):
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, kind)]


def dequantized(model):
    model = jax.tree.map(lambda p: p, model)
    for layer in of_kind(model, QuantizedLinear):
        layer.__class__ = Dequantized
    return model


@pytest.mark.parametrize(
    ("name", "weights"),
    [("gptj", "fp8"), ("qwen2", "fp8"), ("qwen3", "int8"), ("gemma3", "int8")],
)
def test_logits_are_those_of_the_rounded_weights(name, weights):
    model = make(name)
    served = quantize(model, weights)
    assert not of_kind(served, Linear)
    assert isinstance(served.lm_head, QuantizedLinear)
    found = logits(served)
    assert relative_error(found, logits(dequantized(served))) < 1e-5
    exact = logits(model)
    cosine = optax.cosine_similarity(found, exact)
    # Random weights amplify what is rounded more than trained ones do.
    assert cosine.min() > {"int8": 0.995, "fp8": 0.95}[weights]
    assert of_kind(model, Linear)  # as it was


def test_a_projection_that_is_tied_is_a_copy():
    model: Any = make("gpt2")
    served: Any = quantize(model, "int8")
    np.testing.assert_array_equal(served.embed.table[...], model.embed.table[...])
    head, size = served.lm_head, model.config.vocab_size
    assert head.kernel.shape[0] % 8 == 0 and head.features == size
    assert head.out_dtype == jnp.float32
    with pytest.raises(ValueError, match="train the model that `quantize` was given"):
        served.output_embedding()


def nats_a_token(model, text):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(text[:, :-1]), text[:, 1:]
    )
    return losses.mean()


@pytest.fixture(scope="module")
def trained():
    """A tiny model and the bytes of English that it has half learned."""
    text = np.frombuffer(Path("docs/models.md").read_bytes()[:512], np.uint8)
    text = jnp.asarray(text.reshape(8, 64), jnp.int32)
    optimizer = optax.adam(1e-2)

    def step(carry, _):
        model, state = carry
        gradient = jax.grad(nats_a_token)(model, text)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(model, updates), state), None

    model = make("llama")
    with jax.numpy_dtype_promotion("standard"):  # for optax
        run = jax.jit(lambda carry: jax.lax.scan(step, carry, length=35))
        (model, _), _ = run((model, optimizer.init(model)))
    return model, text


@pytest.mark.parametrize("weights", WEIGHTS)
def test_perplexity_on_text(trained, weights):
    model, text = trained
    before, after = (
        float(jnp.exp(jax.jit(nats_a_token)(each, text)))
        for each in (model, quantize(model, weights))
    )
    assert 1.5 < before < 8  # of 256
    bound = {"int8": 1.005, "fp8": 1.03, "fp8_dynamic": 1.05}[weights]
    assert before != after < bound * before


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ["llama3_gqa", "gpt2", "neox"])
def test_loading_quantizes_block_by_block(name, weights):
    path = FIXTURES / name
    found, whole = load(path, quantization=weights), quantize(load(path), weights)
    assert jax.tree.structure(found) == jax.tree.structure(whole)
    jax.tree.map(np.testing.assert_array_equal, found, whole)
    assert found.for_inference() is found


@pytest.mark.parametrize("name", ["llama3_gqa", "gpt2", "neox"])
def test_loading_prepares_block_by_block(name):
    found = load(FIXTURES / name, for_inference=True)
    whole = load(FIXTURES / name).for_inference()
    assert jax.tree.structure(found) == jax.tree.structure(whole)
    jax.tree.map(np.testing.assert_array_equal, found, whole)
    assert found.for_inference() is found


@pytest.mark.parametrize("quantized", [True, False])
def test_one_block_lies_there_as_it_was_read(monkeypatch, quantized):
    """While it is prepared; a block of two would be twice as much."""
    path, wide = FIXTURES / "llama3_gqa", []
    whole = load(path).blocks
    block = sum(p.nbytes for p in jax.tree.leaves(whole)) // 2
    biggest = sum(p.nbytes for p in jax.tree.leaves(whole.mlp)) // 2
    del whole
    name = "quantize_read" if quantized else "prepare_read"
    original = getattr(loading, name)
    earlier = jax.live_arrays()  # of other tests; kept, so that their ids stay theirs
    known = {id(a) for a in earlier}

    def held():
        gc.collect(1)  # what is new; all that there is takes seconds
        new = (a for a in jax.live_arrays() if id(a) not in known)
        return sum(a.nbytes for a in new if a.ndim == 2)

    def watched(*arguments, **options):
        wide.append(held())
        return original(*arguments, **options)

    monkeypatch.setattr(loading, name, watched)
    load(path, quantization="int8" if quantized else None, for_inference=True)
    table = load(path).embed.table.nbytes * 2  # and the projection
    assert len(wide) == 2 and biggest < block
    before = block / 2 if quantized else block
    assert max(wide) <= block + before + table


@pytest.mark.parametrize("from_file", [False, True])
def test_tensor_parallel(tmp_path, from_file):
    """From a file on four devices, of which two have the same key/value head."""
    devices = 4 if from_file else 2
    mesh, rules = make_mesh({"tensor": devices}, jax.devices()[:devices]), fsdp_tp()
    whole = make("llama")
    if from_file:
        save(whole, tmp_path)
        served = load(tmp_path, quantization="int8", mesh=mesh, rules=rules)
    else:
        model = create(lambda: make("llama", rules=rules), mesh, rules)
        served: Any = quantize(model, "int8")
    assert served.config.num_kv_heads == devices
    block = served.blocks[0]
    assert block.attention.joined.kernel.sharding.spec == jax.P("tensor", None)
    assert block.mlp.down.kernel.sharding.spec == jax.P(None, "tensor")
    assert served.lm_head.scale.sharding.spec == jax.P("tensor")
    with jax.set_mesh(mesh):
        found = logits(served)
    assert relative_error(found, logits(quantize(whole, "int8"))) < 1e-5


def test_sparse_layers_stay_as_they_are():
    _, _, sparse = pruned(make("llama"), PruneConfig(sparsity=0.5, tile=8))
    served: Any = quantize(sparse, "int8")
    assert isinstance(served.blocks[0].attention.query, TileSparseLinear)
    assert isinstance(served.lm_head, QuantizedLinear)
    assert relative_error(logits(served), logits(dequantized(served))) < 1e-5


def test_what_cannot_be_quantized(tmp_path):
    model = make("llama")
    with pytest.raises(ValueError, match="quantized already"):
        quantize(quantize(model))
    up = model.blocks.mlp.up.kernel
    up[...] = up[...].at[1, 0, 0].set(jnp.nan)
    message = r"blocks\.1\.mlp\.joined has a weight that is NaN or infinite"
    with pytest.raises(ValueError, match=message):
        quantize(model)
    save(model, tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, quantization="fp8")
    with pytest.raises(ValueError, match="quantization 'int8' is for decoders"):
        load("tests/fixtures/encoders/bert", quantization="int8")
    broken = make("gpt2")
    broken.embed.table[...] = broken.embed.table[...].at[3].set(jnp.inf)
    with pytest.raises(ValueError, match="embed has a weight"):
        quantize(broken)
