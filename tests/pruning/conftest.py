"""A small decoder, and batches for it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import Decoder
from jaxscale.models.families.llama import llama_tiny
from jaxscale.nn.packing import PackedBatch
from jaxscale.training.step import next_token_loss


CONFIG = dataclasses.replace(
    llama_tiny(),
    vocab_size=32,
    d_model=32,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


@pytest.fixture(scope="session")
def made():
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture
def model(made):
    """A copy, which a test may change and donate."""
    return jax.tree.map(jnp.copy, made)


def mean_loss(model, batch):
    total, sums = next_token_loss(chunk_size=8)(model, batch)
    return total / jnp.maximum(sums.tokens, 1).astype(jnp.float32)


def batches(count, rows=2, length=16, padding=0):
    """Packed rows of two sequences, with `padding` tokens behind them."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(count):
        tokens = rng.integers(0, 32, (rows, length + 1)).astype(np.int32)
        end = length - padding
        bounds = np.array([0, 5, end], np.int32)
        found.append(
            PackedBatch(
                tokens=jnp.asarray(tokens[:, :-1]),
                targets=jnp.asarray(tokens[:, 1:]),
                loss_mask=jnp.asarray(np.tile(np.arange(length) < end, (rows, 1))),
                cu_seqlens=jnp.asarray(np.tile(bounds, (rows, 1))),
            )
        )
    return found


def perturbed(model, seed=0):
    """The model with scales and biases that are not all one or zero."""
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    return jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape, x.dtype), model
    )
