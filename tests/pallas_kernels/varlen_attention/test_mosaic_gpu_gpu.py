"""The Hopper kernels on a GPU: values, gradients, repeatability, poisoned memory."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.varlen_attention import (
    BackwardBlocks,
    ForwardBlocks,
    MosaicGpuConfig,
    varlen_attention,
    varlen_attention_reference,
)
from pallas_kernels.varlen_attention.config import BACKWARD_TILES
from tests.tolerances import RELATIVE, relative_error


pytestmark = pytest.mark.gpu
BF16 = jnp.dtype(jnp.bfloat16)

AWKWARD = [1, 7, 8, 9, 63, 64, 65, 127, 129, 400]
ZEROS = [0, 65, 0, 0, 129, 1, 0, 700, 0, 0]
ONE_LONG = [3, 1, 2, 900, 1, 1, 4, 7, 9, 2]
LENGTHS = {
    "awkward": (AWKWARD, AWKWARD),
    "zeros": (ZEROS, ZEROS),
    "one long": (ONE_LONG, ONE_LONG),
    "none": ([0] * 10, [0] * 10),
    "cross": (
        [129, 1, 64, 0, 65, 7, 9, 63, 8, 1],
        [7, 127, 65, 8, 0, 64, 63, 566, 1, 8],
    ),
}
TOKENS = 1000
SHORT = MosaicGpuConfig(
    forward=ForwardBlocks(consumers=1, block_k=64, overlap=False),
    backward=BackwardBlocks(consumers=1, block_k=64),
)
LONG = MosaicGpuConfig(forward=ForwardBlocks(), backward=BackwardBlocks(block_q=128))
# (key/value heads of 4, options); sinks and slopes are replaced by arrays.
FEATURES = {
    "full": (4, {}),
    "causal grouped": (2, {"causal": True}),
    "multi-query window": (1, {"window": (40, 20)}),
    "window causal": (4, {"causal": True, "window": (100, None)}),
    "softcap sinks": (2, {"softcap": 2.0, "sinks": True, "causal": True}),
    "alibi": (4, {"alibi_slopes": True}),
}


def operands(tokens, heads, kv_heads, head_dim, dtype=BF16, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [heads, kv_heads, kv_heads, heads]
    return [
        rng.normal(size=(tokens, n, head_dim)).astype(jnp.dtype(dtype)) for n in shapes
    ]


def poison(*arrays):
    """Leaves NaN in freed memory, where the next outputs will lie."""
    jax.block_until_ready([jnp.full(x.shape, jnp.nan, x.dtype) for x in arrays])


def with_gradients(attend):
    """``f(q, k, v, extra, cu_q, cu_k, dout) -> (out, lse, gradients)``, jitted."""

    def run(q, k, v, extra, cu_q, cu_k, dout):
        def of_arrays(q, k, v, extra):
            return attend(q, k, v, cu_q, cu_k, **extra)

        (out, lse), pullback = jax.vjp(of_arrays, q, k, v, extra)
        dlse = jnp.where(jnp.isfinite(lse), 0.1, 0.0)
        return out, lse, pullback((dout.astype(out.dtype), dlse))

    return jax.jit(run)


@functools.cache
def runs(head_dim, window, causal, softcap, config, implementation="mosaic_gpu"):
    """The kernel and the reference: one compilation serves all lengths."""
    options = {"window": window, "softcap": softcap}
    ours = functools.partial(
        varlen_attention,
        causal=causal,
        return_lse=True,
        config=config,
        implementation=implementation,
        **options,
    )
    if causal:
        options["window"] = (window[0], 0)
    definition = functools.partial(
        varlen_attention_reference, scale=head_dim**-0.5, **options
    )
    return with_gradients(ours), with_gradients(definition)


def check(lengths_q, lengths_k, head_dim, kv_heads, options, dtype=BF16, config=None,
          tokens=TOKENS, implementation="mosaic_gpu", value_dim=None):  # fmt: skip
    q, k, v, dout = operands(tokens, 4, kv_heads, head_dim, dtype)
    v, dout = (np.ascontiguousarray(x[..., :value_dim]) for x in (v, dout))
    extra = {
        name: jnp.linspace(0.05, 0.6, 4, dtype=jnp.float32)
        for name in ("sinks", "alibi_slopes")
        if options.get(name)
    }
    ours, definition = runs(
        head_dim,
        options.get("window", (None, None)),
        options.get("causal", False),
        options.get("softcap"),
        config,
        implementation,
    )
    cu = [jnp.asarray(np.cumsum([0, *x]), jnp.int32) for x in (lengths_q, lengths_k)]
    wide = [jnp.asarray(x, jnp.float32) for x in (q, k, v, dout)]
    want = definition(*wide[:3], extra, *cu, wide[3])
    for x, ends in ((q, cu[0]), (k, cu[1]), (v, cu[1]), (dout, cu[0])):
        x[int(ends[-1]) :] = np.nan
    q, k, v, dout = map(jnp.asarray, (q, k, v, dout))
    poison(q, k, v, q)
    got = ours(q, k, v, extra, *cu, dout)
    again = ours(q, k, v, extra, *cu, dout)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
        assert np.array_equal(np.asarray(x), np.asarray(y))
    finite = np.isfinite(want[1])
    assert (np.isfinite(got[1]) == finite).all()
    lse, want_lse = (np.where(finite, x[1], 0.0) for x in (got, want))
    assert relative_error(lse, want_lse) < 1e-3
    got, want = (jax.tree.leaves((x[0], x[2])) for x in (got, want))
    for x, y in zip(got, want, strict=True):
        assert relative_error(x, y) < RELATIVE[jnp.dtype(dtype)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_values_and_gradients(head_dim, feature, lengths):
    check(*LENGTHS[lengths], head_dim, *FEATURES[feature])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("feature", FEATURES)
def test_short_sequences_in_the_kernels_for_long_ones(feature, lengths):
    check(*LENGTHS[lengths], 64, *FEATURES[feature], config=LONG)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("feature", [x for x in FEATURES if x != "alibi"])
def test_kernels_for_short_sequences_in_fp16(feature, lengths):
    check(*LENGTHS[lengths], 64, *FEATURES[feature], jnp.float16, SHORT)


@pytest.mark.parametrize("head_dim", [32, 96, 200])
def test_other_head_dims(head_dim):
    check(AWKWARD, AWKWARD, head_dim, 2, {"causal": True}, jnp.float16)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (136, 72)])
def test_heads_of_latent_attention(head_dim, value_dim, feature, lengths):
    check(*LENGTHS[lengths], head_dim, *FEATURES[feature], value_dim=value_dim)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("head_dim", [96, 80])
def test_heads_that_are_not_padded_to_128(head_dim, feature, lengths):
    check(*LENGTHS[lengths], head_dim, *FEATURES[feature])


@pytest.mark.parametrize(
    "blocks",
    [
        ForwardBlocks(consumers=1, block_k=64),
        ForwardBlocks(consumers=1, overlap=False),
        ForwardBlocks(consumers=3),
        ForwardBlocks(overlap=False, ping_pong=True),
        ForwardBlocks(ping_pong=True),
        ForwardBlocks(block_k=64, stages=4),
        ForwardBlocks(held=1),
        ForwardBlocks(heads=2, block_k=192),
        ForwardBlocks(consumers=4, heads=4, block_k=64, stages=4),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_every_way_to_cut_the_forward_pass(blocks, causal):
    config, heads = MosaicGpuConfig(forward=blocks), 1 if blocks.heads == 4 else 2
    check(AWKWARD, AWKWARD, 64, heads, {"causal": causal}, config=config)


@pytest.mark.parametrize("head_dim", BACKWARD_TILES)
def test_blocks_share_query_heads(head_dim):
    block_q, block_k = BACKWARD_TILES[head_dim]
    blocks = BackwardBlocks(block_q=block_q, block_k=block_k, splits=2)
    config = MosaicGpuConfig(backward=blocks)
    check(AWKWARD, AWKWARD, head_dim, 1, {"causal": True}, config=config)


@pytest.mark.parametrize(("head_dim", "config"), [(64, SHORT), (128, None)])
def test_random_lengths(head_dim, config):
    draw = random.Random(0)
    for _ in range(6):
        number = draw.randrange(1, 9)
        lengths = [draw.choice([0, 1, draw.randrange(1, 300)]) for _ in range(number)]
        lengths = [*lengths, *[0] * (8 - number)]
        options = {"causal": draw.random() < 0.5}
        check(lengths, lengths, head_dim, 2, options, config=config, tokens=2400)


def test_short_gradients_repeat_bit_for_bit_where_the_grid_is_large():
    draw = random.Random(1)
    lengths = [draw.randrange(0, 257) for _ in range(32)]
    q, k, v, dout = map(jnp.asarray, operands(sum(lengths), 12, 12, 64))
    cu = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    ours, definition = runs(64, (None, None), True, None, SHORT)
    first = ours(q, k, v, {}, cu, cu, dout)
    for _ in range(20):
        again = ours(q, k, v, {}, cu, cu, dout)
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            assert bool(jnp.array_equal(x, y))
    wide = [x.astype(jnp.float32) for x in (q, k, v, dout)]
    want = definition(*wide[:3], {}, cu, cu, wide[3])
    for x, y in zip(jax.tree.leaves(first[2]), jax.tree.leaves(want[2]), strict=True):
        assert relative_error(x, y) < RELATIVE[BF16]


@pytest.mark.parametrize("number", [31, 32, 33, 200, 1023])
def test_many_sequences(number):
    draw = random.Random(number)
    lengths = [draw.choice([0, 1, 2, 3]) for _ in range(number - 2)]
    lengths = [70, *lengths, 130]
    check(lengths, lengths, 64, 2, {"causal": True}, config=SHORT, tokens=2400)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_gradients_repeat_bit_for_bit_where_many_blocks_add(head_dim):
    q, k, v, dout = map(jnp.asarray, operands(8192, 8, 2, head_dim))
    cu = jnp.asarray([0, 100, 6000, 8192], jnp.int32)
    run, _ = runs(head_dim, (None, None), True, None, None)
    first = run(q, k, v, {}, cu, cu, dout)
    for _ in range(20):
        again = run(q, k, v, {}, cu, cu, dout)
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            assert bool(jnp.array_equal(x, y))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (300, 0), (200, 100)])
def test_gradients_in_any_order_where_many_blocks_add(head_dim, window):
    q, k, v, dout = map(jnp.asarray, operands(8192, 8, 2, head_dim))
    cu = jnp.asarray([0, 100, 6000, 8190], jnp.int32)
    options = {"window": window, "return_lse": True, "implementation": "mosaic_gpu"}
    ordered = with_gradients(functools.partial(varlen_attention, **options))
    free = with_gradients(
        functools.partial(varlen_attention, deterministic=False, **options)
    )
    want = jax.tree.leaves(ordered(q, k, v, {}, cu, cu, dout)[2])
    for _ in range(20):
        poison(q, q, q, q)
        dq, dk, dv = jax.tree.leaves(free(q, k, v, {}, cu, cu, dout)[2])
        # Dq is summed in another order, dk and dv in one over the queries.
        for x, y in zip((dq, dk, dv), want, strict=True):
            assert relative_error(x, y) < RELATIVE[BF16]
        assert not bool(jnp.any(dq[8190:]))


def test_vmap_scan_and_remat():
    q, k, v, _ = (jnp.stack([jnp.asarray(x)] * 3) for x in operands(512, 4, 2, 64))
    cu = jnp.asarray([[0, 100, 512], [0, 1, 300], [0, 256, 256]], jnp.int32)

    def through(implementation):
        def loss(q, k, v, cu):
            attend = functools.partial(
                varlen_attention, causal=True, implementation=implementation
            )
            step = jax.checkpoint(lambda c, _: (attend(c, k, v, cu) * 0.5, None))
            out, _ = jax.lax.scan(step, q, None, length=2)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2))))(q, k, v, cu)

    for x, y in zip(through("mosaic_gpu"), through("xla"), strict=True):
        assert relative_error(x, y) < 3e-2
