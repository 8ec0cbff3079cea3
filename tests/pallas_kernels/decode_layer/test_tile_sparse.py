"""A decoder layer of tile-sparse weights: XLA's form, and the kernel interpreted."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_layer import declines, decode_layer
from pallas_kernels.decode_layer.config import DecodeLayerConfig, Kept, Schedule
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.tile_sparse_matmul import TileSparse
from tests.interpreter import register_inline
from tests.pallas_kernels.decode_layer.test_decode_layer import (
    EPS,
    FEW,
    LAST,
    TINY,
    arguments,
    check,
    interpreted,
    operands,
)


def load_kept_rows(kept, first, second):
    kept = kept.reshape(-1)
    return np.concatenate([kept[int(at) : int(at) + 64] for at in (first, second)])


def gather_kept(source, indices, closure):
    found = np.zeros((128, closure["rows"]), source.dtype)
    found[:, : len(source)] = source[:, indices].T
    return found.reshape(-1)


def store_two_tiles(smem, values):
    smem[...] = values.reshape(2, 64, -1).swapaxes(1, 2)


register_inline("load_kept_rows", load_kept_rows)
register_inline("gather_kept", gather_kept)
register_inline("store_two_tiles", store_two_tiles, writes=(0,))

WEIGHTS = ("out", "gate_up", "down", "qkv")


def pruned(weight, counts, seed):
    """A weight whose tiles of 128 columns keep so many rows, any ones."""
    rng = np.random.default_rng(seed)
    k, n = weight.shape
    mask = np.zeros((k, n), bool)
    for tile in range(n // 128):
        rows = rng.permutation(k)[: counts[tile % len(counts)]]
        mask[rows, tile * 128 : (tile + 1) * 128] = True
    return TileSparse.from_dense(weight, jnp.asarray(mask), tile=128)


def sparse(problem, counts, seed=0):
    """A problem of tile-sparse weights, its arrays, and these as the public ones."""
    given, public = operands(problem, seed), {}
    given.pop("next_out", None)
    kept = []
    for i, name in enumerate(WEIGHTS):
        if name not in given:
            continue
        w = pruned(given[name], counts, seed + i)
        public[name] = w
        kept.append(Kept(w.room, not w.equal_counts))
        given[name], given[f"{name}_rows"] = w.values, w.rows
        given[f"{name}_counts"] = w.counts
    if problem.projects:
        given["next_out"] = given["out"].reshape(-1, 32 * 128)
        public["next_out"] = public["out"]
    problem = dataclasses.replace(problem, kept=tuple(kept))
    return problem, given, {**given, **public}


EQUAL, UNEVEN = (64,), (130, 0, 64, 63, 1)


@pytest.mark.parametrize(
    ("changes", "counts", "num_sms", "config"),
    [
        ({"bias": True}, EQUAL, 1, {}),
        ({"m": 16, "d_ff": 384}, UNEVEN, 2, FEW),
        ({"m": 8, "d_model": 512} | LAST, UNEVEN, 3, FEW | {"weight_slots": 3}),
    ],
)
def test_interpreted_kernel_equals_the_reference(changes, counts, num_sms, config):
    problem, given, _ = sparse(dataclasses.replace(TINY, **changes), counts)
    check(problem, given, interpreted(problem, given, num_sms, **config))


def test_a_row_does_not_depend_on_the_others():
    problem, given, _ = sparse(dataclasses.replace(TINY, m=16), UNEVEN)
    found = interpreted(problem, given, 2, **FEW)
    attended = given["attended"].at[8:].multiply(-3)
    again = interpreted(problem, given | {"attended": attended}, 2, **FEW)
    for a, b in zip(found, again, strict=True):
        one, other = (x.T if len(x) == problem.d_model else x for x in (a, b))
        np.testing.assert_array_equal(one[:8], other[:8])
        assert not np.array_equal(one[8:], other[8:])


def test_room_that_no_tile_needs_is_not_read():
    """Past the steps of the fuller tile of a column: values and indices."""
    problem, given, _ = sparse(dataclasses.replace(TINY, m=2), UNEVEN)
    want = interpreted(problem, given, 2)
    poisoned = dict(given)
    for stage in schedule_of(problem).stages:
        name, counts = stage.weight, np.asarray(given[f"{stage.weight}_counts"])
        values = np.asarray(given[name]).copy()
        for column in range(stage.columns):
            tiles = list(stage.sparse_tiles(column))
            values[tiles, -(-counts[tiles].max() // 64) * 64 :] = np.nan
        poisoned[name] = jnp.asarray(values)
    for a, b in zip(interpreted(problem, poisoned, 2), want, strict=True):
        np.testing.assert_array_equal(a, b)


def schedule_of(problem):
    return Schedule(problem=problem, config=DecodeLayerConfig(), device=H200)


@pytest.mark.parametrize("changes", [{"m": 5, "bias": True}, {"m": 16} | LAST])
def test_xla_equals_the_reference(changes):
    problem = dataclasses.replace(TINY, **changes)
    problem, given, public = sparse(problem, UNEVEN)
    residual, heads = decode_layer(*arguments(problem, public), eps=EPS)
    heads = [
        None if x is None else x.reshape(problem.m, -1) for x in heads or (None,) * 2
    ]
    check(problem, given, (residual, *heads))


def test_errors_say_what_to_do():
    problem, _, public = sparse(TINY, EQUAL)
    attended, residual, layer, projection = arguments(problem, public)
    dense = operands(TINY)
    with pytest.raises(ValueError, match="all are tile-sparse"):
        mixed = dataclasses.replace(layer, down=dense["down"])
        decode_layer(attended, residual, mixed, projection, eps=EPS)
    columns = np.arange(256)
    w = TileSparse.from_dense(
        dense["down"], jnp.ones((256, 256), bool), tile=128, columns=columns[::-1]
    )
    with pytest.raises(Unsupported, match=r"down .* pruned columns"):
        pruned_columns = dataclasses.replace(layer, down=w)
        decode_layer(attended, residual, pruned_columns, projection, eps=EPS)
    narrow = TileSparse.from_dense(dense["down"], jnp.ones((256, 256), bool), tile=64)
    with use_device(H200):
        args = attended, residual, dataclasses.replace(layer, down=narrow), projection
        assert "tiles of 64 columns" in str(declines(*args))
        assert declines(attended, residual, layer, projection) is None
