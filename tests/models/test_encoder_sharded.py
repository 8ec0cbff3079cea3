"""Encoders split over eight devices against the same on one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.models import EncoderModel, encoder_head, encoder_preset
from jaxscale.sharding import (
    REPLICATED,
    MeshConfig,
    fsdp_tp,
    make_mesh,
    place,
)
from pallas_kernels.mosaic import H200, use_device
from tests.lowering import CUSTOM_CALL, lower_for_cuda
from tests.models.packed_rows import packed_rows
from tests.tiers import first
from tests.tolerances import assert_same_step


TOKENS, BOUNDS = packed_rows(8)
RULES = fsdp_tp()
CASES = [("roberta_tiny", "sequence", 1), ("modernbert_tiny", "masked_lm", 2)]
"""Preset, head, and over how many devices the parameters are stored."""


def make(name, kind, rules):
    config = dataclasses.replace(encoder_preset(name), num_layers=2)
    labels = 3 if kind == "sequence" else None
    head = encoder_head(config, kind, num_labels=labels)
    model = EncoderModel(config, head=head, rules=rules, rngs=nnx.Rngs(0))
    # Enough for attention to choose; more would magnify rounding errors.
    return jax.tree.map(lambda p: 4 * p if p.ndim > 1 else p, model)


def loss(model, tokens, bounds):
    logits = model(tokens, cu_seqlens=bounds)
    # What lies past the last sequence must not count.
    logits = logits[:, :1] if logits.shape[1] < 16 else logits[:, :14]
    wave = jnp.cos(jnp.arange(float(logits.shape[1]))[:, None] + 1)
    wave = wave + jnp.sin(jnp.arange(float(logits.shape[2])))
    return (jax.nn.log_softmax(logits) * wave).mean()


@functools.cache
def expected(name, kind):
    model = make(name, kind, REPLICATED)
    return jax.jit(jax.value_and_grad(loss))(model, TOKENS, BOUNDS)


@pytest.mark.parametrize(("name", "kind", "fsdp"), first(CASES, CASES[1]))
def test_split_encoder_equals_the_whole_one(name, kind, fsdp):
    mesh = make_mesh(MeshConfig(data=4 // fsdp, fsdp=fsdp, tensor=2))
    model = place(make(name, kind, RULES), mesh, RULES)
    kernel = model.blocks.attention.query.kernel[...]
    assert kernel.sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    rows = NamedSharding(mesh, RULES.spec("batch", None))
    tokens, bounds = jax.device_put((TOKENS, BOUNDS), rows)
    with jax.set_mesh(mesh):
        actual = jax.jit(jax.value_and_grad(loss))(model, tokens, bounds)
    assert_same_step(actual, expected(name, kind), 2e-5)
    gradient = actual[1].blocks.attention.query.kernel[...]
    assert gradient.sharding.is_equivalent_to(kernel.sharding, 3)


def test_encoder_inside_a_shard_map_over_data():
    # The other three axes stay with the compiler.
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    name, kind, _ = CASES[0]
    model = place(make(name, kind, RULES), mesh, RULES)
    whole, rows = PartitionSpec(), PartitionSpec("data")

    def step(model, tokens, bounds):
        result = jax.value_and_grad(loss)(model, tokens, bounds)
        return jax.lax.pmean(result, "data")

    over_data = jax.shard_map(
        step,
        in_specs=(whole, rows, rows),
        out_specs=(whole, whole),
        axis_names={"data"},
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        actual = jax.jit(over_data)(model, TOKENS, BOUNDS)
    assert_same_step(actual, expected(name, kind), 2e-5)


@pytest.mark.exhaustive  # the encoder knows nothing of the axes, however many
def test_encoder_inside_a_shard_map_over_everything():
    mesh = make_mesh(MeshConfig(data=8))
    name, kind, _ = CASES[0]
    model = make(name, kind, RULES)
    rows = PartitionSpec("data")

    def step(model, tokens, bounds):
        result = jax.value_and_grad(loss)(model, tokens, bounds)
        return jax.lax.pmean(result, "data")

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows, rows),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    assert_same_step(jax.jit(mapped)(model, TOKENS, BOUNDS), expected(name, kind), 2e-5)


def test_a_mesh_takes_no_kernel_away():
    """Products with their activation, norms and attention, each device at its rows."""
    config = dataclasses.replace(encoder_preset("bert_base"), num_layers=1)
    tokens, bounds = (jax.ShapeDtypeStruct((16, n), jnp.int32) for n in (128, 3))

    def lower(rules, mesh, **kernels):
        types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        model = jax.eval_shape(
            lambda: EncoderModel(config, rules=rules, rngs=nnx.Rngs(0), **types)
        )
        return lower_for_cuda(
            lambda model, tokens, bounds: model.hidden(tokens, cu_seqlens=bounds),
            model,
            tokens,
            bounds,
            mesh=mesh,
            **kernels,
        )

    with use_device(H200):
        kernels = lower(REPLICATED, None).count(f"@{CUSTOM_CALL}")
        assert kernels >= 4
        # Weights that are stored in parts are gathered for the kernel.
        mesh = make_mesh(MeshConfig(fsdp=2, axis_type="explicit"), jax.devices()[:2])
        lower(fsdp_tp(), mesh, kernels=kernels)
        mesh = make_mesh(MeshConfig(tensor=2), jax.devices()[:2])
        lower(fsdp_tp(), mesh, kernels=kernels)
