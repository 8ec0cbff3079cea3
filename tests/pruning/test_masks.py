"""Masks of every pattern: exact sparsity, the right structure, the best units."""

import dataclasses
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxscale.pruning import Matrix, PruneConfig, make_masks, pruned_units, tile_counts
from jaxscale.pruning.clustering import tiles_of
from jaxscale.pruning.config import PATTERNS


def matrices(*shapes, seed=0, shards=(1, 1)):
    """Scores with rows and columns of different weight, as trained matrices have."""
    rng = np.random.default_rng(seed)
    found = []
    for i, (k, n) in enumerate(shapes):
        rows, columns = rng.lognormal(size=(k, 1)), rng.lognormal(size=(1, n))
        scores = rng.random((k, n)).astype(np.float32) * rows * columns
        found.append(
            Matrix(
                name=f"w{i}",
                scores=scores,
                row_shards=shards[0],
                column_shards=shards[1],
            )
        )
    return found


SHAPES = [(64, 96), (96, 64), (64, 32)]


def unit(config):
    return {
        "ew": 1,
        "vw": 1,
        "2:4": 1,
        "tew": 1,
        "bw": config.block**2,
    }.get(config.pattern, config.tile * config.k_granularity)


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.5, 0.75, 0.9, 0.97])
@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p != "tw24"])
def test_sparsity_is_exact(pattern, sparsity, scope):
    if pattern == "2:4":
        sparsity = 0.5
    config = PruneConfig(
        pattern=pattern, sparsity=sparsity, tile=16, block=8, scope=scope
    )
    weights = matrices(*SHAPES)
    masks = make_masks(weights, config)
    kept = [int(mask.kept.sum()) for mask in masks]
    sizes = [m.scores.size for m in weights]
    if scope == "global":
        kept, sizes = [sum(kept)], [sum(sizes)]
    for count, size in zip(kept, sizes, strict=True):
        size //= unit(config)
        pruned = math.floor(size * sparsity + 0.5 + 1e-9)
        assert count == (size - pruned) * unit(config)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 10**6),
    sparsity=st.floats(0, 0.99),
    pattern=st.sampled_from(["tw", "tw_k", "tew"]),
    granularity=st.sampled_from([1, 8]),
    tile=st.sampled_from([4, 8, 32]),
    apriori=st.sampled_from([0.0, 0.5, 2.0]),
    equal_work=st.booleans(),
    permute=st.booleans(),
)
def test_tile_wise_structure(
    seed, sparsity, pattern, granularity, tile, apriori, equal_work, permute
):
    config = PruneConfig(
        pattern=pattern,
        sparsity=sparsity,
        tile=tile,
        k_granularity=granularity,
        apriori=apriori,
        equal_work=equal_work,
        permute=permute,
    )
    weights = matrices((32, 64), (64, 32), seed=seed)
    masks = make_masks(weights, config)
    for mask in masks:
        tiled = mask.tiled
        if pattern != "tw_k":
            tiles = tiles_of(tiled, tile)
            assert tiles is not None
            assert permute or (np.diff(tiles.ravel()) > 0).all()
            tiled = tiled[:, tiles.ravel()]
        assert tiled.shape[1] % tile == 0
        pieces = tiled.reshape(tiled.shape[0] // granularity, granularity, -1, tile)
        assert (pieces.all(axis=(1, 3)) == pieces.any(axis=(1, 3))).all()
        assert not (mask.tiled & ~mask.kept).any()
        if pattern != "tew":
            assert (mask.tiled == mask.kept).all()
    total = sum(mask.kept.size for mask in masks)
    kept = sum(int(mask.kept.sum()) for mask in masks)
    piece = 1 if pattern == "tew" else granularity * tile
    assert kept == total - pruned_units(total // piece, sparsity) * piece


BOUNDS = [(0.5, None), (0.75, None), (0.9, None), (0.75, 0.75), (0.75, 0.8), (0.6, 0.9)]


@pytest.mark.parametrize(("sparsity", "bound"), BOUNDS)
@pytest.mark.parametrize("pattern", ["ew", "bw", "tw_k", "tw", "tew"])
def test_no_layer_loses_more_than_its_bound(pattern, sparsity, bound):
    """Layers whose scores are next to nothing keep their share, others the less."""
    below = 0
    for seed in range(3):
        config = PruneConfig(
            pattern=pattern,
            sparsity=sparsity,
            max_layer_sparsity=bound,
            tile=8,
            block=8,
            equal_work=bool(seed % 2),
        )
        rng = np.random.default_rng(seed)
        # The last three are gate, up and down of a feed-forward network.
        shapes = [*SHAPES, (64, 96), (64, 96), (96, 32)]
        related = [{}] * 4 + [{"shares": "w3"}, {"fed_by": "w3"}]
        weights = [
            dataclasses.replace(
                m, scores=m.scores * np.float32(10 ** rng.uniform(-9, 9)), **more
            )
            for m, more in zip(matrices(*shapes, seed=seed), related, strict=True)
        ]
        masks = make_masks(weights, config)
        piece = unit(config) if pattern != "tew" else config.tile
        most = 1 - (1 - sparsity) / 4 if bound is None else bound
        singles = 0.02 if pattern == "tew" and most == sparsity else 0
        free = make_masks(weights, dataclasses.replace(config, max_layer_sparsity=1.0))
        for mask, other in zip(masks, free, strict=True):
            share = (1 - most) * (1 - singles) * mask.kept.size / piece
            least = max(math.floor(share + 1e-6), 1) * piece
            assert mask.kept.sum() >= least
            below += other.kept.sum() < least
        total = sum(mask.kept.size for mask in masks)
        whole = total // unit(config)
        kept = sum(int(mask.kept.sum()) for mask in masks)
        assert kept == (whole - pruned_units(whole, sparsity)) * unit(config)
    assert below  # some would have lost more


@pytest.mark.parametrize("pattern", ["ew", "tw_k", "tw"])
def test_the_bound_holds_from_stage_to_stage(pattern):
    shapes, related = [(64, 96), (64, 96), (96, 32)], [{}, {"shares": "w0"}]
    related.append({"fed_by": "w0"})
    for seed in range(6):
        rng, masks = np.random.default_rng(seed), None
        for sparsity in (0.4, 0.7, 0.75):
            drawn = matrices(*shapes, seed=int(rng.integers(1000)))
            weights = [
                dataclasses.replace(
                    m,
                    scores=m.scores * np.float32(10 ** rng.uniform(-5, 5)),
                    previous=None if masks is None else masks[i].kept,
                    previous_tiled=None if masks is None else masks[i].tiled,
                    **related[i],
                )
                for i, m in enumerate(drawn)
            ]
            config = PruneConfig(pattern=pattern, sparsity=sparsity, tile=8)
            masks = make_masks(weights, config)
            for mask in masks:
                units = mask.kept.size // unit(config)
                least = math.floor((1 - sparsity) / 4 * units + 1e-6)
                assert mask.kept.sum() >= least * unit(config)


def test_a_bound_below_the_sparsity_is_refused():
    with pytest.raises(ValueError, match=r"max_layer_sparsity 0\.5, expected spars"):
        PruneConfig(sparsity=0.75, max_layer_sparsity=0.5)
    with pytest.raises(ValueError, match=r"max_layer_sparsity 1\.5, expected"):
        PruneConfig(max_layer_sparsity=1.5)


def test_each_vector_keeps_as_many():
    (mask,) = make_masks(
        matrices((64, 8)), PruneConfig(pattern="vw", sparsity=0.75, vector=16)
    )
    assert (mask.kept.reshape(4, 16, 8).sum(axis=1) == 4).all()
    # 10% of 16 is no whole number: all keep one or two.
    (mask,) = make_masks(
        matrices((64, 8)), PruneConfig(pattern="vw", sparsity=0.9, vector=16)
    )
    counts = mask.kept.reshape(4, 16, 8).sum(axis=1)
    assert set(np.unique(counts)) == {1, 2} and counts.sum() == 51


def test_two_of_four_are_the_largest():
    (weight,) = matrices((16, 8))
    (mask,) = make_masks([weight], PruneConfig(pattern="2:4", sparsity=0.5))
    fours = weight.scores.reshape(4, 4, 8)
    kept = mask.kept.reshape(4, 4, 8)
    assert (kept.sum(axis=1) == 2).all()
    worst_kept = np.where(kept, fours, np.inf).min(axis=1)
    best_pruned = np.where(kept, -np.inf, fours).max(axis=1)
    assert (worst_kept >= best_pruned).all()


@pytest.mark.parametrize("pattern", ["ew", "bw", "tw_k"])
def test_the_best_units_of_all_layers_are_kept(pattern):
    config = PruneConfig(pattern=pattern, sparsity=0.6, tile=8, block=8)
    weights = matrices(*SHAPES)
    height, width = {"ew": (1, 1), "bw": (8, 8), "tw_k": (1, 8)}[pattern]
    kept, pruned = [], []
    for weight, mask in zip(weights, make_masks(weights, config), strict=True):
        k, n = weight.scores.shape
        for row in range(0, k, height):
            for column in range(0, n, width):
                at = np.s_[row : row + height, column : column + width]
                mean = float(weight.scores[at].astype(np.float64).mean())
                (kept if mask.kept[at].all() else pruned).append(mean)
    assert min(kept) >= max(pruned)


@pytest.mark.parametrize("pattern", ["tw", "tew"])
@pytest.mark.parametrize("shards", [1, 2])
def test_permuted_columns_keep_more(pattern, shards):
    """Of scores with kinds of columns, in a network whose layers share them."""
    rng = np.random.default_rng(0)

    def of_kinds(k, n):
        """Four kinds of columns, each with rows of its own."""
        own = np.where(rng.random((k, 4)) < 0.3, 8.0, 1.0)
        scores = own[:, rng.integers(0, 4, n)] * rng.random((k, n))
        return scores.astype(np.float32)

    column, row = {"column_shards": shards}, {"row_shards": shards}
    weights = [
        Matrix(name="out", scores=of_kinds(64, 96), **row),
        Matrix(name="gate", scores=of_kinds(48, 96), **column),
        Matrix(name="up", scores=of_kinds(48, 96), shares="gate", **column),
        Matrix(name="down", scores=of_kinds(96, 48), fed_by="gate", **row),
    ]
    config = PruneConfig(pattern=pattern, sparsity=0.75, tile=8, shards=shards)
    free, ordered = (
        make_masks(weights, dataclasses.replace(config, permute=permute))
        for permute in (True, False)
    )
    again = make_masks(weights, config)
    kept = [
        sum(float(w.scores[m.kept].sum()) for w, m in zip(weights, masks, strict=True))
        for masks in (free, ordered)
    ]
    assert kept[0] > 1.02 * kept[1]
    for mask, same in zip(free, again, strict=True):
        np.testing.assert_array_equal(mask.kept, same.kept)
    together = np.concatenate([free[1].tiled, free[2].tiled])
    for part in np.split(together, shards, axis=1):
        assert tiles_of(part, 8) is not None  # gate and up have tiles in common
    if pattern == "tw":
        alive = together.any(axis=0)
        assert not free[3].kept[~alive].any()


def test_a_matrix_that_keeps_all_columns_stays_in_order():
    """It needs no gather then, unless its outputs may come in any order."""
    rng = np.random.default_rng(0)
    kinds = rng.permutation(np.repeat([0, 1], 16))
    own = np.where(rng.random((2, 64)) < 0.5, 9.0, 0.1)[kinds].T
    whole = Matrix(name="up", scores=own.astype(np.float32))
    config = PruneConfig(pattern="tw", sparsity=0.4, tile=16)
    (mask,) = make_masks([whole], config)
    np.testing.assert_array_equal(tiles_of(mask.kept, 16), np.arange(32).reshape(2, 16))
    scores = np.full((32, 16), 99, np.float32)
    down = Matrix(name="down", scores=scores, fed_by="up")
    mask, _ = make_masks([whole, down], config.with_sparsity(0.3))
    tiles = tiles_of(mask.kept, 16)
    assert tiles is not None and tiles.size == 32
    assert (kinds[tiles] == kinds[tiles[:, :1]]).all()


def test_other_tiles_than_before_are_refused():
    (weight,) = matrices((32, 32))
    config = PruneConfig(pattern="tw", sparsity=0.5, tile=4)
    (mask,) = make_masks([weight], config)
    again = dataclasses.replace(weight, previous=mask.kept, previous_tiled=mask.tiled)
    with pytest.raises(ValueError, match="mask before of layer w0 has no tiles of 16"):
        make_masks([again], dataclasses.replace(config, tile=16, sparsity=0.75))


def test_columns_go_first_and_the_worst_of_them():
    """Half of the columns, half of their rows: 75% in all."""
    (weight,) = matrices((64, 64))
    config = PruneConfig(pattern="tw", sparsity=0.75, tile=8, permute=False)
    (mask,) = make_masks([weight], config)
    stays = mask.kept.any(axis=0)
    assert stays.sum() == 32
    means = weight.scores.mean(axis=0)
    # Ranked in groups of 8 columns that are sorted by score: the best 32 exactly.
    assert means[stays].min() > means[~stays].max()
    packed = weight.scores[:, stays].reshape(64, 4, 8).mean(axis=2)
    kept = mask.kept[:, stays].reshape(64, 4, 8)[..., 0]
    assert kept.sum() == 128
    assert packed[kept].min() >= packed[~kept].max()


def test_no_layer_loses_all_its_columns():
    weights = matrices((64, 32), (64, 32))
    weak = dataclasses.replace(weights[1], scores=weights[1].scores * 1e-9)
    config = PruneConfig(
        pattern="tw", sparsity=0.5, max_layer_sparsity=1, tile=16, equal_work=True
    )
    masks = make_masks([weights[0], weak], config)
    # Half of the weights: without its own tile the weak layer would lose all rows
    # to the strong one, and the strong one would stay whole.
    assert masks[0].kept.sum() + masks[1].kept.sum() == 64 * 32
    assert masks[1].tiled.sum() == 0 and masks[0].kept.all()
    config = dataclasses.replace(config, sparsity=0.25)
    masks = make_masks([weights[0], weak], config)
    assert masks[1].kept.any(axis=0).sum() == 16  # one tile, with all of its rows


def test_single_weights_are_the_best_of_the_rest():
    config = PruneConfig(pattern="tew", sparsity=0.75, tile=16, single_fraction=0.1)
    weights = matrices(*SHAPES)
    masks = make_masks(weights, config)
    kept = sum(int(mask.kept.sum()) for mask in masks)
    singles = sum(int((mask.kept & ~mask.tiled).sum()) for mask in masks)
    assert kept * 0.1 - 16 <= singles <= kept * 0.1 + 16
    single = np.concatenate(
        [m.scores[k.kept & ~k.tiled] for m, k in zip(weights, masks, strict=True)]
    )
    pruned = np.concatenate(
        [m.scores[~k.kept] for m, k in zip(weights, masks, strict=True)]
    )
    assert single.min() >= pruned.max()


def test_apriori_moves_units_from_outliers_to_even_ones():
    """A piece that owes its score to one outlier loses against an even one."""
    scores = np.full((4, 8), 0.01, np.float32)
    scores[0] = 1.0  # even
    scores[1, 3] = 9.0  # one outlier, a higher mean
    weight = Matrix(name="w", scores=scores)
    plain = PruneConfig(pattern="tw_k", sparsity=0.75, tile=8)
    (mask,) = make_masks([weight], plain)
    assert mask.kept[1].all() and not mask.kept[0].any()
    (mask,) = make_masks([weight], dataclasses.replace(plain, apriori=1.0))
    assert mask.kept[0].all() and not mask.kept[1].any()


@pytest.mark.parametrize("pattern", ["tw", "tw_k"])
@pytest.mark.parametrize("shards", [(1, 1), (4, 1), (1, 2)])
def test_equal_work_balances_tiles_and_shards(pattern, shards):
    config = PruneConfig(
        pattern=pattern, sparsity=0.7, tile=16, equal_work=True, shards=max(shards)
    )
    weights = matrices((64, 64), (64, 128), shards=shards)
    free = make_masks(weights, dataclasses.replace(config, equal_work=False))
    masks = make_masks(weights, config)
    assert sum(m.kept.sum() for m in masks) == sum(m.kept.sum() for m in free)
    uneven = 0
    for mask, loose in zip(masks, free, strict=True):
        for rows in np.split(np.arange(64), shards[0]):
            columns = np.split(np.arange(mask.kept.shape[1]), shards[1])
            tiles = []
            for part in columns:
                order = np.arange(part.size).reshape(-1, 16)
                if pattern == "tw":
                    order = tiles_of(mask.kept[:, part], 16)
                tiles.append(mask.kept[np.ix_(rows, part[order[:, 0]])])
            assert len({part.shape[1] for part in tiles}) == 1
            counts = np.concatenate([part.sum(axis=0) for part in tiles])
            assert counts.max() - counts.min() <= 1
        counts = tile_counts(loose.kept, 16, pattern)
        uneven += counts.max() - counts.min() > 1
    assert uneven  # without the option the same scores are not balanced


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if "2" not in p])
@pytest.mark.parametrize("equal_work", [False, True])
def test_pruned_units_stay_pruned_from_stage_to_stage(pattern, equal_work):
    before = None
    for seed, sparsity in enumerate([0.25, 0.5, 0.62, 0.75, 0.9]):
        # New scores at each stage; only the mask before holds weights back.
        weights = matrices(*SHAPES, seed=seed)
        if before is not None:
            weights = [
                dataclasses.replace(m, previous=b.kept, previous_tiled=b.tiled)
                for m, b in zip(weights, before, strict=True)
            ]
        config = PruneConfig(
            pattern=pattern,
            sparsity=sparsity,
            tile=16,
            block=8,
            equal_work=equal_work,
        )
        masks = make_masks(weights, config)
        total = sum(m.scores.size for m in weights) // unit(config)
        kept = sum(int(mask.kept.sum()) for mask in masks)
        assert kept == (total - pruned_units(total, sparsity)) * unit(config)
        if before is not None:
            for now, then in zip(masks, before, strict=True):
                assert not (now.kept & ~then.kept).any()
                assert not (now.tiled & ~then.tiled).any()
        before = masks


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 10**6),
    sparsities=st.lists(st.floats(0.05, 0.99), min_size=2, max_size=4),
    pattern=st.sampled_from(["tw", "tw_k", "tew"]),
    equal_work=st.booleans(),
    weak=st.sampled_from([1.0, 1e-6]),
)
def test_stages_of_tiles_are_exact_and_nested(
    seed, sparsities, pattern, equal_work, weak
):
    """Also where a layer loses all its rows on the way."""
    before = None
    for stage, sparsity in enumerate(sorted(sparsities)):
        weights = matrices((32, 32), (16, 64), seed=seed + stage)
        weights[1] = dataclasses.replace(
            weights[1], scores=(weights[1].scores * weak).astype(np.float32)
        )
        if before is not None:
            weights = [
                dataclasses.replace(m, previous=b.kept, previous_tiled=b.tiled)
                for m, b in zip(weights, before, strict=True)
            ]
        config = PruneConfig(
            pattern=pattern, sparsity=sparsity, tile=8, equal_work=equal_work
        )
        masks = make_masks(weights, config)
        unit_size = 1 if pattern == "tew" else 8
        total = 2048 // unit_size
        kept = sum(int(mask.kept.sum()) for mask in masks)
        assert kept == (total - pruned_units(total, sparsity)) * unit_size
        for mask, then in zip(masks, before or masks, strict=True):
            assert not (mask.kept & ~then.kept).any()
            assert not (mask.tiled & ~then.tiled).any()
        before = masks


def test_sparsity_must_not_fall():
    weights = matrices((32, 32))
    (first,) = make_masks(weights, PruneConfig(pattern="ew", sparsity=0.75))
    again = [dataclasses.replace(weights[0], previous=first.kept)]
    with pytest.raises(ValueError, match="sparsity must not fall from stage to stage"):
        make_masks(again, PruneConfig(pattern="ew", sparsity=0.5))


def test_equal_scores_keep_the_earlier():
    weight = Matrix(name="w", scores=np.ones((4, 4), np.float32))
    (mask,) = make_masks([weight], PruneConfig(pattern="ew", sparsity=0.5))
    assert mask.kept.ravel().tolist() == [True] * 8 + [False] * 8


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sparsity": 1.0}, r"sparsity 1.0, expected at least 0 and below 1"),
        ({"sparsity": -0.1}, r"sparsity -0.1, expected at least 0 and below 1"),
        ({"sparsity": math.nan}, "sparsity nan, expected"),
        ({"pattern": "tile"}, r"pattern 'tile' is unknown; use one of \['ew'"),
        ({"pattern": "2:4", "sparsity": 0.75}, "expected 0.5: pattern 2:4 knows no"),
        ({"tile": 0}, "tile 0, expected at least 1"),
        ({"tile": 1.5}, "tile 1.5, expected at least 1, whole"),
        ({"tile": True}, "tile True, expected at least 1, whole"),
        ({"sparsity": "0.5"}, "sparsity '0.5', expected at least 0 and below 1"),
        ({"sparsity": None}, "sparsity None, expected at least 0 and below 1"),
        ({"k_granularity": 2}, "k_granularity 2, expected 1, 8 or 64"),
        ({"k_granularity": True}, "k_granularity True, expected 1, 8 or 64"),
        ({"dense": "blocks.*"}, "dense 'blocks.*', expected a tuple of names"),
        ({"single_fraction": 1.0}, "single_fraction 1.0, expected"),
        ({"scope": "model"}, "scope 'model', expected 'global' or 'layer'"),
        ({"apriori": -1.0}, "apriori -1.0, expected 0"),
    ],
)
@pytest.mark.usefixtures("no_shape_hook")
def test_settings_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        PruneConfig(**change)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"tile": 128}, "tile 128 does not divide the 96 columns of layer w0"),
        (
            {"k_granularity": 64, "tile": 16},
            "k_granularity 64 does not divide the 96 rows of layer w1",
        ),
        ({"pattern": "bw", "block": 20}, "block 20 does not divide the 64 rows"),
        ({"pattern": "vw", "vector": 24}, "vector 24 does not divide the 64 rows"),
    ],
)
def test_units_must_divide(config, message):
    with pytest.raises(ValueError, match=message):
        make_masks(matrices(*SHAPES), PruneConfig(**config))


def test_a_tile_must_fit_into_a_shard():
    weights = matrices((64, 64), shards=(1, 2))
    with pytest.raises(ValueError, match="tile 64 does not divide the 32 columns in a"):
        make_masks(weights, PruneConfig(tile=64, shards=2))


def test_scores_must_be_numbers():
    scores = np.ones((8, 8), np.float32)
    scores[3, 3] = np.nan
    with pytest.raises(ValueError, match="scores of layer w are not all finite"):
        make_masks([Matrix(name="w", scores=scores)], PruneConfig(tile=8))
