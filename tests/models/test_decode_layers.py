"""Decoding with one launch between two attentions, beside the blocks one by one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import Decoder, decode_layers, quantize
from jaxscale.models.families.llama import llama_tiny
from jaxscale.models.stack import unstacked
from jaxscale.nn import PagedRows, TileSparseLinear
from jaxscale.pruning.layers import linears, replace_linears
from jaxscale.sharding import create, fsdp_tp, make_mesh
from jaxscale.sharding.decode_all_reduce import Sums
from pallas_kernels.collective_matmul import ops
from pallas_kernels.decode_layer import api
from pallas_kernels.dispatch import recorded
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.tile_sparse_matmul import TileSparse
from tests.decoding import decode, nan_pages
from tests.interpreter import interpret_mosaic_gpu
from tests.pallas_kernels.collective_matmul.test_low_latency import SMALL
from tests.pallas_kernels.decode_layer import test_attend, test_decode_layer
from tests.tolerances import relative_error


del test_attend, test_decode_layer  # they register what the interpreter calls


def make(dtype=jnp.float32, **changes):
    config = dataclasses.replace(llama_tiny(), num_layers=3, **changes)
    model = Decoder(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    return model.for_inference()


@pytest.mark.parametrize(
    ("bias", "weights"), [(False, None), (True, None), (True, "int8"), (False, "fp8")]
)
def test_logits_are_those_of_the_blocks(bias, weights):
    model = make(attention_bias=bias)
    if weights is not None:
        model = quantize(model, weights)
    tokens = jax.random.randint(jax.random.key(1), (3, 8), 0, model.config.vocab_size)
    want, pages = decode(model, tokens, 4, 1, 1, 1, 1)  # there is no Hopper GPU
    model.decode_layer = "xla"
    with recorded() as choices:
        found, again = decode(model, tokens, 4, 1, 1, 1, 1)
    assert ("decode_layer", "xla") in choices
    np.testing.assert_allclose(found, want, atol=2e-5)
    np.testing.assert_allclose(again, pages, atol=2e-5)


WIDE = {
    "d_model": 256,
    "head_dim": 128,
    "num_heads": 2,
    "num_kv_heads": 1,
    "d_ff": 256,
}


@pytest.mark.parametrize(
    ("why", "changes", "expected"),
    [
        ("it fits", {}, True),
        ("another activation", {"activation": "geglu"}, False),
        ("norms of queries and keys", {"qk_norm": True}, False),
        ("a part of each head is rotated", {"rotary_dim": 64}, False),
        ("heads of 64", {"head_dim": 64, "num_heads": 4}, False),
        ("a parallel block", {"parallel_block": True}, False),
    ],
)
def test_other_layers_run_as_blocks(why, changes, expected):
    del why
    with use_device(H200):
        assert kernels(**WIDE | changes) is expected


def test_adapters_run_as_blocks():
    with use_device(H200):
        model = make(jnp.bfloat16, **WIDE)
        assert chosen(model)
        model.blocks[1].mlp.down.low_rank = nnx.data(object())
        assert not chosen(model)
        assert not kernels(jnp.float32, **WIDE)
    assert not chosen(make(jnp.bfloat16, **WIDE))  # no Hopper GPU


def test_weights_of_8_bits_take_the_kernel_if_all_are_alike():
    with use_device(H200):
        dense = make(jnp.bfloat16, **WIDE)
        model = quantize(dense, "int8")
        assert chosen(model) and chosen(model, 64)
        mixed = quantize(dense, "fp8")
        assert chosen(mixed)
        mixed.blocks[1].mlp.down = model.blocks[1].mlp.down
        assert not chosen(mixed)
        model.blocks[1] = dense.blocks[1]
        assert not chosen(model)
        dynamic = quantize(dense, "fp8_dynamic")
        assert chosen(dynamic, 32)
        assert not chosen(dynamic, 64)  # it rounds activations
        assert not chosen(quantize(make(**WIDE), "int8"))  # fp32 activations


def kernels(dtype=jnp.bfloat16, **changes):
    return chosen(make(dtype, **changes))


def chosen(model, rows=2, queries=1):
    x, state = step(model, rows, queries)
    variants = [model.config.attention(i) for i in range(model.config.num_layers)]
    return decode_layers.runs(model.blocks, x, state, variants, "mosaic_gpu")


def step(model, rows, queries=1):
    pages = nan_pages(model, 2, 4)
    lengths = jnp.zeros(rows, jnp.int32)
    state = PagedRows.of(
        pages, jnp.zeros((rows, 1), jnp.int32), lengths, lengths + queries, queries
    )
    return jnp.zeros((rows, queries, model.config.d_model), model.dtype), state


@pytest.mark.parametrize("weights", [None, "int8", "fp8"])
def test_few_rows_take_the_kernel_by_themselves(weights):
    model = make(jnp.bfloat16, **WIDE)
    if weights is not None:
        model = quantize(model, weights)
    for rows, takes in ((1, True), (32, True), (64, False)):
        with use_device(H200), recorded() as choices:
            jax.eval_shape(model.run_blocks, *step(model, rows))
        assert (("decode_layer", "mosaic_gpu") in choices) is takes


def test_a_layer_with_its_attention_is_one_launch(monkeypatch):
    monkeypatch.setattr(api, "check_hopper", lambda *_: SMALL)
    model = make(jnp.bfloat16, **WIDE)
    tokens = jax.random.randint(jax.random.key(1), (3, 6), 0, model.config.vocab_size)
    model.decode_layer = None
    want, pages = decode(model, tokens, 4, 1, 1, page_size=64)
    model.decode_layer = "mosaic_gpu"
    with interpret_mosaic_gpu(concurrent_blocks=True) as found:
        logits, again = decode(model, tokens, 4, 1, 1, page_size=64)
    assert found.kernels == 2 * 3  # layers of tokens
    assert relative_error(logits, want) < 0.05
    written = ~jnp.isnan(pages)
    np.testing.assert_array_equal(written, ~jnp.isnan(again))
    assert relative_error(again[written], pages[written]) < 0.05


def on_devices(count, dtype=jnp.float32, **changes):
    """A decoder whose heads and hidden features are split."""
    mesh, rules = make_mesh({"tensor": count}, jax.devices()[:count]), fsdp_tp()
    config = dataclasses.replace(llama_tiny(), num_layers=2, **changes)
    options = {"dtype": dtype, "param_dtype": dtype, "rules": rules}
    model = create(lambda: Decoder(config, rngs=nnx.Rngs(0), **options), mesh, rules)
    return model.for_inference(), mesh


@pytest.mark.parametrize("weights", [None, "int8"])
def test_logits_of_devices_that_split_heads_are_those_of_the_blocks(weights):
    model, mesh = on_devices(2, attention_bias=True)
    if weights is not None:
        model = quantize(model, weights)
    tokens = jax.random.randint(jax.random.key(1), (3, 8), 0, model.config.vocab_size)
    run = jax.jit(lambda model: decode(model, tokens, 4, 1, 1, 1, 1))
    with jax.set_mesh(mesh):
        want, pages = run(model)
        model.decode_layer = "xla"
        with recorded() as choices:
            found, again = run(model)
    assert ("decode_layer", "xla") in choices
    np.testing.assert_allclose(found, want, atol=2e-5)
    np.testing.assert_allclose(again, pages, atol=2e-5)


SPLIT = WIDE | {"d_ff": 512, "num_heads": 4, "num_kv_heads": 2}


def sums_of(rows, device):
    """The sums of so many rows of the model `SPLIT`."""
    elements = 8 * -(-rows // 8) * SPLIT["d_model"]
    bf16 = jnp.dtype(jnp.bfloat16)
    return Sums(axis="tensor", elements=elements, dtype=bf16, device=device)


def test_the_kernel_adds_over_devices(monkeypatch):
    for module in (api, ops):
        monkeypatch.setattr(module, "check_hopper", lambda *_: SMALL)
    model, mesh = on_devices(2, jnp.bfloat16, **SPLIT)
    tokens = jax.random.randint(jax.random.key(1), (3, 6), 0, model.config.vocab_size)

    def run(model, workspace=None):
        return decode(model, tokens, 4, 1, 1, workspace=workspace)[0]

    with jax.set_mesh(mesh):
        model.decode_layer = None
        want = jax.jit(run)(model)
        model.decode_layer = "mosaic_gpu"
        with interpret_mosaic_gpu(concurrent_blocks=True) as found:
            run_here = jax.jit(
                lambda model: run(model, sums_of(3, SMALL).begin()),
                # It aborts on the constants of callbacks.
                compiler_options={"xla_disable_hlo_passes": "cse"},
            )
            assert relative_error(run_here(model), want) < 0.05
            assert found.kernels == 1 + 2 * 2  # it begins; layers of tokens


def test_devices_take_the_kernel_where_they_have_a_workspace():
    model, mesh = on_devices(2, jnp.bfloat16, **SPLIT)
    with jax.set_mesh(mesh), use_device(H200):
        assert model.adds_in_layers(32, sums_of(32, H200).begin)
        assert not model.adds_in_layers(64, sums_of(64, H200).begin)
        assert not model.adds_in_layers(32, sums_of(8, H200).begin)  # too small
        x, state = step(model, 32)
        for workspace, takes in ((sums_of(32, H200).begin, True), (None, False)):
            with recorded() as choices:
                jax.eval_shape(
                    lambda begin=workspace: model.run_blocks(
                        x, dataclasses.replace(state, workspace=begin and begin())
                    )[0]
                )
            assert (("decode_layer", "mosaic_gpu") in choices) is takes
        model.decode_layer = None
        assert not model.adds_in_layers(32, sums_of(32, H200).begin)


@pytest.mark.parametrize(("devices", "name"), [(2, "nvidia_h100"), (4, "nvidia_h200")])
def test_devices_that_were_not_timed_take_the_kernel_only_by_name(devices, name):
    device = dataclasses.replace(H200, name=name)
    changes = SPLIT | {"num_heads": 8, "num_kv_heads": 4}
    model, mesh = on_devices(devices, jnp.bfloat16, **changes)
    with jax.set_mesh(mesh), use_device(device):
        assert not model.adds_in_layers(8, sums_of(8, device).begin)
        model.decode_layer = "mosaic_gpu"
        assert model.adds_in_layers(8, sums_of(8, device).begin)


def test_more_rows_or_tokens_run_as_blocks():
    model = make(jnp.bfloat16, **WIDE)
    with use_device(H200):
        assert chosen(model, 64)
        assert not chosen(model, 128)
        assert not chosen(model, 12)
        assert not chosen(model, 2, queries=3)


DENSE = [("value",), ("query", "value", "gate", "up", "down"), ("key", "value", "out")]
"""Layers of a pruned model that stay dense, block by block."""


def pruned(model, tile=128, dense=((),) * 3, served=True):
    """Three quarters of the rows of each tile left out, and columns of some queries."""

    def convert(path, layer):
        k, n = layer.kernel.shape
        scores = jax.random.uniform(jax.random.key(k + n), (k, n // tile))
        mask = jnp.repeat(scores < jnp.quantile(scores, 0.25), tile, axis=1)
        columns = None
        if path.endswith("query") and any(dense):
            columns = jax.random.permutation(jax.random.key(0), n)[: n // 2]
            mask = jnp.zeros_like(mask).at[:, columns].set(mask[:, : n // 2])
        options = {"tile": tile, "columns": columns}
        weight = TileSparse.from_dense(layer.kernel[...], mask, **options)
        return TileSparseLinear(
            TileSparse.stack([weight]),
            split=None,
            kernel_axes=layer.kernel_axes,
            out_axes=layer.out_axes,
            dtype=layer.dtype,
            rules=layer.rules,
        )

    for i, (block, stay) in enumerate(zip(model.blocks, dense, strict=True)):
        names = [n for n in linears(block) if n.rpartition(".")[2] not in stay]
        layers = {n: functools.partial(convert, n) for n in names}
        model.blocks[i] = replace_linears(block, layers)
    return model.for_inference() if served else model


def apart(dtype=jnp.float32):
    """A model whose layers are not joined."""
    config = dataclasses.replace(llama_tiny(), num_layers=3, **WIDE)
    model = Decoder(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    return unstacked(model)


def test_shapes_of_a_pruned_model_have_no_plan():
    with use_device(H200):
        model = pruned(apart(jnp.bfloat16), served=False)
        shapes = jax.eval_shape(lambda model: model, model).for_inference()
        assert shapes.blocks[0].shares is None
        assert model.for_inference().blocks[0].shares is not None


@pytest.mark.parametrize("dense", [((),) * 3, DENSE])
def test_logits_of_a_pruned_model_are_those_of_the_blocks(dense):
    model = pruned(apart(), dense=dense)
    tokens = jax.random.randint(jax.random.key(1), (3, 8), 0, model.config.vocab_size)
    want, pages = decode(model, tokens, 4, 1, 1, 1, 1)
    model.decode_layer = "xla"
    with recorded() as choices:
        found, again = decode(model, tokens, 4, 1, 1, 1, 1)
    assert ("decode_layer", "xla") in choices
    np.testing.assert_allclose(found, want, atol=2e-5)
    np.testing.assert_allclose(again, pages, atol=2e-5)


def test_pruned_layers_take_the_kernel_whatever_stays_dense():
    assert not chosen(pruned(apart(jnp.bfloat16)))  # no GPU
    with use_device(H200):
        for dense in (((),) * 3, DENSE):
            model = pruned(apart(jnp.bfloat16), dense=dense)
            assert chosen(model) and chosen(model, 32)
        assert decode_layers.faster(model.blocks, 1) is None  # no faster
        model.blocks[1] = make(jnp.bfloat16, **WIDE).blocks[1]  # no plan
        assert not chosen(model)
        assert not chosen(pruned(apart(jnp.bfloat16), tile=64))


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [None, "int8", "pruned", "some pruned"])
def test_the_kernel_decodes_as_the_blocks(weights):
    model = make(jnp.bfloat16, **WIDE)
    if weights in ("pruned", "some pruned"):
        dense = DENSE if weights == "some pruned" else ((),) * 3
        model = pruned(apart(jnp.bfloat16), dense=dense)
    elif weights is not None:
        model = quantize(model, weights)
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, model.config.vocab_size)
    model.decode_layer = None
    want, _ = decode(model, tokens, 4, 1, 1, 1, 1)
    model.decode_layer = "mosaic_gpu"
    with recorded() as choices:
        found, _ = decode(model, tokens, 4, 1, 1, 1, 1)
    assert ("decode_layer", "mosaic_gpu") in choices
    assert relative_error(found, want) < 0.05
