"""A decoder layer of tile-sparse weights: XLA's form, and the kernel interpreted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_layer import decode_layer
from pallas_kernels.decode_layer.config import Kept, Problem
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
