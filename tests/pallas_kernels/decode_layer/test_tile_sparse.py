"""A decoder layer of tile-sparse weights: XLA's form, and the kernel interpreted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_layer import (
    DecodeLayerConfig,
    declines,
    decode_layer,
    share,
)
from pallas_kernels.decode_layer.api import _arrays
from pallas_kernels.decode_layer.shares import Shares, make_plan
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


def load_kept_rows(plan, kept, at, closure):
    begins = np.minimum(plan[int(at) : int(at) + 2], closure["last"])
    return np.concatenate([kept.reshape(-1)[begin:][:64] for begin in begins])


def gather_kept(source, indices, closure):
    found = np.zeros((128, closure["rows"]), source.dtype)
    found[:, : len(source)] = source[:, indices].T
    return found.reshape(-1)


def gather_kept_features(source, indices):
    return source[indices].reshape(-1)


def store_two_tiles(smem, values):
    smem[...] = values.reshape(2, 64, -1).swapaxes(1, 2)


register_inline("load_kept_rows", load_kept_rows)
register_inline("gather_kept", gather_kept)
register_inline("gather_kept_features", gather_kept_features)
register_inline("store_two_tiles", store_two_tiles, writes=(0,))


THREADS = np.arange(128)
FEATURES = THREADS // 32 * 16 + THREADS % 32 // 4
"""The first of the two that a thread has."""


def load_part_places(plan, first):
    table = plan[int(first) : int(first) + 128].reshape(64, 2)
    return np.concatenate([table[FEATURES], table[FEATURES + 8]], axis=1).reshape(-1)


def add_sparse_parts(parts, places, eight, closure):
    _, _, _, lines, _ = parts.shape
    of_threads = places.reshape(128, 2, 2)
    table = np.empty((64, 2), np.int32)
    table[FEATURES], table[FEATURES + 8] = of_threads[:, 0], of_threads[:, 1]
    begin, eights = int(eight), closure["eights"]
    found = np.zeros(closure["shape"], np.float32)
    for feature, (where, count) in enumerate(table):
        group, line = divmod(int(where), lines)
        for part in range(count):
            slot, j = divmod(group + 4 * part, 2)
            numbers = parts[slot, j, begin : begin + eights, line]  # [M/8, 8]
            found[feature] += numbers.reshape(-1)
    return found


register_inline("load_part_places", load_part_places)
register_inline("add_sparse_parts", add_sparse_parts)

WEIGHTS = ("out", "gate_up", "down", "qkv")


def pruned(weight, counts, seed, columns=None):
    """A weight whose tiles of 128 columns keep so many rows, any ones.

    Args:
        weight: the dense one.
        counts: of the tiles, in turns.
        seed: of the rows.
        columns: how many columns stay; None is all of them, in order.
    """
    rng = np.random.default_rng(seed)
    k, n = weight.shape
    order = np.arange(n)
    if columns is not None:
        order = rng.permutation(n)[:columns]
    mask = np.zeros((k, n), bool)
    for tile in range(len(order) // 128):
        rows = rng.permutation(k)[: counts[tile % len(counts)]]
        mask[np.ix_(rows, order[tile * 128 : (tile + 1) * 128])] = True
    if columns is None:
        return TileSparse.from_dense(weight, jnp.asarray(mask), tile=128)
    return TileSparse.from_dense(weight, jnp.asarray(mask), tile=128, columns=order)


def sparse(problem, counts, num_sms, columns=None, seed=0):
    """A problem of tile-sparse weights, and its arrays.

    Of `columns` are so many left, of all weights but gate and up.
    """
    given = operands(problem, seed)
    given.pop("next_out", None)
    kept = []
    for i, name in enumerate(WEIGHTS):
        if name in given:
            left = None if name == "gate_up" else columns
            w = pruned(given[name], counts, seed + i, left)
            given[name] = share(w, dataclasses.replace(H200, num_sms=num_sms))
            kept.append(given[name].kept)
    if problem.projects:
        given["next_out"] = given["out"]
    return dataclasses.replace(problem, kept=tuple(kept)), given


def mixed(problem, num_sms, seed=0):
    """A problem some of whose weights, or parts of them, are dense, and its arrays."""
    p, given, kept = problem, operands(problem, seed), []
    queries, keys = p.heads * p.head_dim, p.kv_heads * p.head_dim
    q, k, v = jnp.split(given["qkv"], [queries, queries + keys], axis=1)
    gate, up = jnp.split(given["gate_up"], 2, axis=1)
    parts = {
        "out": [given["out"]],
        "gate_up": [pruned(gate, (5, 190), seed), pruned(up, (64,), seed + 1)],
        "down": [pruned(given["down"], (70, 0), seed + 2, 128)],
        # Those of k have room for fewer steps than those of v, with which they go.
        "qkv": [pruned(q, (64, 200), seed + 3, 128), pruned(k, (1,), seed + 4), v],
    }
    for name, several in parts.items():
        given[name] = share(several, dataclasses.replace(H200, num_sms=num_sms))
        kept.append(given[name].kept)
    given["next_out"] = given["out"]
    return dataclasses.replace(problem, kept=tuple(kept)), given


def run(problem, given, num_sms, **config):
    residual, q, kv, *_ = interpreted(problem, _arrays(given), num_sms, **config)
    return residual, q, kv


EQUAL, UNEVEN = (64,), (130, 0, 64, 63, 1)


@pytest.mark.parametrize(
    ("changes", "counts", "columns", "num_sms", "config"),
    [
        ({"bias": True}, EQUAL, None, 1, {}),
        ({"m": 16, "d_ff": 384}, UNEVEN, None, 2, FEW),
        ({"m": 8, "d_model": 512} | LAST, UNEVEN, None, 5, FEW | {"weight_slots": 3}),
        # Columns left out, an odd number of tiles, and more blocks than steps.
        ({"m": 8, "d_model": 512}, (65, 3, 192), 384, 3, FEW),
        ({"m": 1}, (0, 1), 128, 4, FEW),
    ],
)
def test_interpreted_kernel_equals_the_reference(
    changes, counts, columns, num_sms, config
):
    problem = dataclasses.replace(TINY, **changes)
    problem, given = sparse(problem, counts, num_sms, columns)
    check(problem, given, run(problem, given, num_sms, **config))


@pytest.mark.parametrize(
    ("changes", "num_sms", "config"),
    [({"m": 1}, 1, {}), ({"m": 16, "bias": True, "kv_heads": 2}, 3, FEW)],
)
def test_interpreted_kernel_takes_parts_of_which_some_are_dense(
    changes, num_sms, config
):
    problem, given = mixed(dataclasses.replace(TINY, **changes), num_sms)
    check(problem, given, run(problem, given, num_sms, **config))


def test_a_row_does_not_depend_on_the_others():
    problem, given = sparse(dataclasses.replace(TINY, m=16), UNEVEN, 2)
    found = run(problem, given, 2, **FEW)
    attended = given["attended"].at[8:].multiply(-3)
    again = run(problem, given | {"attended": attended}, 2, **FEW)
    for a, b in zip(found, again, strict=True):
        one, other = (x.T if len(x) == problem.d_model else x for x in (a, b))
        np.testing.assert_array_equal(one[:8], other[:8])
        assert not np.array_equal(one[8:], other[8:])


def test_room_that_no_tile_needs_is_not_read():
    """Past the steps of the fuller tile of a pair."""
    problem, given = sparse(dataclasses.replace(TINY, m=2), UNEVEN, 2)
    want = run(problem, given, 2)
    poisoned = dict(given)
    for name in WEIGHTS:
        (w,) = given[name].parts
        shares = Shares(w.tiles, w.shape[1], given[name].workers, w.room // 64)
        values, counts = np.asarray(w.values).copy(), np.asarray(w.counts)
        plan = np.asarray(given[name].plan)[shares.of_pair : shares.of_feature]
        for *tiles, _, _ in plan.reshape(-1, 4):
            values[tiles, -(-counts[tiles].max() // 64) * 64 :] = np.nan
        assert name != "gate_up" or np.isnan(values).any()
        w = w.with_values(jnp.asarray(values))
        poisoned[name] = dataclasses.replace(given[name], parts=(w,))
    for a, b in zip(run(problem, poisoned, 2), want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "columns"), [({"m": 5, "bias": True}, 128), ({"m": 16} | LAST, None)]
)
def test_xla_equals_the_reference(changes, columns):
    problem = dataclasses.replace(TINY, **changes)
    problem, given = sparse(problem, UNEVEN, 132, columns)
    residual, heads = decode_layer(*arguments(problem, given), eps=EPS)
    heads = heads or (None, None)
    heads = [None if x is None else x.reshape(problem.m, -1) for x in heads]
    check(problem, given, (residual, *heads))


def test_xla_takes_parts_of_which_some_are_dense():
    problem, given = mixed(TINY, 132)
    residual, heads = decode_layer(*arguments(problem, given), eps=EPS)
    assert heads is not None
    check(problem, given, (residual, *(x.reshape(problem.m, -1) for x in heads)))


@pytest.mark.parametrize("workers", [1, 5, 132])
@pytest.mark.parametrize(
    ("tiles", "most", "columns"),
    [(1, 64, False), (7, 500, False), (24, 4000, True), (225, 1024, True)],
)
@pytest.mark.parametrize("after_norm", [False, True])
def test_blocks_share_all_steps_equally(workers, tiles, most, columns, after_norm):
    rng = np.random.default_rng(tiles)
    counts, n, places = rng.integers(0, most, tiles), tiles * 128, None
    counts[: tiles // 3] = 0
    if columns:
        n += 256
        chosen = rng.permutation(n)[: tiles * 128]
        places = np.full(n, tiles * 128)
        places[chosen] = np.arange(tiles * 128)
        places = jnp.asarray(places)
    shares = Shares(tiles, n, workers, -(-most // 64))
    plan = make_plan(jnp.asarray(counts), places, shares, after_norm=after_norm)
    assert isinstance(plan, np.ndarray)  # made without a program
    traced = jax.jit(lambda *given: make_plan(*given, shares, after_norm=after_norm))
    traced = traced(counts, places)
    np.testing.assert_array_equal(traced, plan)
    assert plan.size == shares.size
    of_worker = plan[: shares.of_pair].reshape(-1, 8)
    of_pair = plan[shares.of_pair : shares.of_feature].reshape(-1, 4)
    of_feature = plan[shares.of_feature : shares.of_step].reshape(-1, 2)
    of_step = plan[shares.of_step :].reshape(-1, 2)
    for first, second, before, after in of_pair:
        own = 64 * np.arange(after - before)
        for tile, begins in zip((first, second), of_step[before:after].T, strict=True):
            np.testing.assert_array_equal(begins, tile * shares.depth * 64 + own)
    parts, work = {}, []
    for worker, (number, first, skip, taken, *two, begin, end) in enumerate(of_worker):
        for pair in range(first, first + number):
            before, after = of_pair[pair, 2:]
            steps = range(max(begin - before, 0), min(end, after) - before)
            if pair == first:
                assert steps == range(skip, skip + taken)
                assert two == list(of_pair[pair, :2])
            assert pair + worker not in parts and pair + worker < shares.parts
            parts[pair + worker] = steps
        work.append(end - begin)
    assert len(work) == workers and sum(work) == max(of_pair[:, 3])
    late = work[-4:] if after_norm and workers > 4 else []
    busy = work[: workers - len(late)]
    assert max(busy) - min(busy) <= 1
    # The last blocks have less, or nothing.
    assert all(max(busy) - own >= 6 or own == 0 for own in late)
    packed = np.arange(n) if places is None else np.asarray(places)
    for feature in rng.permutation(n)[:100]:
        where, number = of_feature[feature]
        tile, column = divmod(packed[feature], 128)
        if tile >= tiles:
            assert number == 0
            continue
        group, line = divmod(where, 64)
        assert (group % 2, line) == divmod(column, 64)
        slot, half = divmod(group // 2, 2)
        steps = [k for part in range(number) for k in parts[slot + part]]
        (pair,) = np.flatnonzero(of_pair[:, half] == tile)[:1]
        assert steps == list(range(of_pair[pair, 3] - of_pair[pair, 2]))
        assert len(steps) * 64 >= counts[tile]


def test_errors_say_what_to_do():
    problem, given = sparse(TINY, EQUAL, 132)
    attended, residual, layer, projection = arguments(problem, given)
    dense = operands(TINY)
    with pytest.raises(ValueError, match="all are shared"):
        mixed = dataclasses.replace(layer, down=dense["down"])
        decode_layer(attended, residual, mixed, projection, eps=EPS)
    narrow = TileSparse.from_dense(dense["down"], jnp.ones((256, 256), bool), tile=64)
    with pytest.raises(ValueError, match="prune with such tiles"):
        thin = dataclasses.replace(layer, down=share(narrow, H200))
        decode_layer(attended, residual, thin, projection, eps=EPS)
    with use_device(H200):
        assert declines(attended, residual, layer, projection) is None
    with use_device(H200), pytest.raises(Unsupported, match="tile_k=128 with tile-sp"):
        config = DecodeLayerConfig(tile_k=128)
        options = {"eps": EPS, "implementation": "mosaic_gpu", "config": config}
        decode_layer(attended, residual, layer, projection, **options)
    with use_device(dataclasses.replace(H200, num_sms=114)):
        reason = declines(attended, residual, layer, projection)
    assert "shared by 132 blocks" in str(reason)
