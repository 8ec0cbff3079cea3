"""Accumulated gradients: those of one device for each way of ZeRO, encoders too."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from jaxscale.models import EncoderModel, encoder_head, encoder_preset
from jaxscale.sharding import fsdp_tp, make_mesh, shardings
from jaxscale.training import accumulated, masked_lm_loss
from tests.tiers import exhaustive
from tests.training.layouts import Layout, errors, rows_of


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2, fsdp=2, tensor=2, zero=1, tensor_parallel="xla"),
        Layout(
            data=2,
            fsdp=4,
            zero=2,
            model="gpt2_tiny",
            packed=False,
            remat="full",
            replicated=True,
            moments_over_data=True,
        ),
        Layout(
            fsdp=2,
            tensor=2,
            zero=1,
            microbatches=1,
            tensor_parallel="fused",
            replicated=True,
            vocab=65,
        ),
        Layout(fsdp=2, context=2, tensor=2, tensor_parallel="xla", windows=(5, None)),
        *exhaustive(
            Layout(data=4, fsdp=2, zero=3, model="gptj_tiny", moments_over_data=True),
            Layout(data=4, fsdp=2, zero=2),
            Layout(
                data=2,
                context=4,
                microbatches=1,
                model="gpt2_tiny",
                packed=False,
                windows=(5,),
            ),
        ),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_one_device(layout):
    found = errors(layout)
    assert max(found.values()) < 1e-5, found


def test_an_encoder_is_accumulated_in_the_same_way():
    config = dataclasses.replace(encoder_preset("bert_tiny"), vocab_size=64)
    rules, batch = fsdp_tp(), rows_of(True)
    loss = masked_lm_loss(chunk_size=3)
    model = EncoderModel(
        config, head=encoder_head(config, "masked_lm"), rules=rules, rngs=nnx.Rngs(0)
    )
    want_sums, want = jax.jit(accumulated(loss))(model, batch)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    with jax.set_mesh(mesh):
        placed = jax.device_put(model, shardings(model, mesh, rules))
        rows = jax.device_put(batch, NamedSharding(mesh, rules.spec("batch")))
        gradients = accumulated(loss, microbatches=2, rules=rules, zero=2)
        sums, got = jax.jit(gradients)(placed, rows)
    for x, y in zip(jax.tree.leaves(sums), jax.tree.leaves(want_sums), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    top = max(np.abs(y).max() for y in jax.tree.leaves(want))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * top)
