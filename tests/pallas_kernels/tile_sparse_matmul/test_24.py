"""Weights with 2:4 sparsity in their kept rows: format, metadata, kernel."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul.activations import ACTIVATIONS
from pallas_kernels.mosaic import H200
from pallas_kernels.tile_sparse_matmul import (
    TileSparse,
    TileSparse24,
    TileSparseConfig,
    mosaic_gpu,
    tile_sparse_matmul,
)
from pallas_kernels.tile_sparse_matmul.config import Problem, heuristic
from tests.compiled import compile_for_h200
from tests.interpreter import interpret_mosaic_gpu
from tests.pallas_kernels.tile_sparse_matmul.cases import random_mask
from tests.pallas_kernels.tile_sparse_matmul.stand_ins import places_of
from tests.tolerances import RELATIVE, relative_error


BF16, F16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
SMALL = TileSparseConfig(block_tokens=64, stages=3, lag=1, store_slots=1)


def two_of_four(rng, mask, tile, columns=None):
    """At most two of every four kept rows of each column, sometimes none."""
    found = np.zeros_like(mask)
    order = np.arange(mask.shape[1]) if columns is None else columns
    for first in range(0, len(order), tile):
        mine = order[first : first + tile]
        rows = np.flatnonzero(mask[:, mine].any(1))
        for start in range(0, len(rows), 4):
            four = rows[start : start + 4]
            ranks = rng.random((len(four), len(mine))).argsort(0).argsort(0)
            found[np.ix_(four, mine)] = ranks < min(2, len(four))
    return found


def random_24(
    inputs, outputs, tile, counts, granularity: Any = 1, dtype=BF16, pruned=()
):
    """A weight, and its dense form in float32."""
    rng = np.random.default_rng(0)
    kept = np.setdiff1d(np.arange(outputs), pruned)
    mask = np.zeros((inputs, outputs), bool)
    mask[:, kept] = random_mask(rng, inputs, len(kept), tile, counts, granularity)
    columns = kept if len(pruned) else None
    mask = two_of_four(rng, mask, tile, columns)
    dense = np.asarray(jnp.asarray(rng.normal(size=(inputs, outputs)), dtype))
    w = TileSparse24.from_dense(
        dense, mask, tile=tile, granularity=granularity, columns=columns
    )
    return w, np.where(mask, dense.astype(np.float32), 0)


@pytest.mark.parametrize(
    ("weight", "pruned"),
    [
        ((300, 200, 128, [130, 71]), ()),
        ((128, 64, 64, [0]), ()),
        ((256, 256, 256, [192], 64), ()),
        ((100, 200, 64, [100, 3, 50]), tuple(range(3, 50))),
    ],
)
def test_what_was_compressed_comes_back(weight, pruned):
    w, dense = random_24(*weight, pruned=pruned)
    again = jax.tree.unflatten(*jax.tree.flatten(w)[::-1])
    for unpacked in (w.to_dense(), jax.jit(TileSparse24.to_dense)(again)):
        assert unpacked.dtype == BF16
        np.testing.assert_array_equal(np.asarray(unpacked, np.float32), dense)
    kept = w.decompress()
    whole = kept.values.nbytes
    assert 2 * w.values.nbytes == whole
    assert 16 * (w.values.nbytes + w.metadata.nbytes) == 9 * whole


def test_stacked_weights_are_compressed_layer_by_layer():
    layers = [random_24(128, 128, 64, counts)[0] for counts in ([64, 3], [128, 70])]
    stacked = TileSparse24.compress(TileSparse.stack([w.decompress() for w in layers]))
    x = jnp.ones((2, 128, 4), BF16)
    many = jax.vmap(functools.partial(tile_sparse_matmul, feature_major=True))
    ys = many(x, stacked)
    for i, w in enumerate(layers):
        y = tile_sparse_matmul(x[i], w, feature_major=True)
        np.testing.assert_array_equal(np.asarray(ys[i]), np.asarray(y))


def test_metadata_say_what_sparse_tensor_cores_read():
    w, dense = random_24(192, 256, 128, [192, 192])
    values = np.asarray(w.values, np.float32)
    found = np.zeros((2, 128, 192), np.float32)
    for t, b, s in np.ndindex(2, 2, 3):
        block, columns = slice(64 * b, 64 * b + 64), slice(32 * s, 32 * s + 32)
        np.put_along_axis(
            found[t, block, 64 * s : 64 * s + 64],
            places_of(np.asarray(w.metadata)[t, b, s]),
            values[t, block, columns],
            axis=1,
        )
    np.testing.assert_array_equal(found.reshape(256, 192).T, dense)


def normal(seed, shape, dtype=BF16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize(
    ("tokens", "weight", "layout", "changes", "num_sms"),
    [
        # Uneven tiles: none, one row, more than all stages hold; the ring carries over.
        (64, (256, 384, 128, [0, 1, 256]), (True, True), {}, 1),
        # Token-major input is transposed; tokens are padded. The output is turned,
        # also where half of a block, or all of it, lies past the last token.
        (20, (128, 100, 64, [100, 7]), (False, False), {"block_tokens": 128}, 2),
        (72, (128, 256, 128, [100, 7]), (True, False), {"cluster": 2}, 2),
        (200, (128, 192, 64, [1, 64, 3]), (True, False), {"block_tokens": 256}, 1),
        (1, (128, 128, 128, [100]), (False, False), {}, 1),
        (72, (256, 256, 256, [130]), (True, False), {"block_tokens": 128}, 1),
        # Groups of 64 rows, by the copy engine; clusters, one half past the end.
        (192, (256, 256, 128, [64, 192], 64), (True, True), {"cluster": 2}, 2),
        (40, (192, 256, 128, [130, 20]), (True, True), {"splits": 2, "group": 1}, 2),
        # One producer gathers and loads the weights, steps of equal tiles in twos.
        (
            256,
            (256, 256, 128, [130, 190]),
            (True, True),
            {"block_tokens": 256, "ahead": 3},
            1,
        ),
        (64, (256, 128, 128, [256]), (True, True), {"stages": 6, "lag": 4}, 1),
    ],
)
def test_interpreted_kernel_equals_the_reference(
    tokens, weight, layout, changes, num_sms
):
    w, dense = random_24(*weight)
    x, bias = normal(1, (tokens, w.shape[0])), normal(2, (w.shape[1],))
    with interpret_mosaic_gpu(detect_races=True):
        y = np.asarray(
            mosaic_gpu.tile_sparse_matmul(
                x.T if layout[0] else x,
                w,
                bias,
                "gelu",
                feature_major=layout,
                config=dataclasses.replace(SMALL, **changes),
                device=dataclasses.replace(H200, num_sms=num_sms),
            )
        )
    want = x.astype(jnp.float32) @ dense + bias.astype(jnp.float32)
    assert y.dtype == BF16
    y = y.T if layout[1] else y
    assert relative_error(y, ACTIVATIONS["gelu"](want)) < RELATIVE[BF16]


def test_rows_come_in_any_order():
    rng = np.random.default_rng(0)
    whole = random_mask(rng, 256, 256, 128, [130, 71])
    kept, rows = np.zeros_like(whole), np.full((2, 192), -1)
    for t in range(2):
        found = rng.permutation(np.flatnonzero(whole[:, 128 * t]))
        rows[t, : len(found)] = found
        tile = np.ix_(found, np.arange(128 * t, 128 * t + 128))
        ranks = rng.random((-(-len(found) // 4), 4, 128)).argsort(1).argsort(1)
        kept[tile] = (ranks < 2).reshape(-1, 128)[: len(found)]
    dense = np.asarray(jnp.asarray(rng.normal(size=(256, 256)) * kept, BF16))
    plain = TileSparse.from_dense(dense, whole, tile=128)
    w = TileSparse24.compress(plain, rows)
    np.testing.assert_array_equal(np.asarray(w.to_dense()), dense)
    x = normal(1, (256, 64))
    with interpret_mosaic_gpu():
        y = mosaic_gpu.tile_sparse_matmul(
            x, w, feature_major=(True, True), config=SMALL, device=H200
        )
    for found in (y, tile_sparse_matmul(x, w, feature_major=True)):
        want = dense.astype(np.float32).T @ np.asarray(x, np.float32)
        assert relative_error(found, want) < RELATIVE[BF16]
    with pytest.raises(ValueError, match="nonzeros in its kept rows"):
        TileSparse24.compress(plain)
    with pytest.raises(ValueError, match="not as many as the tiles"):
        TileSparse24.compress(plain, np.maximum(rows, 0))
    with pytest.raises(ValueError, match="not those that the tiles"):
        TileSparse24.compress(plain, rows // 2)
    groups = TileSparse.from_dense(dense, np.ones_like(whole), tile=128, granularity=8)
    with pytest.raises(ValueError, match="in another order with granularity 8"):
        TileSparse24.compress(groups, np.tile(np.arange(256)[::-1], (2, 1)))


@pytest.mark.parametrize("layout", [(False, False), (True, False), (True, True)])
def test_public_call_on_any_device(layout):
    w, dense = random_24(128, 192, 64, [60, 128], pruned=range(70, 134))
    x, bias = normal(1, (3, 5, 128)), normal(2, (192,))
    given = jnp.moveaxis(x, -1, 0) if layout[0] else x
    y = tile_sparse_matmul(given, w, bias=bias, activation="silu", feature_major=layout)
    want = x.astype(jnp.float32) @ dense + bias.astype(jnp.float32)
    y = jnp.moveaxis(y, 0, -1) if layout[1] else y
    assert relative_error(y, ACTIVATIONS["silu"](want)) < RELATIVE[BF16]


def test_all_rows_in_another_order_of_groups():
    """Each group is aligned, but all rows are not in order."""
    _, dense = random_24(128, 128, 128, [128])
    whole = np.ones((128, 128), bool)
    plain = TileSparse.from_dense(np.asarray(dense, BF16), whole, tile=128)
    order = np.roll(np.arange(128), 64)[None]
    w = TileSparse24.compress(plain, order)
    x = normal(1, (128, 64))
    with interpret_mosaic_gpu():
        y = mosaic_gpu.tile_sparse_matmul(
            x, w, feature_major=(True, True), config=SMALL, device=H200
        )
    want = np.asarray(dense, np.float32).T @ np.asarray(x, np.float32)
    assert relative_error(y, want) < RELATIVE[BF16]


def changed(kept, granularity, rows):
    """A pattern that says something else."""
    (values, _, *others), (shape, _, *static) = kept.tree_flatten_with_keys()
    leaves = values[1], rows, *(leaf for _, leaf in others)
    return TileSparse.tree_unflatten((shape, granularity, *static), leaves)


@pytest.mark.parametrize(
    ("counts", "whole"), [([256, 256], True), ([256, 64], False), ([256, 0], False)]
)
def test_rows_in_aligned_groups_are_not_gathered(monkeypatch, counts, whole):
    monkeypatch.setattr(mosaic_gpu, "gather_rows", None)
    _, dense = random_24(256, 256, 128, [256, 256])
    mask = np.ones((256, 256), bool)
    mask[counts[1] :, 128:] = False
    dense = np.where(mask, dense, 0)
    plain = TileSparse.from_dense(np.asarray(dense, BF16), mask, tile=128)
    w = TileSparse24.compress(plain)
    assert w.pattern.granularity == 64 and plain.granularity == 1
    # With all rows kept the kernel need not read which they are.
    unread = jnp.full_like(w.pattern.rows, 2**30) if whole else w.pattern.rows
    read = dataclasses.replace(w, pattern=changed(w.pattern, 64, unread))
    gathered = dataclasses.replace(w, pattern=changed(w.pattern, 1, w.pattern.rows))
    x = normal(1, (256, 64))
    run = functools.partial(
        mosaic_gpu.tile_sparse_matmul,
        feature_major=(True, True),
        config=SMALL,
        device=dataclasses.replace(H200, num_sms=1),
    )
    with interpret_mosaic_gpu(detect_races=True):
        y = run(x, read)
        # The same products in the same order as of gathered rows: the same bits.
        monkeypatch.undo()
        np.testing.assert_array_equal(np.asarray(y), np.asarray(run(x, gathered)))
    want = dense.T @ np.asarray(x, np.float32)
    assert relative_error(np.asarray(y), want) < RELATIVE[BF16]


def program(
    devices, tokens, inputs, room, outputs, tile, config, dtype, uneven, rows, majors
):
    """The kernel of a shape, and its arguments, for `compile_for_h200`."""
    tiles = outputs // tile
    where = SingleDeviceSharding(devices[0])
    shape: Any = functools.partial(jax.ShapeDtypeStruct, sharding=where)
    kept = (
        None,
        shape((tiles, room), jnp.int32),
        shape((tiles,), jnp.int32),
        None,
        None,
        shape((tiles,), jnp.int32) if uneven else None,
    )
    static = ((inputs, outputs), rows, not uneven, None)
    w = TileSparse24(
        values=shape((tiles, tile, room // 2), dtype),
        metadata=shape((tiles, tile // 64, room // 64, 128), jnp.int32),
        pattern=TileSparse.tree_unflatten(static, kept),
    )
    x = shape((inputs, tokens) if majors[0] else (tokens, inputs), dtype)
    if config is None:
        config = dataclasses.asdict(heuristic(Problem.of(x, w, majors), H200))
    kernel = functools.partial(
        mosaic_gpu.tile_sparse_matmul,
        feature_major=majors,
        config=TileSparseConfig(**config),
        device=H200,
    )
    return jax.jit(kernel), (x, w)


@pytest.mark.parametrize(
    "case",
    [  # tokens, inputs, room, outputs, tile, config, type, uneven, granularity, majors
        (4096, 4096, 2048, 14336, 128, None, "bfloat16", False, 1, (True, True)),
        (4096, 4096, 2048, 4096, 128, None, "float16", True, 1, (True, False)),
        (4096, 4096, 2048, 4096, 256, None, "bfloat16", True, 1, (True, True)),
        (64, 4096, 2048, 4096, 64, None, "bfloat16", True, 1, (True, True)),
        (4096, 4096, 4096, 14336, 128, None, "bfloat16", False, 64, (True, False)),
    ],
)
def test_kernel_compiles_for_an_h200_without_spills_or_waits(case):
    compiled = compile_for_h200(program, *case)
    assert not any("transpose" in thunk for thunk in compiled.thunks)
    (kernel,) = [k for k in compiled.kernels if "tile_sparse" in k.name]
    assert kernel.spilled == 0 and not compiled.serialized


def placed_program(devices):
    """A residual sum with a product whose columns are put in their places."""
    where = SingleDeviceSharding(devices[0])
    shape: Any = functools.partial(jax.ShapeDtypeStruct, sharding=where)
    integers = ((2, 256), (2,), (256,), (512,), (2,))
    kept = (None, *(shape(dims, jnp.int32) for dims in integers))
    w = TileSparse24(
        values=shape((2, 128, 128), BF16),
        metadata=shape((2, 2, 4, 128), jnp.int32),
        pattern=TileSparse.tree_unflatten(((512, 512), 1, False, None), kept),
    )
    x = shape((4096, 512), BF16)
    call = functools.partial(tile_sparse_matmul, implementation="mosaic_gpu")
    return jax.jit(lambda x, w: x + call(x, w)), (x, w)


def test_columns_are_put_in_their_places_row_by_row():
    """Of the kernel's transpose each value would be read from a line of its own."""
    compiled = compile_for_h200(placed_program)
    transposes = [thunk for thunk in compiled.thunks if "transpose" in thunk]
    assert len(transposes) == 1  # of the input


def test_what_is_wrong_is_refused():
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(64, 64)).astype(np.float32)
    whole = np.ones((64, 64), bool)
    with pytest.raises(ValueError, match="has 4 nonzeros in its kept rows 0 to 3"):
        TileSparse24.from_dense(dense, whole, tile=64)
    with pytest.raises(ValueError, match="tile 32, expected a multiple of 64"):
        TileSparse24.from_dense(dense, whole, tile=32)
    w, _ = random_24(64, 64, 64, [64])
    with pytest.raises(ValueError, match=r"expected \[T, G, P/2\], int32"):
        dataclasses.replace(w, metadata=w.metadata[:, :0])
    x = jnp.ones((64, 8), BF16)
    with pytest.raises(NotImplementedError, match="for inference and has no gradient"):
        jax.grad(lambda x: tile_sparse_matmul(x, w, feature_major=True).sum())(x)
    with pytest.raises(Unsupported, match="only the Hopper kernel"):
        tile_sparse_matmul(x, w, feature_major=True, implementation="triton")
    with pytest.raises(ValueError, match="expected that of x"):
        tile_sparse_matmul(x.astype(F16), w, feature_major=True)
