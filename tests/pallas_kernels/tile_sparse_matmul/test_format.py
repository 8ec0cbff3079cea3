"""The packed weight: round trips, what is refused, files."""

# Wrong types are passed on purpose.

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.tile_sparse_matmul import (
    TileSparse,
    files,
    load_tile_sparse,
    save_tile_sparse,
)
from tests.pallas_kernels.tile_sparse_matmul.cases import random_mask, random_weight


SMALL = (24, 12, 4, [5, 0, 24])  # inputs, outputs, tile, counts


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_round_trip_of_random_weights(data):
    granularity = data.draw(st.sampled_from([1, 8]))
    inputs = granularity * data.draw(st.integers(1, 6))
    outputs, tile = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 8))
    pruned = data.draw(st.sets(st.integers(0, outputs - 1), max_size=outputs - 1))
    tiles = -(-(outputs - len(pruned)) // tile)
    counts = [
        granularity * data.draw(st.integers(0, inputs // granularity))
        for _ in range(tiles)
    ]
    w, dense, mask = random_weight(
        inputs, outputs, tile, counts, granularity, pruned=sorted(pruned)
    )
    np.testing.assert_array_equal(w.to_dense(), dense)
    np.testing.assert_array_equal(w.mask(), mask)
    np.testing.assert_array_equal(w.counts, counts)
    if not pruned:
        assert w.columns is None and w.places is None
    else:
        packed = w.packed().to_dense()
        placed = jnp.take(packed, w.places, axis=1, mode="fill", fill_value=0)
        np.testing.assert_array_equal(placed, dense)
        assert w.packed().places is None
    assert w.sparsity == pytest.approx(1 - mask.mean())
    assert w.equal_counts == (len(set(counts)) == 1)
    if w.equal_counts:
        assert w.order is None
    else:
        by_count = sorted(range(tiles), key=lambda t: -counts[t])
        np.testing.assert_array_equal(w.order, by_count)
    again = TileSparse(
        w.values,
        w.rows,
        w.counts,
        w.columns,
        shape=w.shape,
        granularity=granularity,
    )
    np.testing.assert_array_equal(again.to_dense(), dense)


def test_order_of_a_stack():
    """Equal tiles stack with uneven ones, and may be taken as they come."""
    uneven, _, _ = random_weight(24, 12, 4, [3, 1, 17])
    equal, _, _ = random_weight(24, 12, 4, [17, 17, 17])
    assert TileSparse.stack([equal, equal]).order is None
    mixed = TileSparse.stack([equal, uneven])
    np.testing.assert_array_equal(mixed.order, [[0, 1, 2], [2, 0, 1]])


def test_jit_vmap_scan_and_shard_map():
    weights = [random_weight(*SMALL, seed=seed) for seed in range(2)]
    weights += [random_weight(24, 12, 4, [17, 1, 2], seed=9)]
    want = np.stack([dense for _, dense, _ in weights])
    stacked = TileSparse.stack([w for w, _, _ in weights])
    np.testing.assert_array_equal(jax.jit(jax.vmap(TileSparse.to_dense))(stacked), want)
    _, found = jax.lax.scan(lambda c, w: (c, w.to_dense()), 0, stacked)
    np.testing.assert_array_equal(found, want)
    spec = jax.sharding.PartitionSpec("t")
    mesh = jax.make_mesh((3,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))
    local = jax.shard_map(
        lambda w: jax.vmap(TileSparse.to_dense)(w),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    np.testing.assert_array_equal(local(stacked), want)


def test_transpose():
    w, dense, mask = random_weight(128, 192, 64, [64, 128, 0], granularity=64)
    turned = w.transpose(granularity=64)
    assert (turned.tile, turned.granularity, turned.shape) == (64, 64, (192, 128))
    np.testing.assert_array_equal(turned.to_dense(), dense.T)
    np.testing.assert_array_equal(turned.mask(), mask.T)
    np.testing.assert_array_equal(turned.transpose(tile=64).to_dense(), dense)
    with pytest.raises(ValueError, match=r"mask keeps only a part of row .* tile"):
        w.transpose(tile=128)


def test_shards_hold_their_part():
    w, dense, _ = random_weight(64, 32, 8, [3, 40, 17, 64], granularity=1)
    rows = w.shards(4, "rows")
    for s in range(4):
        part = jax.tree.map(lambda leaf, s=s: leaf[s], rows)
        assert part.shape == (16, 32)
        np.testing.assert_array_equal(part.to_dense(), dense[16 * s : 16 * s + 16])
    columns = w.shards(2, "columns")
    for s in range(2):
        part = jax.tree.map(lambda leaf, s=s: leaf[s], columns)
        np.testing.assert_array_equal(part.to_dense(), dense[:, 16 * s : 16 * s + 16])
    with pytest.raises(ValueError, match=r"3 shards of columns: .* multiples of 8"):
        w.shards(3, "columns")


def test_folding_absorbs_pruned_columns():
    up, dense_up, _ = random_weight(16, 12, 4, [3, 9], pruned=[0, 5, 6, 11])
    down, dense_down, _ = random_weight(12, 8, 4, [6, 11], seed=3)
    folded = down.fold_rows(up.columns)
    assert up.packed().shape == (16, 8) and folded.shape == (8, 8)
    x = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    got = x @ np.asarray(up.packed().to_dense()) @ np.asarray(folded.to_dense())
    np.testing.assert_allclose(got, x @ dense_up @ dense_down, rtol=1e-4, atol=1e-4)


def test_files(tmp_path):
    a, dense_a, _ = random_weight(*SMALL, dtype=jnp.bfloat16)
    b, dense_b, _ = random_weight(16, 12, 4, [3, 9], pruned=[0, 5, 6, 11])
    path = tmp_path / "weights.safetensors"
    save_tile_sparse(path, {"a": a, "b.c": b})
    loaded = load_tile_sparse(path)
    assert list(loaded) == ["a", "b.c"] and loaded["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(loaded["a"].to_dense().astype(jnp.float32), dense_a)
    np.testing.assert_array_equal(loaded["b.c"].to_dense(), dense_b)
    assert loaded["b.c"].equal_counts == b.equal_counts


def test_files_are_as_readable_as_others(tmp_path):
    w, _, _ = random_weight(*SMALL)
    path, other = tmp_path / "weights.safetensors", tmp_path / "other"
    other.write_text("")
    save_tile_sparse(path, {"a": w})
    assert path.stat().st_mode == other.stat().st_mode


def test_files_that_are_refused(tmp_path, monkeypatch):
    import safetensors.numpy

    path = tmp_path / "weights.safetensors"
    safetensors.numpy.save_file({"a": np.ones(3)}, path)
    with pytest.raises(ValueError, match="holds no tile-sparse weights"):
        load_tile_sparse(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no safetensors file"):
        load_tile_sparse(path)
    w, _, _ = random_weight(*SMALL)
    module = "pallas_kernels.tile_sparse_matmul.files.FORMAT_VERSION"
    with monkeypatch.context() as patched:
        patched.setattr(module, 99)
        save_tile_sparse(path, {"a": w})
    with pytest.raises(ValueError, match="has version 99 of the format, expected 2"):
        load_tile_sparse(path)


def test_a_flipped_bit_is_noticed(tmp_path):
    w, _, _ = random_weight(16, 12, 4, [3, 9, 4], pruned=[0])
    path = tmp_path / "weights.safetensors"
    save_tile_sparse(path, {"a": w})
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    places = np.random.default_rng(0).integers(0, len(good), 60)
    # Some in the header and most in the tensors, one of them the last byte.
    for place in (0, 7, 8, header - 1, header, len(good) - 1, *places):
        bad = bytearray(good)
        bad[place] ^= 1 << int(place) % 8
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"is no|holds no|has version|is damaged"):
            load_tile_sparse(path)
    for size in (0, 7, header - 1, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(ValueError, match="is no safetensors file"):
            load_tile_sparse(path)
    path.write_bytes(good)
    assert load_tile_sparse(path)["a"].shape == (16, 12)


def declared(inputs):
    """The header of a weight that is said to have so many rows."""
    return json.dumps({"a": {"shape": [inputs, 12], "granularity": 1}})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors, header: tensors.pop("a.rows"), r"a lacks \['rows'\]"),
        (lambda tensors, header: header.pop("version"), "has version None"),
        (lambda tensors, header: header.pop("weights"), "is damaged: 'weights'"),
        (lambda tensors, header: header.update(weights="{"), "is damaged: Expecting"),
        (lambda tensors, header: header.update(weights='{"a": {}}'), "'shape'"),
        (lambda tensors, header: header.update(weights="[]"), "expected an object"),
        (lambda tensors, header: header.update(weights="[" * 10**5), "is damaged"),
        (lambda tensors, header: header.update(weights=declared(10**12)), "int32"),
        (lambda tensors, header: header.update(weights=declared(2**30)), "65536 times"),
        (lambda tensors, _: tensors.update({"a.counts": np.int32([99] * 3)}), "counts"),
        (lambda tensors, _: tensors.update({"b": np.ones(2)}), r"unknown .*\['b'\]"),
        (
            lambda tensors, _: tensors.update({"a.values": np.ones((3, 24, 4), int)}),
            "a.values has type int64",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, message):
    """Though their checksum is right."""
    import safetensors.numpy

    w, _, _ = random_weight(*SMALL)
    path = tmp_path / "weights.safetensors"
    save_tile_sparse(path, {"a": w})
    with safetensors.safe_open(path, framework="numpy") as file:
        header = dict(file.metadata())
    tensors = safetensors.numpy.load_file(path)
    damage(tensors, header)
    header["sha256"] = files._digest(tensors, header.get("weights", ""))
    safetensors.numpy.save_file(tensors, path, metadata=header)
    with pytest.raises(ValueError, match=message) as error:
        load_tile_sparse(path)
    assert str(path) in str(error.value)


def test_shards_that_are_refused(no_shape_hook):
    w, _, _ = random_weight(*SMALL)
    for number in (0, -1, 2.0):
        with pytest.raises(ValueError, match=f"{number} shards of rows: expected a"):
            w.shards(number, "rows")
    with pytest.raises(ValueError, match="axis 'tiles', expected 'rows' or 'columns'"):
        w.shards(2, "tiles")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": [5, 25, 24]}, "counts from 5 to 25, expected 0 to the room P=24"),
        ({"rows": 24}, "rows from .* to 24, expected 0 to 23"),
        ({"rows": 0}, r"rows of tile 0: .* before 0, expected them sorted"),
        ({"granularity": 8}, "rows are not kept in groups of granularity 8"),
        ({"granularity": 3}, "granularity 3, expected one of 1, 8 and 64"),
        ({"granularity": True}, "granularity True, expected one of 1, 8 and 64"),
        ({"shape": (24, 12, 1)}, r"shape \(24, 12, 1\), expected two integers"),
        ({"shape": (24, 12.0)}, r"shape \(24, 12.0\), expected two integers"),
        ({"shape": (24, -12)}, "expected at least one row and one column"),
        ({"shape": (24, 16)}, r"3 tiles of 4 columns for 16 packed columns"),
        ({"columns": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10]}, "name a column twice"),
        ({"columns": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13]}, "columns from 0 to 13"),
        ({"values": 1.0}, "values past the counts are not zero"),
        ({"room": 20}, "room for 20 rows in a tile, expected a multiple of 8"),
        ({"index_type": "rows"}, "rows of type int16, expected int32"),
        ({"index_type": "counts"}, "counts of type int16, expected int32"),
    ],
)
def test_construction_validates(no_shape_hook, change, message):
    w, _, _ = random_weight(*SMALL)
    fields = {f.name: getattr(w, f.name) for f in dataclasses.fields(w) if f.init}
    for name, value in change.items():
        if name == "rows":  # one wrong entry among the kept ones
            value = w.rows.at[0, 3].set(value)
        elif name == "values":
            value = w.values.at[1, 0, 0].set(value)
        elif name == "room":
            fields["values"] = w.values[:, :value]
            name, value = "rows", w.rows[:, :value]
        elif name == "index_type":
            name, value = value, getattr(w, value).astype(jnp.int16)
        elif name in ("counts", "columns"):
            value = jnp.array(value, jnp.int32)
        fields[name] = value
    with pytest.raises(ValueError, match=message):
        TileSparse(**fields)


def test_a_shape_from_a_file_is_hashable(no_shape_hook):
    w, dense, _ = random_weight(*SMALL)
    again = TileSparse(w.values, w.rows, w.counts, shape=[*w.shape])
    np.testing.assert_array_equal(jax.jit(TileSparse.to_dense)(again), dense)


def test_masks_that_are_refused(no_shape_hook):
    weight, mask = np.ones((8, 8), np.float32), np.ones((8, 8), bool)
    with pytest.raises(ValueError, match=r"mask has shape \(8, 4\)"):
        TileSparse.from_dense(weight, mask[:, :4], tile=4)
    with pytest.raises(ValueError, match="expected booleans"):
        TileSparse.from_dense(weight, mask.astype(np.float32), tile=4)
    with pytest.raises(ValueError, match="tile 0, expected a positive"):
        TileSparse.from_dense(weight, mask, tile=0)
    with pytest.raises(ValueError, match=r"tile 4\.0, expected a positive"):
        TileSparse.from_dense(weight, mask, tile=4.0)
    with pytest.raises(ValueError, match="tile True, expected a positive"):
        TileSparse.from_dense(weight, mask, tile=True)
    with pytest.raises(ValueError, match=r"room 8\.0, expected a multiple of 8"):
        TileSparse.from_dense(weight, mask, tile=4, room=8.0)
    for empty in ((0, 8), (8, 0)):
        with pytest.raises(ValueError, match=r"expected at least one row and one col"):
            TileSparse.from_dense(np.ones(empty), np.ones(empty, bool), tile=4)
    with pytest.raises(ValueError, match="of column 7, which columns leaves out"):
        TileSparse.from_dense(weight, mask, tile=4, columns=np.arange(7))
    with pytest.raises(ValueError, match="room 12, expected a multiple of 8"):
        TileSparse.from_dense(weight, mask, tile=4, room=12)
    mask[3, 5] = False
    with pytest.raises(ValueError, match="a part of row 3 in tile 1"):
        TileSparse.from_dense(weight, mask, tile=4)


def test_bytes():
    w, _, _ = random_weight(*SMALL)
    # 3 tiles with room for 24 rows of 4 columns; indices; counts; order.
    assert w.nbytes == 4 * (3 * 24 * 4 + 3 * 24 + 3 + 3)


def test_columns_that_stand_for_none():
    """In a tile with others, and a tile of them; rows folded too."""
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(12, 8)).astype(np.float32)
    mask = random_mask(rng, 12, 8, 2, [5, 3, 7, 0])
    mask[:, 5] = False
    columns = np.array([0, 1, 2, 3, 4, 8, 8, 8])
    w = TileSparse.from_dense(dense, mask, tile=2, columns=columns)
    np.testing.assert_array_equal(w.to_dense(), np.where(mask, dense, 0))
    np.testing.assert_array_equal(w.mask(), mask)
    order = np.array([7, 3, 12, 0, 11])
    folded = w.fold_rows(jnp.asarray(order))
    want = np.where(mask, dense, 0)[np.minimum(order, 11)]
    want[2] = 0
    np.testing.assert_array_equal(folded.to_dense(), want)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("counts", [[5, 0, 24], [24, 24, 24]])
def test_side_by_side(counts, stacked):
    """Outputs of both, also of weights with leading axes, and under `jax.jit`."""
    first, one, _ = random_weight(24, 12, 4, counts)
    second, other, _ = random_weight(24, 8, 4, [24, 24], seed=1)
    weights = [first, second]
    if stacked:
        weights = [TileSparse.stack([w]) for w in weights]
    joined = jax.jit(lambda *weights: TileSparse.side_by_side(weights))(*weights)
    joined = jax.tree.map(lambda x: x[0], joined) if stacked else joined
    assert joined.shape == (24, 20)
    assert joined.steps == first.steps + second.steps
    assert joined.equal_counts == (counts[0] == 24)
    if not joined.equal_counts:
        assert sorted(joined.order) == list(range(5))
        assert (np.diff(np.asarray(joined.counts)[np.asarray(joined.order)]) <= 0).all()
    np.testing.assert_array_equal(joined.to_dense(), np.concatenate([one, other], 1))


def test_side_by_side_is_refused():
    first, _, _ = random_weight(24, 12, 4, [5, 0, 24])
    others = {
        "inputs": random_weight(16, 8, 4, [3, 4])[0],
        "tile": random_weight(24, 8, 8, [3])[0],
        "a part of a tile": random_weight(24, 6, 4, [3, 4])[0],
        "columns": random_weight(24, 12, 4, [3, 4], pruned=(0, 1, 2, 3))[0],
    }
    for other in others.values():
        with pytest.raises(ValueError, match="weights differ in inputs, tile or"):
            TileSparse.side_by_side([first, other])
