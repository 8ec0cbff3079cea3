"""Decoders compiled for H200s without a GPU: kernels, collectives and copies."""

import dataclasses
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxscale.models import Decoder, preset
from jaxscale.nn.linear import Linear
from jaxscale.sharding import fsdp_tp, make_mesh, shardings
from jaxscale.training.gradients import accumulated
from jaxscale.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from jaxscale.training.step import TrainState, make_train_step, next_token_loss
from tests.compiled import compile_for_h200
from tests.tiers import exhaustive
from tests.training.toy import Batch


RULES = fsdp_tp()
CONFIG = dataclasses.replace(
    preset("llama_tiny"),
    vocab_size=32_000,
    d_model=2048,
    d_ff=8192,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_seq_len=4096,
)
ROWS, TOKENS = 2, 3072  # a size that no weight has, whole and on each of four devices
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def decoder(layers, **options):
    config = dataclasses.replace(CONFIG, num_layers=layers)
    return Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options)


def split(layers, tensor_parallel):
    return decoder(
        layers,
        remat="attention",
        scan_layers=False,
        rules=RULES,
        tensor_parallel=tensor_parallel,
    )


def placed(tree, mesh):
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        tree,
        shardings(tree, mesh, RULES),
    )


def rows(mesh, size, dtype=jnp.int32):
    where = NamedSharding(mesh, RULES.spec("batch", None))
    return jax.ShapeDtypeStruct((ROWS, size), dtype, sharding=where)


def forward(devices, layers, tensor_parallel):
    mesh = make_mesh({"tensor": 4}, devices)

    def run(model, tokens):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return model(tokens)

    model = jax.eval_shape(lambda: split(layers, tensor_parallel))
    return jax.jit(run), (placed(model, mesh), rows(mesh, TOKENS))


def training(devices, layers, tensor_parallel):
    mesh, config = make_mesh({"tensor": 4}, devices), OptimizerConfig(warmup_steps=3)
    optimizer = make_optimizer(config, 100)
    state = placed(
        jax.eval_shape(
            lambda: TrainState.create(split(layers, tensor_parallel), optimizer)
        ),
        mesh,
    )
    layout = jax.tree.map(lambda x: x.sharding, state)
    step = make_train_step(
        accumulated(next_token_loss(), rules=RULES),
        optimizer,
        schedule=make_schedule(config, 100),
        shardings=layout,
    )

    def run(state, batch):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return step(state, batch)

    batch = Batch(
        tokens=rows(mesh, TOKENS),
        targets=rows(mesh, TOKENS),
        loss_mask=rows(mesh, TOKENS, jnp.bool),
        cu_seqlens=rows(mesh, 5),
    )
    run = jax.jit(run, donate_argnums=0, out_shardings=(layout, None))
    return run, (state, batch)


def whole_rows(devices, remat):
    """A training step of two kinds of layers, whose scores XLA would store."""
    config = dataclasses.replace(
        CONFIG,
        d_model=512,
        d_ff=1024,
        num_heads=8,
        num_kv_heads=4,
        vocab_size=1024,
        num_layers=4,
        window_pattern=(256, None),
        attention_softcap=50.0,
    )
    training = OptimizerConfig(warmup_steps=3)
    optimizer, schedule = make_optimizer(training, 100), make_schedule(training, 100)

    def fresh():
        model = Decoder(config, dtype=jnp.bfloat16, remat=remat, rngs=nnx.Rngs(0))
        return TrainState.create(model, optimizer)

    where = SingleDeviceSharding(devices[0])

    def on_device(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    def rows(dtype):
        return jax.ShapeDtypeStruct((ROWS, 2000), dtype, sharding=where)

    batch = Batch(rows(jnp.int32), rows(jnp.int32), rows(jnp.bool), None)
    loss = accumulated(next_token_loss())
    step = make_train_step(loss, optimizer, schedule=schedule)
    return step, (jax.tree.map(on_device, jax.eval_shape(fresh)), batch)


def of_weights(found):
    """Bytes that are written of arrays which have no tokens, outside of products."""
    sizes = {TOKENS, TOKENS // 4, ROWS * TOKENS}
    return sum(
        w.size
        for w in found.written(2**20)
        if "custom-call" not in w.operation
        and sizes.isdisjoint(map(int, re.findall(r"\d+", w.shape)))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "again"), [("attention", 0), *exhaustive(("full", 2))]
)
def test_a_training_step_of_whole_rows_stores_no_scores(remat, again):
    """2,000 tokens, no multiple of a tile; layers with a window and without."""
    found = compile_for_h200(whole_rows, remat)
    kernels = re.findall(r'custom-call\(.*op_name="([^"]*)/(varlen\w+)/', found.hlo)
    # In the loop of the backward pass, for each of the two kinds of layers.
    backward = Counter(name for path, name in kernels if "transpose" in path)
    assert backward["varlen_attention_backward"] == 2
    assert backward["varlen_attention"] == again
    assert len(kernels) > backward.total()
    assert re.findall(r"f32\[[\d,]*2000,2000\]", found.hlo) == []
    tables = r"= s32\[\d+,(?:5|12|16)\]\S* (?:fusion|copy|custom-call)\("
    assert re.findall(tables, found.hlo) == []


@pytest.mark.exhaustive  # training takes its kernels, too
@pytest.mark.parametrize(
    ("tensor_parallel", "kernels", "collectives"),
    [
        # A layer gathers and scatters twice, each time beside a product; both layers
        # take the same kernels.
        ("fused", {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}, (1, 1, 0, 0)),
        ("xla", {}, (1, 5, 4, 0)),
    ],
)
def test_tensor_parallel_forward(tensor_parallel, kernels, collectives):
    found = compile_for_h200(forward, 2, tensor_parallel, count=4)
    names = Counter(kernel.name for kernel in found.kernels)
    assert names == kernels | {"varlen_attention": 1}
    assert [kernel for kernel in found.kernels if kernel.spilled] == []
    # One sum after the table, where each device looks up the tokens that it has; one
    # gather before the output layer.
    assert tuple(map(found.count, COLLECTIVES)) == collectives
    assert found.count("collective-permute") == 0
    # Each weight is rounded once, and not copied.
    per_layer = 2048 * (2 * 512 + 2 * 256 + 3 * 2048)
    assert of_weights(found) == 2 * (2 * per_layer + 2048 * 8000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor_parallel", "kernels", "collectives"),
    [
        # Backward a gather becomes a scatter and a scatter a gather; what was gathered
        # is kept. The gradients of the weights, of equal shape for gate and up, are
        # kernels too.
        (
            "fused",
            {"all_gather_matmul": 4, "matmul_reduce_scatter": 4, "matmul": 5},
            (5, 2, 1, 0),
        ),
        # The gathers before the products are done again: 2 forward, 2 + 2 backward.
        *exhaustive(("xla", {}, (5, 2 + 6, 1 + 4, 0))),
    ],
)
def test_tensor_parallel_training(tensor_parallel, kernels, collectives):
    found = compile_for_h200(training, 1, tensor_parallel, count=4)
    names = Counter(kernel.name for kernel in found.kernels)
    attention = {"varlen_attention": 1, "varlen_attention_backward": 1}
    assert names == kernels | attention
    assert [kernel for kernel in found.kernels if kernel.spilled] == []
    # Sums: the look-up, maxima and sums of the softmax over the vocabulary, gradients
    # of norms, and the norm of all gradients.
    assert tuple(map(found.count, COLLECTIVES)) == collectives
    assert found.count("collective-permute") == 0
    # Parameters and moments, fp32, stay where they are.
    state = 3 * 4 * (2048 * (2 * 512 + 2 * 256 + 3 * 2048 + 2 * 8000 + 3))
    assert found.aliased == pytest.approx(state, abs=64)
    copied = sum(w.size for w in found.written(2**20) if w.operation.endswith("copy"))
    assert copied < 0.04 * state


def of_layers(devices, quantization, options=None):
    """Gradients of three layers that compute elementwise operations again."""
    where = SingleDeviceSharding(devices[0])
    options = {"quantization": quantization, "scan_layers": False, **(options or {})}
    model = jax.eval_shape(lambda: decoder(3, remat="attention", **options))

    def loss(model, tokens):
        return model.hidden(tokens).astype(jnp.float32).sum()

    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)
    inputs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        (model, tokens),
    )
    return jax.jit(jax.grad(loss)), inputs


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, *exhaustive("fp8")])
def test_layers_read_their_weights_in_the_stack(quantization):
    """No part of a stack is copied, and no stack is converted as a whole."""
    found = compile_for_h200(of_layers, quantization)
    assert [kernel for kernel in found.kernels if kernel.spilled] == []
    part = 2048 * 8192
    weights = [
        w
        for w in found.written(2**20)
        if {TOKENS, ROWS * TOKENS}.isdisjoint(map(int, re.findall(r"\d+", w.shape)))
    ]
    copies = [w for w in weights if w.operation.endswith(("slice", "copy"))]
    assert copies == []
    if quantization is None:
        # Gate, up and down are rounded for each pass, and nothing larger is; gradients
        # are products, and joined.
        rounded = [
            w
            for w in weights
            if w.shape.startswith("bf16")
            and not re.search("custom-call|concatenate", w.operation)
        ]
        assert max(w.size for w in rounded) == 2 * part
        assert sum(w.size == 2 * part for w in rounded) == 3 * 3 * 2


@pytest.mark.slow
def test_layers_read_a_stack_of_their_type_in_place():
    """So it is in a loop over microbatches, before which the stack was cast."""
    found = compile_for_h200(of_layers, None, {"param_dtype": "bfloat16"})
    weights = [
        w
        for w in found.written(2**20)
        if {TOKENS, ROWS * TOKENS}.isdisjoint(map(int, re.findall(r"\d+", w.shape)))
    ]
    assert [w for w in weights if w.operation.endswith(("slice", "copy"))] == []


@pytest.mark.slow
def test_what_fp8_layers_compute_is_rounded_at_once():
    """Of activations and gradients, only results of matmuls are stored in 16 bits."""
    found = compile_for_h200(of_layers, "fp8")
    hidden = [
        w
        for w in found.written(2**20)
        if {ROWS * TOKENS, TOKENS} & {*map(int, re.findall(r"\d+", w.shape))}
        and re.search(r"\b8192\]", w.shape)
        and "custom-call" not in w.operation
    ]
    assert hidden == []
    names = Counter(kernel.name for kernel in found.kernels)
    assert names["quantize_gated"] == names["quantize_gated_gradients"] == 1
    assert names["quantize_rms_norm"] == 1


def step_of_layers(devices, quantization):
    """A step of three layers on one device."""
    where = SingleDeviceSharding(devices[0])
    config = OptimizerConfig(warmup_steps=3)
    optimizer, schedule = make_optimizer(config, 100), make_schedule(config, 100)
    options = {"remat": "attention", "quantization": quantization}

    def fresh():
        return TrainState.create(decoder(3, scan_layers=False, **options), optimizer)

    def on_device(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    def rows(dtype):
        return jax.ShapeDtypeStruct((ROWS, TOKENS), dtype, sharding=where)

    batch = Batch(rows(jnp.int32), rows(jnp.int32), rows(jnp.bool), None)
    step = make_train_step(accumulated(next_token_loss()), optimizer, schedule=schedule)
    return step, (jax.tree.map(on_device, jax.eval_shape(fresh)), batch)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, *exhaustive("fp8")])
def test_a_stack_and_its_moments_are_updated_in_one_pass(quantization):
    """Were gradients joined by what reads them, each moment would take a pass."""
    found = compile_for_h200(step_of_layers, quantization)
    stack = re.escape("f32[3,2048,8192]")
    results = re.findall(rf"= (.*?{stack}.*?) fusion\(", found.hlo)
    # Gate and up; nothing else makes an array as large.
    assert [len(re.findall(stack, each)) for each in results] == [3, 3]


def one_token(devices):
    """The value projection of one token of LLaMA-3 8B."""
    layer = jax.eval_shape(
        lambda: Linear(
            4096, 1024, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
        )
    )
    where = SingleDeviceSharding(devices[0])
    x = jax.ShapeDtypeStruct((1, 1, 4096), jnp.bfloat16)
    inputs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), (x, layer)
    )
    return jax.jit(lambda x, layer: layer(x)), inputs


def test_one_token_stores_no_terms_of_a_product():
    found = compile_for_h200(one_token)
    made = re.findall(r"= \w+\[4096,1024\]\S* ([\w-]+)\(", found.hlo)
    assert made and set(made) <= {"parameter", "bitcast"}
