"""Attention with operands of 8 bits on a GPU: values, every bit, poisoned memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.varlen_attention import (
    ForwardBlocks,
    MosaicGpuConfig,
    varlen_attention,
)
from tests.pallas_kernels.varlen_attention.test_fp8 import compare, expected, quantized
from tests.pallas_kernels.varlen_attention.test_mosaic_gpu_gpu import (
    FEATURES,
    LENGTHS,
    poison,
)
from tests.tolerances import relative_error


pytestmark = pytest.mark.gpu
TOKENS = 1000


@functools.cache
def run(options, config):
    return jax.jit(
        lambda arrays, cu, more: varlen_attention(
            *arrays,
            *cu,
            return_lse=True,
            implementation="mosaic_gpu",
            config=config,
            **dict(options),
            **more,
        )
    )


def check(lengths, head_dim, feature, config=None):
    kv_heads, options = FEATURES[feature]
    shape = (*LENGTHS[lengths], TOKENS, TOKENS, 4, kv_heads, head_dim)
    arrays, cu, descales, wide = quantized(*shape)
    options = dict(options)
    per_head = [n for n in ("sinks", "alibi_slopes") if options.pop(n, False)]
    extra = dict.fromkeys(per_head, jnp.linspace(0.05, 0.6, 4, dtype=jnp.float32))
    attend = run(tuple(options.items()), config)
    cu = [jnp.asarray(x) for x in cu]
    poison(*wide, *arrays)
    got = jax.tree.map(np.asarray, attend(arrays, cu, descales | extra))
    again = jax.tree.map(np.asarray, attend(arrays, cu, descales | extra))
    for x, y in zip(got, again, strict=True):
        np.testing.assert_array_equal(x, y)
    compare(got, expected(wide, cu, options, extra), int(cu[0][-1]))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_values(head_dim, feature, lengths):
    check(lengths, head_dim, feature)


@pytest.mark.parametrize(
    "blocks",
    [
        ForwardBlocks(block_k=64),
        ForwardBlocks(block_k=192),
        ForwardBlocks(stages=4, held=1),
        ForwardBlocks(stages=4, overlap=False, ping_pong=True),
    ],
)
def test_every_way_to_cut_it(blocks):
    check("cross", 128, "causal grouped", MosaicGpuConfig(forward=blocks))


def test_each_key_has_its_own_weight():
    """Weights and values lie in the order of lanes: each must meet its own key."""
    keys = 256
    q = jnp.zeros((64, 1, 128), jnp.float8_e4m3fn)
    k = jnp.zeros((keys, 1, 128), jnp.float8_e4m3fn)
    logits = np.random.default_rng(0).integers(0, 4, (64, keys)) * np.log(2)
    q = q.at[:, 0, :64].set(jnp.eye(64, dtype=q.dtype))
    # Key j scores logits[i, j] with query i, which picks column i.
    k = k.at[:, 0, :64].set(jnp.asarray(logits.T, k.dtype))
    v = jnp.zeros((2, keys, 1, 128), k.dtype)
    v = v.at[0, np.arange(128), 0, np.arange(128)].set(1)
    v = v.at[1, np.arange(128, 256), 0, np.arange(128)].set(1)
    scores = np.asarray(k, np.float32)[:, 0, :64].T
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    for i in range(2):
        out = varlen_attention(q, k, v[i], scale=1.0, implementation="mosaic_gpu")
        want = weights[:, 128 * i : 128 * (i + 1)]
        assert relative_error(np.asarray(out)[:, 0], want) < 0.07
