"""Encoders whose layers are one op between two attentions, beside their blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.inference.encoder.stacked_parameters import unstacked_in_place
from jaxscale.models import EncoderModel, encode_layers, encoder_preset
from pallas_kernels.dispatch import recorded
from pallas_kernels.mosaic import H200, use_device
from tests.tolerances import RELATIVE, relative_error


def make(name="bert_tiny", **changes):
    """A model, its layers in arrays of their own, and in stacks."""
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    config = dataclasses.replace(encoder_preset(name), num_layers=3, **changes)
    model = EncoderModel(config, rngs=nnx.Rngs(0), **types)
    leaves, tree = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = [
        0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)
    ]
    leaves = [x + n.astype(x.dtype) for x, n in zip(leaves, noise, strict=True)]
    model = jax.tree.unflatten(tree, leaves)
    with use_device(H200):
        return model.unstacked(), unstacked_in_place(model)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("bert_tiny", None),
        ("bert_tiny", range(1, 3)),
        ("albert_tiny", None),  # all layers share a block
        ("deberta_v3_tiny", None),
        ("deberta_tiny", None),  # positions have projections of their own
    ],
)
def test_activations_are_those_of_the_blocks(name, layers):
    plain, stacked = make(name)
    tokens = jax.random.randint(jax.random.key(2), (1, 24), 0, plain.config.vocab_size)
    options = {"cu_seqlens": jnp.array([[0, 9, 24]]), "layers": layers}
    if layers is not None:
        shape = 1, 24, plain.config.d_model
        x = jax.random.normal(jax.random.key(3), shape, jnp.bfloat16)
        options["given"] = x, None
    want = plain.hidden(tokens, **options)
    with recorded() as choices:
        found = stacked.hidden(tokens, **options)
    ops = len(layers or range(3)) if encode_layers.runs(stacked.blocks) else 0
    assert choices.count(("encode_layer", "dense")) == ops
    error = relative_error(found, want.astype(jnp.float32))
    assert error < 4 * RELATIVE[jnp.dtype(jnp.bfloat16)]
    assert np.isfinite(np.float32(found)).all()


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("bert_tiny", {}, True),
        ("bert_tiny", {"norm_bias": False}, True),
        ("bert_tiny", {"activation": "geglu"}, False),
        ("bert_tiny", {"pre_norm": True}, False),
        ("albert_tiny", {}, True),
        ("deberta_v3_tiny", {}, True),
        ("deberta_tiny", {}, False),  # keys have no bias
    ],
)
def test_which_layers_are_one_op(name, changes, expected):
    plain, stacked = make(name, **changes)
    assert encode_layers.runs(stacked.blocks) is expected
    assert not encode_layers.runs(plain.blocks)


def test_projections_are_handed_to_the_next_layers():
    """Those of a layer are computed once, behind the layer before it."""
    _, stacked = make()
    tokens = jax.random.randint(jax.random.key(2), (1, 24), 0, 256)
    bounds = jnp.array([[0, 9, 24]])
    want = stacked.hidden(tokens, cu_seqlens=bounds)
    given = None
    for layers in (range(1), range(1, 3)):
        with recorded() as choices:
            given = stacked.hidden(
                tokens, cu_seqlens=bounds, layers=layers, given=given
            )
        ops = [op for op, _ in choices]
        # Four matmuls a layer but the model's last, which projects nothing.
        assert ops.count("dense") == (1 + 4 if layers.start == 0 else 4 + 3)
    np.testing.assert_array_equal(given, want)
