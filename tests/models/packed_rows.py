"""Packed rows for models, and losses of what they answer."""

import jax
import jax.numpy as jnp
import numpy as np


def packed_rows(count):
    """Tokens of so many rows, an even number, and where their sequences begin."""
    tokens = np.random.default_rng(0).integers(0, 256, (count, 16))
    bounds = jnp.array([[0, 5, 5, 14, 14], [0, 16, 16, 16, 16]])
    return jnp.asarray(tokens, jnp.int32), jnp.tile(bounds, (count // 2, 1))


def wave_loss(model, tokens, cu_seqlens):
    """Of packed sequences; whole rows are those of tests of logits and of pages."""
    logits = model(tokens, cu_seqlens=cu_seqlens)[:, :14]
    wave = jnp.cos(jnp.arange(14.0)[:, None] + jnp.arange(256.0))
    return (jax.nn.log_softmax(logits) * wave).mean()


@jax.jit
def loss_and_gradients(model, tokens, cu_seqlens=None):
    """Cross-entropy of the next tokens."""

    def loss(model):
        logits = model(tokens, cu_seqlens=cu_seqlens)[:, :14]
        probabilities = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(probabilities, tokens[:, 1:15, None], -1).mean()

    return jax.value_and_grad(loss)(model)


def named(model):
    """The leaves of a model by their paths."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(model)
    }
