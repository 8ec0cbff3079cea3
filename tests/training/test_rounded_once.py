"""Accumulated batches read weights that were rounded, or cast, once for all of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding

from jaxscale.models import Decoder, preset
from jaxscale.nn import Linear
from jaxscale.nn.linear import round_kernels
from jaxscale.nn.packing import PackedBatch
from jaxscale.sharding import (
    REPLICATED,
    MeshConfig,
    fsdp,
    fsdp_tp,
    make_mesh,
    shardings,
)
from jaxscale.training import gradients
from jaxscale.training.step import next_token_loss
from tests.tiers import exhaustive


# Sizes of weights, whole and in two parts, are no sizes of activations.
CONFIG = dataclasses.replace(
    preset("llama_tiny"), num_heads=4, num_kv_heads=2, vocab_size=40
)
OF_WEIGHTS = {16, 32, 64}
MICROBATCHES, ROWS, TOKENS = 3, 2, 13
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
FSDP = {"rules": fsdp(), "fsdp": 2}


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def of_weights(loop, name, dtypes):
    """Operations in a loop that make matrices of the size of a weight."""
    found = []
    for eqn in equations(loop):
        if eqn.primitive.name == name:
            out = eqn.outvars[0].aval
            if out.dtype in dtypes and {*out.shape[-2:]} <= OF_WEIGHTS:
                found += [out.shape] if out.ndim > 1 else []
    return found


def traced(
    quantization,
    rules=REPLICATED,
    fsdp=1,
    microbatches=MICROBATCHES,
    axis_type="auto",
    **options,
):
    """The gradients of a batch, traced, and what they are of."""
    model = Decoder(
        CONFIG,
        dtype=jnp.bfloat16,
        rules=rules,
        quantization=quantization,
        rngs=nnx.Rngs(0),
        **options,
    )
    tokens = np.random.default_rng(0).integers(
        0, 40, (MICROBATCHES * ROWS * fsdp, TOKENS + 1), np.int32
    )
    mask = np.ones((len(tokens), TOKENS), np.bool_)
    batch = PackedBatch(
        tokens=tokens[:, :-1], targets=tokens[:, 1:], loss_mask=mask, cu_seqlens=None
    )
    run = gradients.accumulated(
        next_token_loss(), microbatches=microbatches, rules=rules
    )
    mesh = make_mesh(MeshConfig(fsdp=fsdp, axis_type=axis_type), jax.devices()[:fsdp])
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, rules.spec("batch"))
        given = jax.device_put((model, batch), (shardings(model, mesh, rules), rows))
        return jax.jit(run).trace(*given), given


def loop_of(program):
    """The loop over microbatches."""
    loops = (e for e in equations(program.jaxpr.jaxpr) if e.primitive.name == "scan")
    (loop,) = [e for e in loops if e.params["length"] == MICROBATCHES]
    return loop.params["jaxpr"].jaxpr


def accumulate(*args, **options):
    """The gradients, and the loop over microbatches."""
    program, given = traced(*args, **options)
    return jax.device_get(program.lower().compile()(*given)), loop_of(program)


@pytest.mark.parametrize(
    ("quantization", "options"),
    [
        ("fp8", {"scan_layers": False, "remat": "attention", **FSDP}),
        ("fp8_tensorwise", {"scan_layers": True}),
        ("fp8_blockwise", {"scan_layers": False}),
        (None, {"scan_layers": False, "remat": "attention", **FSDP}),
        *exhaustive(
            ("fp8", {"scan_layers": True, **FSDP}),
            ("fp8", {"scan_layers": False}),
            (None, {"scan_layers": True, "remat": "full"}),
        ),
    ],
)
def test_a_loop_over_microbatches_rounds_no_weight(quantization, options, monkeypatch):
    narrow = [jnp.bfloat16] if quantization is None else [E4M3]
    found, loop = accumulate(quantization, **options)
    assert of_weights(loop, "convert_element_type", narrow) == []
    assert of_weights(loop, "transpose", [E4M3]) == []
    monkeypatch.setattr(gradients, "round_kernels", lambda model: model)
    monkeypatch.setattr(gradients, "cast_layers", lambda params, _: params)
    each, loop = accumulate(quantization, **options)
    assert len(of_weights(loop, "convert_element_type", narrow)) >= 7
    # Bit for bit: the gradients of the parameters themselves.
    for a, b in zip(*map(jax.tree.leaves, (found, each)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def test_weights_that_were_rounded_are_gathered_once_a_pass():
    """In 8 bits, of each layer, and nothing else of them is sent in the loop."""
    program, _ = traced("fp8", scan_layers=False, remat="attention", **FSDP)
    loop = loop_of(program)
    shapes = of_weights(loop, "all_gather", [E4M3])
    assert len(shapes) == 2 * 7 * CONFIG.num_layers
    names = {e.primitive.name for e in equations(loop)}
    assert not names & {"pmax", "all_to_all"}


def test_gradients_of_layers_are_joined_for_several_readers_alone():
    """Without a barrier the sum of all microbatches reads them where they are."""
    loop = loop_of(traced(None, scan_layers=False)[0])
    name = "optimization_barrier"
    assert of_weights(loop, name, [jnp.bfloat16]) == []
    whole, _ = traced(None, scan_layers=False, microbatches=1)
    assert len(of_weights(whole.jaxpr.jaxpr, name, [jnp.bfloat16])) == 7


@pytest.mark.parametrize(
    ("rules", "mesh", "quantization"),
    [
        (fsdp_tp(), MeshConfig(tensor=2), "fp8"),
        (fsdp(), MeshConfig(fsdp=2), "fp8_tensorwise"),
    ],
)
def test_what_is_not_rounded_before_is_rounded_at_each_call(rules, mesh, quantization):
    """Tensor parallelism, and a scale per tensor of what is stored in parts."""
    axes = {"kernel_axes": ("embed", "mlp"), "rules": rules}
    layer = Linear(16, 32, quantization=quantization, rngs=nnx.Rngs(0), **axes)
    with jax.set_mesh(make_mesh(mesh, jax.devices()[:2])):
        assert round_kernels(layer).rounded is None


@pytest.mark.parametrize(
    "quantization", ["fp8", *exhaustive("fp8_blockwise"), "fp8_tensorwise"]
)
def test_rounded_weights_meet_explicit_axes(quantization):
    program, _ = traced(
        quantization, rules=fsdp(), axis_type="explicit", scan_layers=True
    )
    assert of_weights(loop_of(program), "convert_element_type", [E4M3, E5M2]) == []


def test_a_layer_alone_is_rounded_in_a_copy():
    layer = Linear(16, 32, quantization="fp8", rngs=nnx.Rngs(0))
    rounded = round_kernels(layer)
    assert layer.rounded is None and rounded.rounded is not None
    x = jnp.ones((1, 3, 16))
    np.testing.assert_array_equal(layer(x), rounded(x))
