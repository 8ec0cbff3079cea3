"""Decoders split over eight devices against the same on one."""

import functools

import jax
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
from tests.models.packed_rows import packed_rows, wave_loss
from tests.tiers import exhaustive
from tests.tolerances import assert_same_step


TOKENS, BOUNDS = packed_rows(8)
RULES = fsdp_tp()


def make(name, rules):
    model = Decoder(preset(name), rules=rules, rngs=nnx.Rngs(0))
    model.blocks = jax.tree.map(lambda p: 12 * p if p.ndim == 3 else p, model.blocks)
    return model


def split(name, mesh, rules=RULES):
    with jax.set_mesh(mesh):
        return place(make(name, rules), mesh, rules)


@functools.cache
def expected(name):
    model = make(name, REPLICATED)
    return jax.jit(jax.value_and_grad(wave_loss))(model, TOKENS, BOUNDS)


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
        actual = jax.jit(jax.value_and_grad(wave_loss))(model, tokens, bounds)
    assert_same_step(actual, expected(name))
    gradient = actual[1].blocks.attention.query.kernel[...]
    assert gradient.sharding.spec == kernel.sharding.spec


def test_layers_split_over_pipe():
    mesh, rules = make_mesh(MeshConfig(fsdp=2, pipe=2, tensor=2)), megascale_3d()
    model = split("llama_tiny", mesh, rules)
    kernel = model.blocks.attention.query.kernel[...]
    assert kernel.sharding.spec == PartitionSpec("pipe", "fsdp", "tensor")
    with jax.set_mesh(mesh):
        actual = jax.jit(jax.value_and_grad(wave_loss))(model, TOKENS, BOUNDS)
    assert_same_step(actual, expected("llama_tiny"))


def test_decoder_inside_a_shard_map_over_data():
    # The other three axes stay with the compiler.
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    model = split("llama_tiny", mesh)
    whole, rows = PartitionSpec(), PartitionSpec("data")

    def step(model, tokens, bounds):
        result = jax.value_and_grad(wave_loss)(model, tokens, bounds)
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
        assert_same_step(
            over_data(False)(model, TOKENS, BOUNDS), expected("llama_tiny")
        )
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
