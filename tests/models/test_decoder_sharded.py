"""Decoders split over eight devices against the same on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.models import Decoder, preset
from jaxscale.models.serving import serving_rules
from jaxscale.sharding import (
    REPLICATED,
    MeshConfig,
    create,
    fsdp_tp,
    make_mesh,
    megascale_3d,
    place,
)
from tests.decoding import decode
from tests.tiers import exhaustive


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, 16)), jnp.int32)
BOUNDS = jnp.tile(jnp.array([[0, 5, 5, 14, 14], [0, 16, 16, 16, 16]]), (4, 1))
RULES = fsdp_tp()


def make(name, rules):
    model = Decoder(preset(name), rules=rules, rngs=nnx.Rngs(0))
    model.blocks = jax.tree.map(lambda p: 12 * p if p.ndim == 3 else p, model.blocks)
    return model


def loss(model, tokens, cu_seqlens):
    """Of packed sequences; whole rows are those of the test of pages."""
    logits = model(tokens, cu_seqlens=cu_seqlens)[:, :14]
    wave = jnp.cos(jnp.arange(14.0)[:, None] + jnp.arange(256.0))
    return (jax.nn.log_softmax(logits) * wave).mean()


def split(name, mesh, rules=RULES):
    with jax.set_mesh(mesh):
        return place(make(name, rules), mesh, rules)


@functools.cache
def expected(name):
    model = make(name, REPLICATED)
    return jax.jit(jax.value_and_grad(loss))(model, TOKENS, BOUNDS)


def assert_as_expected(name, actual):
    value, gradients = expected(name)
    np.testing.assert_allclose(actual[0], value, rtol=1e-5)
    gradients = jax.tree.leaves(gradients)
    scale = max(np.abs(g).max() for g in gradients)
    for grad, exact in zip(jax.tree.leaves(actual[1]), gradients, strict=True):
        np.testing.assert_allclose(grad, exact, atol=1e-5 * scale)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama_tiny", "explicit"),
        *exhaustive(("gpt2_tiny", "auto")),
    ],
)
def test_split_decoder_equals_the_whole_one(name, kind):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2, axis_type=kind))
    model = split(name, mesh)
    kernel = model.blocks.attention.query.kernel[...]
    assert kernel.sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    rows = NamedSharding(mesh, RULES.spec("batch", None))
    tokens, bounds = jax.device_put((TOKENS, BOUNDS), rows)
    with jax.set_mesh(mesh):
        actual = jax.jit(jax.value_and_grad(loss))(model, tokens, bounds)
    assert_as_expected(name, actual)
    gradient = actual[1].blocks.attention.query.kernel[...]
    assert gradient.sharding.spec == kernel.sharding.spec


def test_layers_split_over_pipe():
    mesh, rules = make_mesh(MeshConfig(fsdp=2, pipe=2, tensor=2)), megascale_3d()
    model = split("llama_tiny", mesh, rules)
    kernel = model.blocks.attention.query.kernel[...]
    assert kernel.sharding.spec == PartitionSpec("pipe", "fsdp", "tensor")
    with jax.set_mesh(mesh):
        actual = jax.jit(jax.value_and_grad(loss))(model, TOKENS, BOUNDS)
    assert_as_expected("llama_tiny", actual)


def test_decoder_inside_a_shard_map_over_data():
    # The other three axes stay with the compiler.
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    model = split("llama_tiny", mesh)
    whole, rows = PartitionSpec(), PartitionSpec("data")

    def step(model, tokens, bounds):
        result = jax.value_and_grad(loss)(model, tokens, bounds)
        return jax.lax.pmean(result, "data")

    def over_data(check_vma):
        return jax.jit(
            jax.shard_map(
                step,
                in_specs=(whole, rows, rows),
                out_specs=(whole, whole),
                axis_names={"data"},
                check_vma=check_vma,
            )
        )

    with jax.set_mesh(mesh):
        assert_as_expected("llama_tiny", over_data(False)(model, TOKENS, BOUNDS))
        with pytest.raises(ValueError, match="pass check_vma=False to it"):
            over_data(True)(model, TOKENS, BOUNDS)


def test_pages_of_a_split_decoder():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2, axis_type="explicit"))
    rules = serving_rules(RULES)
    model = create(lambda: make("llama_tiny", rules), mesh, rules)
    whole = make("llama_tiny", REPLICATED)
    with jax.set_mesh(mesh):
        logits, pages = jax.jit(lambda m: decode(m, TOKENS[:, :10], 8, 2))(model)
    assert pages.sharding.spec[3] == "tensor"
    expected = jax.jit(lambda m: m(TOKENS[:, :10]))(whole)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
