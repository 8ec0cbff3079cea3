"""The Hopper kernels on a CPU: interpreted, both passes, and lowered for CUDA."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.pallas_kernels.varlen_attention.stand_ins  # noqa: F401  registers them
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, check_smem, use_device
from pallas_kernels.varlen_attention import (
    BackwardBlocks,
    ForwardBlocks,
    MosaicGpuConfig,
    api,
    batching,
    scheduler,
    varlen_attention,
    varlen_attention_reference,
)
from pallas_kernels.varlen_attention.backward import (
    FIELDS,
    key_heads_together,
    key_table,
    query_table,
)
from pallas_kernels.varlen_attention.backward_producer import rank_of
from pallas_kernels.varlen_attention.config import (
    HEAD_DIMS,
    Problem,
    backward_blocks,
    backward_smem,
    forward_blocks,
    forward_smem,
)
from pallas_kernels.varlen_attention.forward import tile_table
from pallas_kernels.varlen_attention.inputs import Scores
from pallas_kernels.varlen_attention.scheduler import (
    Sequences,
    most_tiles,
    tile_sequences,
)
from pallas_kernels.varlen_attention.specs import SPECS
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.pallas_kernels.varlen_attention import cases
from tests.tiers import first
from tests.tolerances import RELATIVE, relative_error


BF16 = jnp.dtype(jnp.bfloat16)
kernel: Any = functools.partial(varlen_attention, implementation="mosaic_gpu")
HALF: Any = 0.5
one_sm = dataclasses.replace(H200, num_sms=1)
ALONE = ForwardBlocks(consumers=1, block_k=64)
IN_TURN = dataclasses.replace(ALONE, overlap=False)
NARROW = MosaicGpuConfig(
    forward=ForwardBlocks(block_k=64), backward=BackwardBlocks(block_q=128)
)
SHORT = MosaicGpuConfig(
    forward=ForwardBlocks(consumers=1, block_k=64),
    backward=BackwardBlocks(consumers=1, block_k=64),
)


def operands(tokens, keys, heads, kv_heads, head_dim, dtype=BF16, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(tokens, heads), (keys, kv_heads), (keys, kv_heads), (tokens, heads)]
    return [rng.normal(size=(*s, head_dim)).astype(dtype) for s in shapes]


def gradients(attend, q, k, v, dout, dlse, extra):
    """(out, lse) and the gradients of q, k, v and of what is in `extra`."""

    def run(q, k, v, extra, dout, dlse):
        results, pullback = jax.vjp(attend, q, k, v, extra)
        return *results, pullback((dout.astype(results[0].dtype), dlse))

    return jax.jit(run)(q, k, v, extra, dout, dlse)


def expected(q, k, v, dout, dlse, extra, cu_q, cu_k, options):
    left, right = options.get("window", (None, None))
    window = (left, 0) if options.get("causal") else (left, right)

    def attend(q, k, v, extra):
        return varlen_attention_reference(
            q,
            k,
            v,
            cu_q,
            cu_k,
            window=window,
            scale=options.get("scale", q.shape[-1] ** -0.5),
            softcap=options.get("softcap"),
            **extra,
        )

    cu_q, cu_k = jnp.asarray(cu_q), jnp.asarray(cu_k)
    q, k, v, dout = (np.asarray(x, np.float32) for x in (q, k, v, dout))
    return gradients(attend, q, k, v, dout, dlse, extra)


CASES = {
    # Tiles that start at any row and end before a step does, in padding of NaN.
    "awkward lengths": (
        [7, 1, 129],
        [7, 1, 129],
        (144, 144, 1, 1, 64),
        {},
        NARROW,
    ),
    # More steps than stages, query heads that share keys in two blocks, an empty
    # sequence.
    "one long, causal": (
        [3, 150, 0, 20],
        [3, 150, 0, 20],
        (176, 176, 4, 1, 128),
        {"causal": True},
        MosaicGpuConfig(backward=BackwardBlocks(splits=2)),
    ),
    "cross lengths, window": (
        [5, 100, 0, 9, 3],
        [64, 133, 7, 0, 5],
        (120, 216, 1, 1, 64),
        {"window": (20, 3)},
        NARROW,
    ),
    "everything": (
        [70, 9],
        [139, 5],
        (80, 144, 2, 1, 64),
        {
            "causal": True,
            "window": (60, None),
            "scale": 0.3,
            "softcap": 2.0,
            "sinks": True,
            "alibi_slopes": True,
        },
        NARROW,
    ),
    "scores against the product": (
        [3, 66],
        [9, 5],
        (70, 20, 1, 1, 64),
        {"causal": True, "scale": -0.2},
        NARROW,
    ),
    "fewer tokens than a tile, short": (
        [3, 20],
        [30, 1],
        (40, 37, 1, 1, 64),
        {},
        SHORT,
    ),
    "one long, causal, short": (
        [3, 200, 0, 20],
        [3, 200, 0, 20],
        (225, 225, 4, 2, 64),
        {"causal": True},
        SHORT,
    ),
    "cross lengths, window, short": (
        [5, 100, 0, 9, 3],
        [64, 133, 7, 0, 5],
        (120, 216, 2, 1, 64),
        {"window": (20, 3)},
        SHORT,
    ),
    "everything, short": (
        [70, 129, 9],
        [139, 127, 5],
        (209, 280, 2, 2, 64),
        {
            "causal": True,
            "window": (60, None),
            "scale": 0.3,
            "softcap": 2.0,
            "sinks": True,
        },
        SHORT,
    ),
    "one long, causal, head dim 256": (
        [3, 150, 0, 20],
        [3, 150, 0, 20],
        (176, 176, 4, 1, 256),
        {"causal": True},
        MosaicGpuConfig(backward=BackwardBlocks(block_k=64, splits=2)),
    ),
    "one long, causal, any order": (
        [3, 150, 0, 20],
        [3, 150, 0, 20],
        (176, 176, 2, 1, 64),
        {"causal": True, "deterministic": False},
        NARROW,
    ),
    "cross lengths, window, any order": (
        [5, 100, 0, 9, 3],
        [64, 133, 7, 0, 5],
        (120, 216, 2, 1, 128),
        {"window": (20, 3), "deterministic": False, "alibi_slopes": True},
        None,
    ),
    "one long, any order, head dim 256": (
        [3, 150],
        [3, 150],
        (160, 160, 1, 1, 256),
        {"deterministic": False},
        None,
    ),
    "cross lengths, window, everything, head dim 256": (
        [5, 100, 0, 9, 3],
        [64, 133, 7, 0, 5],
        (120, 216, 1, 1, 256),
        {
            "window": (20, 3),
            "scale": 0.1,
            "softcap": 2.0,
            "sinks": True,
            "alibi_slopes": True,
        },
        None,
    ),
    "cross lengths, window, head dim 96": (
        [5, 100, 0, 9, 3],
        [64, 133, 7, 0, 5],
        (120, 216, 2, 1, 96),
        {"window": (20, 3), "softcap": 2.0, "sinks": True},
        None,
    ),
    "one long, causal, head dim 80": (
        [3, 150, 0, 20],
        [3, 150, 0, 20],
        (176, 176, 4, 1, 80),
        {"causal": True},
        None,
    ),
}


KNOWN = (
    "everything",
    "cross lengths, window, short",
    "fewer tokens than a tile, short",
)
"""Cases whose lengths are known while the program is traced."""


@pytest.mark.parametrize(
    "name",
    first(
        CASES,
        "awkward lengths",
        "cross lengths, window, everything, head dim 256",
        "everything, short",
        "one long, causal",
        "cross lengths, window, any order",
        "cross lengths, window, head dim 96",
    ),
)
def test_interpreted_kernels_equal_the_reference(name):
    lengths_q, lengths_k, shape, options, config = CASES[name]
    q, k, v, dout = operands(*shape)
    heads = shape[2]
    options = dict(options)
    extra = {}
    for key in ("sinks", "alibi_slopes"):
        if options.pop(key, False):
            extra[key] = np.linspace(0.1, 0.7, heads, dtype=np.float32)
    cu_q, cu_k = (
        np.cumsum([0, *lengths], dtype=np.int32) for lengths in (lengths_q, lengths_k)
    )
    dlse = np.random.default_rng(1).normal(size=(shape[0], heads)).astype(np.float32)
    # Of a query that sees nothing, lse is -inf and what arrives is nobody's gradient.
    want = expected(q, k, v, dout, np.zeros_like(dlse), extra, cu_q, cu_k, options)
    blind = ~np.isfinite(want[1])
    dlse[blind], dout[blind] = 0, 0
    want = expected(q, k, v, dout, dlse, extra, cu_q, cu_k, options)
    dlse[blind], dout[blind] = np.nan, np.nan
    for x in (q, dout, dlse):
        x[cu_q[-1] :] = np.nan
    for x in (k, v):
        x[cu_k[-1] :] = np.nan

    def attend(q, k, v, extra):
        cu = cu_q, cu_k
        cu = cu if name in KNOWN else jax.lax.optimization_barrier(cu)
        return kernel(q, k, v, *cu, return_lse=True, config=config, **options, **extra)

    # Race detection reads the stores of two neighbors' rows apart, see stand_ins.
    races = name.startswith("cross lengths, window")
    with use_device(one_sm), interpret_mosaic_gpu(detect_races=races) as run:
        got = jax.tree.map(np.asarray, gradients(attend, q, k, v, dout, dlse, extra))
        assert run.kernels == 2
    tolerance = RELATIVE[BF16]
    finite = np.isfinite(want[1])
    assert (np.isfinite(got[1]) == finite).all()
    assert relative_error(got[1][finite], want[1][finite]) < 1e-4
    assert relative_error(got[0], want[0]) < tolerance
    assert (np.asarray(got[0], np.float32)[cu_q[-1] :] == 0).all()
    for x, y in zip(jax.tree.leaves(got[2]), jax.tree.leaves(want[2]), strict=True):
        assert relative_error(x, y) < tolerance
    for gradient, end in zip(got[2][:3], (cu_q[-1], cu_k[-1], cu_k[-1]), strict=True):
        assert (np.asarray(gradient, np.float32)[end:] == 0).all()


@pytest.mark.parametrize(
    ("head_dims", "options"),
    first(
        [((192, 128), {"causal": True}), ((160, 72), {"window": (60, 20)})],
        ((192, 128), {"causal": True}),
    ),
)
def test_heads_of_latent_attention_are_multiplied_at_their_size(head_dims, options):
    q, k, v, dout = operands(150, 150, 2, 1, head_dims[0])
    v, dout = (x[..., : head_dims[1]] for x in (v, dout))
    cu = np.array([0, 5, 140], np.int32)
    dlse = np.zeros((150, 2), np.float32)
    want = expected(q, k, v, dout, dlse, {}, cu, cu, options)
    for x in (q, k, v, dout):
        x[140:] = np.nan

    def attend(q, k, v, extra):
        return kernel(q, k, v, cu, return_lse=True, **options)

    with use_device(one_sm), interpret_mosaic_gpu() as run:
        got = jax.tree.map(np.asarray, gradients(attend, q, k, v, dout, dlse, {}))
        assert run.kernels == 2
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        finite = np.isfinite(y)
        assert (np.isfinite(x) == finite).all()
        x, y = (np.where(finite, a, 0.0) for a in (x, y))
        assert relative_error(x, y) < RELATIVE[BF16]


@pytest.mark.parametrize("head_dims", [(192, 128), (96, 96), (80, 80)])
def test_heads_are_not_copied(head_dims):
    """The copy engine fills what a head lacks, and stores leave it out."""
    q, v = (jax.ShapeDtypeStruct((4096, 16, n), BF16) for n in head_dims)

    def with_gradients(q, k, v):
        attend = functools.partial(kernel, cu_seqlens_q=np.array([0, 4096]))
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(out)

    with use_device(H200):
        lowered = lower_for_cuda(with_gradients, q, q, v, kernels=2)
    head = "|".join(f"x{n}xbf16" for n in head_dims)
    for line in lowered.splitlines():
        if "stablehlo.pad" in line or "stablehlo.slice" in line:
            assert not re.search(head, line)


@pytest.mark.parametrize("config", [NARROW, SHORT], ids=["long", "short"])
def test_gradients_of_saturated_weights_are_as_good_as_in_plain_jax(config):
    @jax.jit
    def run(q, k, v, dout):
        return jax.vjp(functools.partial(kernel, config=config), q, k, v)[1](dout)

    def gradients(*arrays):
        with use_device(one_sm), interpret_mosaic_gpu():
            return jax.tree.map(np.asarray, run(*arrays))

    cases.assert_gradients_of_saturated_weights(gradients, 70)


@pytest.mark.parametrize(
    ("blocks", "head_dim"),
    [
        (ForwardBlocks(consumers=1, block_k=64), 64),
        (ForwardBlocks(consumers=1, block_k=64, overlap=False), 64),
        (ForwardBlocks(consumers=3, block_k=64), 64),
        (ForwardBlocks(overlap=False, ping_pong=True, block_k=64), 64),
        (ForwardBlocks(block_k=64), 256),
        (ForwardBlocks(block_k=80), 256),
        (ForwardBlocks(consumers=1, block_k=64, overlap=False, held=1), 64),
        (ForwardBlocks(block_k=64, held=1), 128),
        (ForwardBlocks(block_k=64, held=3), 256),
        (ForwardBlocks(block_k=64, heads=2), 64),
        (ForwardBlocks(consumers=4, block_k=64, heads=4), 64),
    ],
)
def test_every_way_to_cut_the_forward_pass(blocks, head_dim):
    heads = blocks.heads
    q, k, v, _ = operands(72, 72, heads, 1, head_dim, jnp.dtype(jnp.float16))
    cu = np.array([0, 3, 70], np.int32)
    want = expected(q, k, v, q, np.zeros(q.shape[:2], np.float32), {}, cu, cu,
                    {"causal": True})  # fmt: skip
    with use_device(one_sm), interpret_mosaic_gpu():
        config = MosaicGpuConfig(forward=blocks)
        arrays = map(jnp.asarray, (q, k, v))
        out = np.asarray(kernel(*arrays, cu, causal=True, config=config))
    assert relative_error(out, want[0]) < RELATIVE[jnp.dtype(jnp.float16)]


@pytest.mark.parametrize(
    ("growth", "blocks", "head_dim"),
    [
        *((g, ALONE, 64) for g in (0.05, 0.5, -0.5)),
        *((g, IN_TURN, 64) for g in (0.05, 0.5, -0.5)),
        *((g, ForwardBlocks(block_k=64), 128) for g in (0.05, 0.5)),
    ],
)
def test_maxima_follow_scores_that_grow(growth, blocks, head_dim):
    """By less than what starts a new maximum in each step of 64 keys; by far more."""
    q, k, v, _ = operands(40, 230, 1, 1, head_dim, jnp.dtype(jnp.float16))
    q[..., 1:] *= 0.1
    q[..., 0] = np.arange(40)[:, None] % 3 == 1  # rows of one warp differ
    k[..., 0] = growth * np.log(2) * np.arange(230)[:, None]
    cu_q, cu_k = np.array([0, 40], np.int32), np.array([0, 230], np.int32)
    want = expected(q, k, v, q, np.zeros(q.shape[:2], np.float32), {}, cu_q, cu_k,
                    {"scale": 1.0})  # fmt: skip
    config = MosaicGpuConfig(forward=blocks)
    with use_device(one_sm), interpret_mosaic_gpu():
        out, lse = map(np.asarray, kernel(*map(jnp.asarray, (q, k, v)), cu_q, cu_k,
                       scale=1.0, config=config, return_lse=True))  # fmt: skip
    assert relative_error(out, want[0]) < RELATIVE[jnp.dtype(jnp.float16)]
    assert relative_error(lse, want[1]) < 1e-4


def test_a_weight_that_dominates_the_sum_is_not_rounded():
    """Next to a maximum that stays, 64.25 would be 64 or 64.5 in bf16: 0.4% off."""
    q, k, v = (np.zeros((n, 1, 64), np.float32) for n in (40, 200, 200))
    q[..., :2] = 1.0
    k[150, 0, :2] = 4.15625, 0.006531  # their sum is log(64.25)
    v[150] = 1.0
    config = MosaicGpuConfig(forward=ForwardBlocks(consumers=1, block_k=64))
    with use_device(one_sm), interpret_mosaic_gpu():
        out = kernel(*(jnp.asarray(x, BF16) for x in (q, k, v)), np.array([0, 40]),
                     np.array([0, 200]), scale=1.0, config=config)  # fmt: skip
    want = 64.25 / (64.25 + 199)
    np.testing.assert_allclose(np.asarray(out, np.float32), want, rtol=2**-9)


@pytest.mark.parametrize("consumers", [1, 2])
def test_traced_bounds_past_the_buffers_are_cut(consumers):
    q, k, v, _ = operands(72, 72, 1, 1, 64)
    config = MosaicGpuConfig(forward=ForwardBlocks(consumers=consumers, block_k=64))
    run = jax.jit(functools.partial(kernel, config=config))
    with use_device(one_sm), interpret_mosaic_gpu():
        got, want = (
            np.asarray(run(q, k, v, np.array([0, 20, end, end + 9], np.int32)))
            for end in (90, 72)
        )
    assert np.isfinite(want.astype(np.float32)).all()
    assert (got == want).all()


def test_short_gradients_in_fp16_with_traced_bounds_past_the_buffers():
    q, k, v, dout = operands(150, 150, 1, 1, 64, jnp.dtype(jnp.float16))
    dlse, cut = np.zeros((150, 1), np.float32), np.array([0, 3, 3, 150], np.int32)
    want = expected(q, k, v, dout, dlse, {}, cut, cut, {"causal": True})[2][:3]

    @jax.jit
    def run(cu, q, k, v, dout):
        attend = functools.partial(kernel, cu_seqlens_q=cu, causal=True, config=SHORT)
        return jax.vjp(attend, q, k, v)[1](dout)

    past = np.array([0, 3, 3, 170], np.int32)
    with use_device(one_sm), interpret_mosaic_gpu():
        got = jax.tree.map(np.asarray, run(past, q, k, v, dout))
    for x, y in zip(got, want, strict=True):
        assert relative_error(x, y) < RELATIVE[jnp.dtype(jnp.float16)]


def test_rows_and_vmap_are_one_call_that_pads_what_the_kernel_needs():
    arrays = [operands(37, 37, 1, 1, 40, seed=s) for s in range(4)]
    q, k, v, dout = (
        np.stack(x).reshape(2, 2, *x[0].shape) for x in zip(*arrays, strict=True)
    )
    cu = np.array(
        [[[0, 20, 20, 30], [0, 35, 36, 37]], [[0, 0, 9, 37], [0, 1, 2, 3]]], np.int32
    )

    def attend(q, k, v, implementation):
        batch = functools.partial(
            varlen_attention, causal=True, implementation=implementation
        )
        out: Any = jax.vmap(batch)(q, k, v, cu)
        return jnp.sum(out.astype(jnp.float32) * np.asarray(dout, np.float32))

    run = jax.jit(jax.value_and_grad(attend, (0, 1, 2)), static_argnums=3)
    want = run(q, k, v, "xla")
    with use_device(one_sm), interpret_mosaic_gpu() as interpreted:
        got = jax.tree.map(np.asarray, run(q, k, v, "mosaic_gpu"))
        assert interpreted.kernels == 2
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(x, y) < RELATIVE[BF16]


def test_more_rows_than_the_kernel_counts_to_are_taken_some_at_a_time(monkeypatch):
    rows, tokens = 3, 20
    arrays = [operands(tokens, tokens, 1, 1, 64, seed=s) for s in range(rows)]
    q, k, v, dout = (np.stack(x) for x in zip(*arrays, strict=True))
    cu = np.array([[0, 20, 20], [0, 3, 17], [0, 0, 9]], np.int32)
    v = jnp.asarray(v[0])

    def attend(q, k, implementation):
        run = functools.partial(varlen_attention, implementation=implementation)
        out: Any = jax.vmap(run, (0, 0, None, 0))(
            q, k, v, cu
        )  # rows share their values
        return jnp.sum(out.astype(jnp.float32) * np.asarray(dout, np.float32))

    run = jax.jit(jax.value_and_grad(attend, (0, 1)), static_argnums=2)
    want = run(q, k, "xla")
    monkeypatch.setattr(batching, "LARGEST_INT", 2 * q[0].size)
    with use_device(one_sm), interpret_mosaic_gpu() as interpreted:
        got = jax.tree.map(np.asarray, run(q, k, "mosaic_gpu"))
        assert interpreted.kernels == 4  # two rows and one, both passes
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(x, y) < RELATIVE[BF16]


@pytest.mark.parametrize("all_pairs", [0, 2**16])
@pytest.mark.parametrize("cost", [None, "length"])
def test_tiles_cover_every_row_once(cost, all_pairs, monkeypatch):
    monkeypatch.setattr(scheduler, "_ALL_PAIRS", all_pairs)
    lengths = [[5, 0, 64, 65], [1, 1, 130, 0]]
    cu = np.stack([np.cumsum([0, *row]) for row in lengths]).astype(np.int32)
    seqs = Sequences.of(jnp.asarray(cu), jnp.asarray(cu), 140, 140)
    slots = most_tiles(2, 140, 4, 64)
    by = None if cost is None else seqs.k_end - seqs.k_start
    tiles = tile_sequences(seqs.q_start, seqs.q_end, by, 64, slots)
    assert (tiles.sequence is None) == (all_pairs > 0)
    names = tiles.of(jnp.arange(len(seqs.row), dtype=jnp.int32))
    table = tiles.table([names, tiles.index, jnp.ones_like(tiles.index)], total=True)
    sequence, index, used, totals = np.asarray(table).T
    total = totals[0]
    assert (totals == total).all()
    assert used.tolist() == [1] * total + [0] * (slots - total)
    assert (np.asarray(table)[total:, :3] == 0).all()
    first = np.asarray(tiles.first)
    assert (first[sequence] + index)[used == 1].tolist() == list(range(total))
    covered = np.zeros((2, 140), int)
    start, end = np.asarray(seqs.q_start), np.asarray(seqs.q_end)
    for e, i in zip(sequence[used == 1], index[used == 1], strict=True):
        rows = slice(start[e] + i * 64, min(start[e] + (i + 1) * 64, end[e]))
        covered[np.asarray(seqs.row)[e], rows] += 1
    assert (covered == 1).all()
    if by is not None:
        costs = np.asarray(by)[sequence[used == 1]]
        assert (np.diff(costs) <= 0).all()


@pytest.mark.parametrize(
    "window", [(None, None), (None, 0), (70, 0), (30, 100), (90, None)]
)
@pytest.mark.parametrize(("block_q", "block_k"), [(64, 64), (64, 128), (128, 128)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_tiles_of_keys_add_one_by_one_and_wait_for_earlier_blocks_alone(
    window, block_q, block_k, deterministic, monkeypatch
):
    rng = np.random.default_rng(0)
    blocks = BackwardBlocks(block_q=block_q, block_k=block_k)
    scores = Scores(window, deterministic=deterministic)
    for _ in range(8):
        lengths = rng.integers(0, rng.choice([40, 700]), (2, 4))
        cu_q, cu_k = np.cumsum(np.pad(lengths, ((0, 0), (1, 0))), 1, dtype=np.int32)
        rows, keys = 2800, 2803  # of one size, for one compilation
        problem = Problem(
            rows=1, queries=rows, keys=keys, max_seqs=4, heads=1, kv_heads=1,
            head_dim=64, dtype=BF16,
        )  # fmt: skip
        seqs = Sequences.of(
            jnp.asarray(cu_q)[None], jnp.asarray(cu_k)[None], rows, keys
        )
        q_end = jnp.where(seqs.real == 1, seqs.q_end, seqs.q_start)
        slots = most_tiles(1, rows, 4, block_q)
        tiles = tile_sequences(seqs.q_start, q_end, None, block_q, slots)
        table = key_table(problem, scores, blocks, seqs, tiles.first)
        with monkeypatch.context() as patch:  # as with many sequences
            patch.setattr(scheduler, "_ALL_PAIRS", 0)
            same = key_table(problem, scores, blocks, seqs, tiles.first)
        assert (same == table).all()
        tile = {name: table[:, i, None] for i, name in enumerate(FIELDS)}
        index = jnp.arange(-(-rows // block_q), dtype=jnp.int32)
        ranks = np.broadcast_to(
            rank_of(scores, blocks, tile, index), (len(table), len(index))
        )
        turns, longest = {}, {}
        for line, ranks_of_line in zip(np.asarray(table), ranks, strict=True):
            tile = dict(zip(FIELDS, line.tolist(), strict=True))
            for i in range(tile["first"], tile["last"] if tile["k_stop"] > 0 else 0):
                turns.setdefault(tile["q_tile"] + i, []).append(int(ranks_of_line[i]))
            longest.setdefault(tile["q_tile"], []).append(tile["last"] - tile["first"])
        # Lines are in the order of the grid.
        assert turns
        assert all(ranks == list(range(len(ranks))) for ranks in turns.values())
        if window == (None, 0) and not deterministic:
            assert all(x == sorted(x, reverse=True) for x in longest.values())


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (30, 100)])
def test_tables_of_known_lengths_are_those_of_traced_ones(window, many, monkeypatch):
    if many:
        monkeypatch.setattr(scheduler, "_ALL_PAIRS", 0)
        monkeypatch.setattr(scheduler, "_PAIRWISE", 0)
    rng = np.random.default_rng(0)
    problem = Problem(rows=2, queries=900, keys=903, max_seqs=4, heads=1, kv_heads=1,
                      head_dim=64, dtype=BF16)  # fmt: skip
    scores = Scores(window)
    forward, backward = ForwardBlocks(), BackwardBlocks()

    def tables(cu_q, cu_k):
        seqs = Sequences.of(cu_q, cu_k, 900, 903)
        slots = most_tiles(2, 900, 4, backward.block_q)
        tiles = tile_sequences(seqs.q_start, seqs.q_end, None, backward.block_q, slots)
        return (
            tile_table(problem, scores, forward, seqs),
            query_table(scores, backward, seqs, tiles),
            key_table(problem, scores, backward, seqs, tiles.first),
        )

    traced = jax.jit(tables)
    for most in (20, 220, 220):
        lengths = rng.integers(0, most, (2, 2, 4))
        cu = np.cumsum(np.pad(lengths, ((0, 0), (0, 0), (1, 0))), 2, dtype=np.int32)
        for known, found in zip(tables(*cu), traced(*cu), strict=True):
            assert isinstance(known, np.ndarray) and known.dtype == np.int32
            np.testing.assert_array_equal(known, found)


def test_calls_outside_of_a_program_are_not_compiled_for_their_lengths():
    q, k, v, _ = map(jnp.asarray, operands(16, 16, 1, 1, 8))
    programs = []
    for cut in (3, 4):
        varlen_attention(q, k, v, np.array([0, cut, 16]), implementation="xla")
        programs.append(api._one_program._cache_size())
    assert programs[0] == programs[1]


def problem_of(spec):
    return Problem(
        rows=1,
        queries=-(-sum(spec.lengths_q) // 8) * 8,
        keys=-(-sum(spec.lengths_k) // 8) * 8,
        max_seqs=len(spec.lengths_q),
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=96 if spec.head_dim == 80 else spec.head_dim,
        dtype=BF16,
        value_dim=spec.value_dim,
    )


def test_one_warpgroup_takes_short_sequences_and_few_tiles():
    def blocks(seqs, length, heads=12, keys=None, groups=1, alibi=False, **options):
        problem = Problem(rows=1, queries=seqs * length, keys=seqs * (keys or length),
                          max_seqs=seqs, heads=heads, kv_heads=heads // groups,
                          head_dim=64, dtype=BF16)  # fmt: skip
        return forward_blocks(problem, H200, alibi, **options)

    def consumers(*shape, **options):
        return blocks(*shape, **options).consumers

    assert consumers(16, 384) == 1 and consumers(16, 448) == 2
    assert consumers(16, 512) == 3 and consumers(16, 512, window=(None, 0)) == 2
    assert consumers(1, 1024) == 1 and consumers(1, 1024, keys=16384) == 3
    assert consumers(1, 1024, heads=64) == 3  # more tiles than fit at once
    assert consumers(8, 1024, heads=64, window=(127, 0)) == 1
    assert consumers(8, 1024, heads=64, window=(64, 64)) == 1
    assert consumers(8, 1024, heads=64, window=(128, 1)) == 3
    assert consumers(8, 1024, heads=64, window=(1023, 0)) == 3
    assert consumers(8, 1024, heads=64, window=(None, 0)) == 3
    assert consumers(1024, 8) == 2  # too many to search through
    grouped = {"heads": 64, "groups": 8, "window": (127, 0)}
    for length, options, heads in (
        (1024, {}, 4),
        (384, {}, 1),
        (1024, {"alibi": True}, 1),
        (1024, {"groups": 2}, 1),
        (1024, {"window": (None, 0)}, 1),
    ):
        assert blocks(8, length, **grouped | options).heads == heads


def test_steps_of_8_bits_are_long_where_all_but_the_last_are_whole():
    def block_k(length, head_dim=128, window=(None, None)):
        problem = Problem(rows=1, queries=4 * length, keys=4 * length, max_seqs=4,
                          heads=16, kv_heads=16, head_dim=head_dim,
                          dtype=jnp.dtype(jnp.float8_e4m3fn))  # fmt: skip
        blocks = forward_blocks(problem, H200, window=window)
        check_smem(forward_smem(problem, blocks), H200, "8 bits")
        return blocks.block_k

    assert block_k(2048) == 192 and block_k(2047) == 128
    assert block_k(4096, window=(None, 0)) == block_k(4096, 64) == 128
    assert block_k(4096, 256) == 64


def test_steps_of_heads_of_256_fill_shared_memory():
    def blocks(alibi=False, page=None):
        problem = Problem(rows=1, queries=4096, keys=4096, max_seqs=4, heads=8,
                          kv_heads=4, head_dim=256, dtype=BF16, page=page)  # fmt: skip
        found = forward_blocks(problem, H200, alibi)
        check_smem(forward_smem(problem, found), H200, "heads of 256")
        return found.block_k

    assert (blocks(), blocks(alibi=True), blocks(page=64)) == (80, 64, 64)


def test_one_warpgroup_takes_gradients_of_short_sequences_and_few_tiles():
    def consumers(
        seqs, length, heads=12, keys=None, alibi=False, head_dim=64, **options
    ):
        problem = Problem(rows=1, queries=seqs * length, keys=seqs * (keys or length),
                          max_seqs=seqs, heads=heads, kv_heads=12, head_dim=head_dim,
                          dtype=BF16)  # fmt: skip
        return backward_blocks(problem, H200, alibi, **options).consumers

    assert consumers(64, 256) == 1 and consumers(64, 257) == 2
    assert consumers(64, 256, alibi=True) == consumers(64, 256, head_dim=128) == 2
    assert consumers(64, 256, keys=1024) == 2
    assert consumers(1, 1024) == 1 and consumers(1, 1088) == 2
    assert consumers(1, 512, heads=24) == 1 and consumers(1, 640, heads=24) == 2
    assert consumers(1024, 8) == 2  # too many to search through
    assert consumers(64, 1024, window=(64, 64)) == 1
    assert consumers(64, 1024, window=(64, 65)) == 2
    assert consumers(64, 1024, window=(None, 0)) == 2
    assert consumers(64, 1024, window=(64, 64), alibi=True) == 2
    assert consumers(64, 1024, window=(64, 64), head_dim=128) == 2


def test_shared_memory_suffices_for_every_spec():
    for spec in SPECS:
        problem = problem_of(spec)
        blocks = forward_blocks(problem, H200)
        check_smem(forward_smem(problem, blocks), H200, spec.name)
        if problem.head_dim not in HEAD_DIMS:  # gradients are those of larger heads
            head_dim = min(n for n in HEAD_DIMS if n > problem.head_dim)
            problem = dataclasses.replace(problem, head_dim=head_dim)
        blocks = backward_blocks(problem, H200)
        check_smem(backward_smem(problem, blocks), H200, spec.name)


def test_lowers_inside_shard_map_over_heads_and_data():
    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2, 2), ("d", "t"), (jax.sharding.AxisType.Auto,) * 2)
    cu = np.array([0, 100, 256], np.int32)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("d", None, "t"),) * 3,
        out_specs=P("d", None, "t"),
    )
    def attend(q, k, v):
        return jax.vmap(lambda *x: kernel(*x, cu, causal=True))(q, k, v)

    def loss(*x):
        return jnp.sum(attend(*x).astype(jnp.float32))

    x = jax.ShapeDtypeStruct((2, 256, 4, 64), BF16)
    with use_device(H200):
        lower_for_cuda(jax.grad(loss, (0, 1, 2)), x, x, x, kernels=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": np.float32}, "takes bfloat16 or float16"),
        ({"head_dim": 320}, "takes at most 256"),
        ({"config": object()}, "takes a MosaicGpuConfig"),
        ({"blocks": ForwardBlocks(stages=8)}, "bytes of shared memory"),
        ({"blocks": ForwardBlocks(block_k=80), "head_dim": 64}, "block_k=80 takes val"),
        ({"blocks": ForwardBlocks(block_k=80, consumers=1)}, "got 128 columns of bflo"),
    ],
)
def test_what_the_kernel_cannot_do_names_a_way_out(change, message):
    head_dim = change.get("head_dim", 128)
    dtype = jnp.dtype(change.get("dtype", BF16))
    q, k, v, _ = map(jnp.asarray, operands(64, 64, 1, 1, head_dim, dtype))
    config = change.get("config")
    if "blocks" in change:
        config = MosaicGpuConfig(forward=change["blocks"])
    with use_device(H200), pytest.raises(Unsupported, match=message):
        kernel(q, k, v, np.array([0, 64]), config=config)


def test_gradients_take_the_tiles_of_their_head_dim():
    q, k, v, _ = map(jnp.asarray, operands(64, 64, 1, 1, 256))
    config = MosaicGpuConfig(backward=BackwardBlocks())
    attend = functools.partial(kernel, cu_seqlens_q=np.array([0, 64]), config=config)
    message = r"block_q, block_k = \(64, 128\) with head dim 256, expected \(64, 64\)"
    with use_device(H200), pytest.raises(Unsupported, match=message):
        jax.eval_shape(lambda *x: jax.vjp(attend, *x)[1](x[0]), q, k, v)


@pytest.mark.parametrize(
    ("tokens", "max_seqs", "heads", "together"),
    [
        (32768, 1, 16, 1),
        (16384, 1, 16, 2),
        (16384, 2, 16, 4),
        (16384, 4, 16, 8),
        (16384, 16, 16, 8),
        (64, 16, 12, 6),
    ],
)
def test_heads_whose_gradients_run_side_by_side_fit_in_the_cache(
    tokens, max_seqs, heads, together
):
    problem = Problem(
        rows=1,
        queries=tokens,
        keys=tokens,
        max_seqs=max_seqs,
        heads=heads,
        kv_heads=heads,
        head_dim=128,
        dtype=BF16,
    )
    assert key_heads_together(problem, BackwardBlocks()) == together


def test_blocks_search_among_so_many_sequences_at_most():
    q, k, v, _ = map(jnp.asarray, operands(64, 64, 1, 1, 64))
    config = MosaicGpuConfig(forward=ForwardBlocks(consumers=1))
    message = "consumers=1 takes no relative bias and at most 1023 sequences, got 1024"
    with use_device(H200), pytest.raises(Unsupported, match=message):
        kernel(q, k, v, np.zeros(1025, np.int32), config=config)


@pytest.mark.parametrize(
    ("head_dim", "sequences", "alibi", "message"),
    [
        (128, 1, False, "takes head dim 64, .* got head dim 128 and 1 sequences"),
        (64, 1024, False, "at most 1023 sequences, got head dim 64 and 1024"),
        (64, 1, True, "no ALiBi"),
    ],
)
def test_what_short_gradients_cannot_do_is_said(head_dim, sequences, alibi, message):
    q, k, v, _ = map(jnp.asarray, operands(64, 64, 1, 1, head_dim))
    extra = {"alibi_slopes": jnp.ones(1)} if alibi else {}
    config = MosaicGpuConfig(backward=SHORT.backward)
    cu = np.zeros(sequences + 1, np.int32)
    attend = functools.partial(kernel, cu_seqlens_q=cu, config=config, **extra)
    with use_device(H200), pytest.raises(Unsupported, match=message):
        jax.eval_shape(lambda *x: jax.vjp(attend, *x)[1](x[0]), q, k, v)


def test_needs_a_hopper_gpu():
    q, k, v, _ = map(jnp.asarray, operands(64, 64, 1, 1, 64))
    with pytest.raises(Unsupported, match="Hopper"):
        kernel(q, k, v, np.array([0, 64]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ForwardBlocks(consumers=5), "consumers 5, expected one of"),
        (lambda: ForwardBlocks(heads=3), "heads 3, expected one of"),
        (lambda: ForwardBlocks(stages=1), "stages 1, expected at least 2"),
        (lambda: ForwardBlocks(consumers=3, ping_pong=True), "expected 2 of them"),
        (lambda: BackwardBlocks(consumers=3), "consumers 3, expected one of"),
        (lambda: BackwardBlocks(block_q=96), "block_q 96, expected one of"),
        (lambda: BackwardBlocks(block_k=256), "block_k 256, expected one of"),
        (lambda: ForwardBlocks(stages=HALF), "stages 0.5, expected an integer"),
        (lambda: BackwardBlocks(splits=0), "splits 0, expected at least 1"),
        (lambda: BackwardBlocks(splits=HALF), "splits 0.5, expected an integer"),
        (lambda: ForwardBlocks(held=5), "held 5, expected one of"),
        (lambda: BackwardBlocks(held=-1), "held -1, expected one of"),
        (lambda: BackwardBlocks(consumers=1, held=1), "held 1 .* expected 2 of them"),
    ],
)
def test_blocks_are_checked(no_shape_hook, make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_each_pass_takes_its_own_blocks(no_shape_hook):
    message = r"forward BackwardBlocks\(.*\), expected ForwardBlocks or None"
    blocks: Any = BackwardBlocks()
    with pytest.raises(TypeError, match=message):
        MosaicGpuConfig(forward=blocks)
