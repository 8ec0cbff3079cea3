"""Pattern tw24: 2:4 inside the kept rows of tiles, and its sparse layers."""

import dataclasses
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale import pruning
from jaxscale.models import Decoder, DecoderConfig
from jaxscale.pruning import PruneConfig
from jaxscale.pruning.fours import best_fours, two_of_four
from jaxscale.pruning.matrix import Matrix
from jaxscale.pruning.tilewise import make_masks
from jaxscale.sharding import make_mesh, preset
from jaxscale.training import Checkpointer, TrainState
from pallas_kernels.tile_sparse_matmul import TileSparse24
from tests.tolerances import relative_error


def small_model(**options):
    config = DecoderConfig(
        vocab_size=64,
        d_model=128,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        d_ff=256,
        max_seq_len=16,
    )
    return Decoder(config, rngs=nnx.Rngs(0), **options)


def masks_of(model, **settings):
    config = PruneConfig(pattern="tw24", tile=64, **settings)
    rng = np.random.default_rng(0)
    scores = {
        name: np.exp(rng.standard_normal(score.shape)).astype(np.float32)
        for name, score in pruning.magnitude_scores(model).items()
    }
    return pruning.make_model_masks(model, scores, config), scores


@pytest.mark.parametrize("separate", [False, True])
def test_compressed_layers_compute_what_the_masks_keep(separate):
    model = small_model()
    masks, _ = masks_of(model, sparsity=0.75)
    assert masks.sparsity == pytest.approx(0.75, abs=0.01)
    sparse = pruning.sparsify(model, masks, separate=separate)
    compressed = pruning.sparsify(model, masks, separate=separate, compress=True)
    blocks = compressed.blocks[0] if separate else compressed.blocks
    assert isinstance(blocks.mlp.down.weight, TileSparse24)
    assert blocks.mlp.up.shape[1] < 256  # hidden features were removed
    tokens = jnp.arange(12).reshape(1, 12) % 64
    want = pruning.apply_masks(model, masks)(tokens)
    for pruned in (sparse, compressed):
        assert relative_error(pruned(tokens), want) < 1e-5


def test_layers_that_keep_all_rows_need_no_gather():
    """Their fours are those of the inputs in order; hidden features are put in one."""
    model = small_model()
    masks, scores = masks_of(model, sparsity=0.5)
    compressed = pruning.sparsify(model, masks, compress=True)
    for name in masks:
        layer = operator.attrgetter(name)(compressed)
        assert layer.granularity == 64 and layer.equal_counts
    tokens = jnp.arange(12).reshape(1, 12) % 64
    want = pruning.apply_masks(model, masks)(tokens)
    assert relative_error(compressed(tokens), want) < 1e-5
    down = "blocks.mlp.down"
    own = scores[down][0]
    found, plain = masks.kept[down][0], two_of_four(own)
    assert found.sum() == plain.sum()
    assert own[~found].sum() < 0.95 * own[~plain].sum()
    searched, _ = masks_of(model, sparsity=0.5, fours_in_order=False)
    assert own[~searched.kept[down][0]].sum() < 0.99 * own[~found].sum()
    # A quarter of the rows go: those of the layers that lose some are gathered.
    compressed = pruning.sparsify(
        model, masks_of(model, sparsity=0.625)[0], compress=True
    )
    assert compressed.blocks.mlp.up.granularity == 1


@pytest.mark.parametrize(
    "settings",
    [{"shards": 2}, {"k_granularity": 8}, {"permute": False, "equal_work": True}],
)
def test_fours_fit_shards_groups_and_tiles_in_order(settings):
    rules = preset("fsdp_tp")
    with jax.set_mesh(make_mesh({"fsdp": 1, "tensor": 1}, jax.devices()[:1])):
        model = small_model(rules=rules)
        masks, _ = masks_of(model, sparsity=0.75, **settings)
        compressed = pruning.sparsify(model, masks, compress=True)
        split = compressed.blocks.mlp.down.split
        assert split == ("rows" if "shards" in settings else None)
        tokens = jnp.arange(12).reshape(1, 12) % 64
        want = pruning.apply_masks(model, masks)(tokens)
        assert relative_error(compressed(tokens), want) < 1e-5


def test_the_best_two_of_four_kept_rows_stay():
    model = small_model()
    masks, scores = masks_of(model, sparsity=0.6)
    name = "blocks.attention.query"
    kept, tiled = masks.kept[name][0], masks.tiled[name][0]
    fours = masks.fours[name].layer(0)
    for columns, rows in zip(fours.columns, fours.rows, strict=True):
        rows = rows[rows >= 0]
        assert set(rows) == set(np.flatnonzero(tiled[:, columns[0]]))
        for first in range(0, len(rows), 4):
            four = rows[first : first + 4]
            own = scores[name][0][np.ix_(four, columns)]
            best = np.argsort(np.argsort(-own, 0, kind="stable"), 0) < 2
            np.testing.assert_array_equal(kept[np.ix_(four, columns)], best)
    assert not (kept & ~tiled).any()


def test_layers_that_keep_nearly_all_rows_keep_all():
    scores = 1 + np.random.default_rng(0).random((128, 128))
    matrix = Matrix(name="one", scores=scores)
    config = PruneConfig(pattern="tw24", tile=64, sparsity=0.505)
    (tiles,) = make_masks([matrix], config.whole_rows)
    assert 0.98 < tiles.tiled.mean() < 1
    (found,) = make_masks([matrix], config)
    assert found.tiled.all() and found.fours is not None
    for rows in found.fours.rows:
        np.testing.assert_array_equal(rows, np.arange(128))
    np.testing.assert_array_equal(found.kept, two_of_four(scores))
    (found,) = make_masks([matrix], dataclasses.replace(config, sparsity=0.52))
    assert not found.tiled.all()


def test_fours_are_searched_only_where_that_keeps_much_more():
    random = np.random.default_rng(0)
    even = 1 + random.random((128, 128))
    uneven = np.where(np.arange(128)[:, None] < 8, 9, 1) * even  # of a four all matter
    matrices = [Matrix(name="even", scores=even), Matrix(name="uneven", scores=uneven)]
    config = PruneConfig(pattern="tw24", tile=64, sparsity=0.5)
    plain, searched = make_masks(matrices, config)
    np.testing.assert_array_equal(plain.kept, two_of_four(even))
    assert searched.fours is not None
    for rows in searched.fours.rows:
        assert (rows != np.arange(128)).any()
    assert searched.kept[:8].all() and searched.tiled.all()


def test_rows_that_all_columns_need_do_not_meet():
    """Of four alike in a row 2:4 would lose half; exchanged, a third more stays."""
    rng = np.random.default_rng(0)
    scores = np.exp(2 * rng.standard_normal((256, 1)) + rng.standard_normal((256, 64)))
    order = best_fours(scores)
    assert sorted(order) == list(range(256))
    lost = [
        scores[each][~two_of_four(scores[each])].sum()
        for each in (np.arange(256), order)
    ]
    assert lost[1] < 0.5 * lost[0]
    np.testing.assert_array_equal(best_fours(scores), order)
    for few in range(8):
        assert sorted(best_fours(scores[:few])) == list(range(few))


def test_tiles_are_pruned_in_stages_and_halved_in_the_last():
    model = small_model()
    config = PruneConfig(pattern="tw24", tile=64, sparsity=0.75)
    sparsities = 0.0, 0.3, 0.6, 0.75
    stages = [pruning.Stage(step=i, sparsity=s) for i, s in enumerate(sparsities)]
    pruner = pruning.Pruner(config, stages)
    start = pruner.start(model)
    optimizer = optax.chain(pruner.transform, optax.sgd(1.0))
    state = TrainState.create(start, optimizer)
    found = []
    for step in range(1, 4):
        state = dataclasses.replace(state, step=jnp.asarray(step))
        state = pruner(step, state)
        found.append(pruner.masks_of(state))
    assert [m.config.pattern for m in found] == ["tw", "tw", "tw24"]
    # Tiles that keep half, as the last stage wants them, of which two of four stay.
    rounded = [round(masks.sparsity, 2) for masks in found]
    assert rounded == [0.3, 0.5, 0.75]
    for before, after in itertools.pairwise(found):
        for name in before:
            assert not (after[name] & ~before[name]).any()
    sparse = pruning.sparsify(state.model, found[-1], compress=True)
    tokens = jnp.arange(12).reshape(1, 12) % 64
    assert relative_error(sparse(tokens), state.model(tokens)) < 1e-5
    with pytest.raises(ValueError, match="leave previous out"):
        scores = pruning.magnitude_scores(model)
        pruning.make_model_masks(model, scores, config, previous=found[-1])


def test_fours_are_saved(tmp_path):
    model = small_model()
    masks, _ = masks_of(model, sparsity=0.75)
    masks.save(tmp_path / "masks.safetensors")
    again = pruning.Masks.load(tmp_path / "masks.safetensors")
    tokens = jnp.arange(12).reshape(1, 12) % 64
    ys = [pruning.sparsify(model, m, compress=True)(tokens) for m in (masks, again)]
    np.testing.assert_array_equal(*ys)


def test_training_keeps_the_masks(tmp_path):
    model = small_model()
    masks, _ = masks_of(model, sparsity=0.75)
    pruner = pruning.Pruner(masks.config, [pruning.Stage(step=0, sparsity=0.75)])
    optimizer = optax.chain(pruning.mask_gradients(masks), optax.sgd(1.0))
    state = pruning.set_masks(TrainState.create(model, optimizer), masks)
    found = pruner.masks_of(state)
    none = pruning.Pruner(masks.config, [pruning.Stage(step=9, sparsity=0.75)])
    assert none.masks_of(state).config.sparsity == 0
    for name in masks:
        np.testing.assert_array_equal(found.kept[name], masks.kept[name])
        np.testing.assert_array_equal(found.tiled[name], masks.tiled[name])
        fours = masks.fours[name]
        np.testing.assert_array_equal(found.fours[name].columns, fours.columns)
        np.testing.assert_array_equal(found.fours[name].rows, fours.rows)
    pruned = np.asarray(state.model.blocks.mlp.up.kernel[...]) == 0
    np.testing.assert_array_equal(pruned, ~masks["blocks.mlp.up"])
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state, {})
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        again = pruner.masks_of(checkpointer.restore(state)[0])
    assert {*again.fours} == {*masks}
    for name, fours in again.fours.items():
        np.testing.assert_array_equal(fours.rows, masks.fours[name].rows)


@pytest.mark.parametrize("together", [True, False])
def test_gate_that_lacks_a_tile_takes_no_row_out_of_a_four(together):
    model = small_model()
    gate = operator.attrgetter("blocks.mlp.gate.kernel")(model)
    gate[...] = gate[...].at[..., 64:128].multiply(1e-4)
    settings = {"sparsity": 0.6, "tile": 64, "scope": "global"}
    config = PruneConfig(pattern="tw24", hidden_together=together, **settings)
    masks = pruning.make_model_masks(model, pruning.magnitude_scores(model), config)
    assert not masks["blocks.mlp.gate"][..., 64:128].any()
    tokens = jnp.arange(12).reshape(1, 12) % 64
    got = pruning.sparsify(model, masks, compress=True)(tokens)
    assert relative_error(got, pruning.apply_masks(model, masks)(tokens)) < 1e-5


def test_what_is_wrong_is_refused():
    twice = [pruning.Stage(step=i, sparsity=0.75) for i in (0, 2)]
    with pytest.raises(ValueError, match="with tw24 sparsities must rise"):
        pruning.Pruner(PruneConfig(pattern="tw24", tile=64, sparsity=0.75), twice)
    with pytest.raises(ValueError, match=r"expected at least 0\.5: pattern tw24"):
        PruneConfig(pattern="tw24", sparsity=0.4)
    model = small_model()
    masks, _ = masks_of(model, sparsity=0.75)
    whole = pruning.make_model_masks(
        model, pruning.magnitude_scores(model), PruneConfig(tile=64)
    )
    with pytest.raises(ValueError, match="compress of pattern 'tw', expected 'tw24'"):
        pruning.sparsify(model, whole, compress=True)
    narrow = PruneConfig(pattern="tw24", tile=32)
    masks = pruning.make_model_masks(model, pruning.magnitude_scores(model), narrow)
    with pytest.raises(ValueError, match="tile 32, expected a multiple of 64"):
        pruning.sparsify(model, masks, compress=True)
