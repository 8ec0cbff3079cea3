"""Schedules, and training under masks in `fit`."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale.models import Decoder
from jaxscale.nn import Linear
from jaxscale.pruning import (
    PruneConfig,
    Pruner,
    Stage,
    apply_masks,
    cubic_stages,
    linears,
    magnitude_scores,
    make_model_masks,
    mask_gradients,
    one_shot,
    paper_stages,
)
from jaxscale.pruning.schedule import _codes, _prune_state
from jaxscale.training.step import TrainState
from tests.tiers import exhaustive
from tests.training.test_loop import CONFIG, MODEL, run


pytestmark = pytest.mark.usefixtures("compile_once")
# In each layer: before any training the small residual projections would go first.
TILES = PruneConfig(sparsity=0.75, tile=8, scope="layer")
# Weight decay and clipping touch every weight that they can reach.
OPTIMIZER = dataclasses.replace(CONFIG.optimizer, weight_decay=0.1, clip_norm=0.5)


def decoder():
    return Decoder(MODEL, rules=CONFIG.axis_rules, rngs=nnx.Rngs(3))


def settings(path, **changes):
    return dataclasses.replace(
        CONFIG, optimizer=OPTIMIZER, output_dir=str(path), **changes
    )


def moments(state):
    """The moments of the kernels of the blocks, by layer: two, or one of Muon."""
    nodes, _ = jax.tree.flatten(state.opt_state, is_leaf=lambda s: hasattr(s, "mu"))
    found = [linears_of(s.mu) for s in nodes if hasattr(s, "mu")]
    found += [linears_of(s.nu) for s in nodes if hasattr(s, "nu")]
    return [moment for moment in found if moment]


def linears_of(params, within="blocks."):
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=lambda n: isinstance(n, nnx.Variable)
    )
    names = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(v[...])
        for path, v in leaves
    }
    return {
        name.removesuffix(".kernel"): value
        for name, value in names.items()
        if name.startswith(within) and name.endswith(".kernel")
    }


class Watch:
    """A hook that looks at weights and moments after every step."""

    def __init__(self, pruner):
        self.pruner, self.seen, self.kept = pruner, [], []

    def __call__(self, step, state, metrics):
        masks = self.pruner.masks_of(state)
        for name, layer in linears(state.model).items():
            weight, kept = np.asarray(layer.kernel[...]), masks[name]
            assert (weight[~kept] == 0).all(), (step, name)
            assert (weight[kept] != 0).mean() > 0.99
            for moment in moments(state):
                assert (moment[name][~kept] == 0).all(), (step, name)
            if step > 1:
                assert np.abs(moments(state)[-1][name][kept]).max() > 0
        if self.kept:
            for name in masks:
                assert not (masks[name] & ~self.kept[-1][name]).any()
        self.seen.append((step, round(masks.sparsity, 6)))
        self.kept.append(masks)


@pytest.mark.parametrize(
    "pattern, kind", [("tew", "lamb"), *exhaustive(("tw", "muon"), ("2:4", "adamw"))]
)
def test_a_pruned_weight_never_comes_back(pattern, kind, tmp_path):
    sparsity = 0.5 if pattern == "2:4" else 0.75
    config = dataclasses.replace(TILES, pattern=pattern, sparsity=sparsity)
    pruner = Pruner(config, one_shot(sparsity))
    model = pruner.start(decoder())
    before = {n: np.asarray(x.kernel[...]) for n, x in linears(model).items()}
    watch = Watch(pruner)
    result, writer = run(
        dataclasses.replace(
            settings(tmp_path), optimizer=dataclasses.replace(OPTIMIZER, kind=kind)
        ),
        model=model,
        hooks=[watch],
        gradient_transforms=[pruner.transform],
    )
    assert [step for step, _ in watch.seen] == [1, 2, 3, 4, 5, 6]
    assert {share for _, share in watch.seen} == {sparsity}
    for name, layer in linears(result.state.model).items():
        after = np.asarray(layer.kernel[...])
        kept = watch.kept[0][name]
        assert (after[kept] != before[name][kept]).mean() > 0.99  # the rest does train
    losses = writer.losses()
    assert losses[6] < losses[1]


def test_stages_prune_more_and_more(tmp_path):
    stages = (
        Stage(step=1, sparsity=0.25),
        Stage(step=3, sparsity=0.5),
        Stage(step=4, sparsity=0.75),
    )
    done, updated = [], []

    def update(model, masks):
        updated.append(masks.sparsity)
        return model

    pruner = Pruner(
        TILES,
        stages,
        update=update,
        on_stage=lambda step, masks: done.append(step),
    )
    model = pruner.start(decoder())
    watch = Watch(pruner)
    # The pruner's hook comes first: the watch sees the state that it leaves.
    run(
        settings(tmp_path),
        model=model,
        hooks=[lambda *a: None, Both(pruner, watch)],
        gradient_transforms=[pruner.transform],
    )
    shares = [share for _, share in watch.seen]
    assert shares == [0.25, 0.25, 0.5, 0.75, 0.75, 0.75]
    assert done == [1, 3, 4] and updated == [0.25, 0.5, 0.75]


class Both:
    """Two hooks of which the second sees what the first returns."""

    def __init__(self, pruner, watch):
        self.pruner, self.watch = pruner, watch

    def __call__(self, step, state, metrics):
        pruned = self.pruner(step, state, metrics)
        self.watch(step, state if pruned is None else pruned, metrics)
        return pruned


def test_an_interrupted_run_continues_with_its_masks(tmp_path):
    stages = (Stage(step=0, sparsity=0.25), Stage(step=4, sparsity=0.5))

    def train(path):
        pruner = Pruner(TILES, stages)
        model = pruner.start(decoder())
        schedule = dataclasses.replace(OPTIMIZER, schedule="constant")
        config = dataclasses.replace(settings(path), optimizer=schedule)
        result, writer = run(
            config,
            model=model,
            hooks=[pruner],
            gradient_transforms=[pruner.transform],
        )
        return result.state, pruner.masks_of(result.state), list(writer.losses())

    whole, masks, _ = train(tmp_path / "whole")
    # Back to the checkpoint of step 3.
    cut = shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(cut / "checkpoints" / "6")
    resumed, again, steps = train(cut)
    assert steps == [4, 5, 6]
    assert masks.sparsity == again.sparsity == 0.5
    assert masks.config == again.config == TILES.with_sparsity(0.5)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_clipping_counts_only_what_is_kept():
    """The update is that of the model that has the kept weights alone."""
    model = decoder()
    masks = make_model_masks(model, magnitude_scores(model), TILES)
    params = nnx.state(apply_masks(model, masks), nnx.Param)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    grads = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), params)
    chain = optax.chain(mask_gradients(masks), optax.clip_by_global_norm(1.0))
    updates, _ = chain.update(grads, chain.init(params), params)
    flat = linears_of(grads)
    kept = {n: np.where(masks[n], g, 0) for n, g in flat.items()}
    squares = sum(float((g**2).sum()) for g in kept.values())
    others = jax.tree_util.tree_flatten_with_path(
        grads, is_leaf=lambda n: isinstance(n, nnx.Variable)
    )[0]
    for path, variable in others:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name.removesuffix(".kernel") not in flat:
            squares += float(jnp.square(variable[...]).sum())
    for name, update in linears_of(updates).items():
        np.testing.assert_allclose(update, kept[name] / np.sqrt(squares), rtol=1e-5)


class Nested(nnx.Module):
    """Layers whose names are ends of others': one of each kind is not pruned."""

    def __init__(self, depth, rngs):
        axes = {"kernel_axes": ("embed", "mlp"), "out_axes": ("batch", None, "act_mlp")}
        self.a = Linear(16, 16, **axes, rngs=rngs)
        self.up = Linear(16, 16, **axes, rngs=rngs)
        if depth:
            self.b = Nested(depth - 1, rngs)


def test_names_that_are_ends_of_others():
    """Each layer, its gradients and its moments have the mask of that layer."""
    model = Nested(1, nnx.Rngs(0))
    config = PruneConfig(pattern="ew", sparsity=0.5, scope="layer", dense=("b.up",))
    masks = make_model_masks(model, magnitude_scores(model), config)
    ones = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    kept = {name: masks[name] if name != "b.up" else True for name in linears(model)}
    transform = optax.chain(mask_gradients(masks), optax.adam(1.0))
    opt_state = transform.init(ones)
    gradients, _ = mask_gradients(masks).update(ones, mask_gradients(masks).init(ones))
    moments = jax.tree.map(jnp.ones_like, opt_state[1])
    state = TrainState(
        step=jnp.int32(0),
        model=ones,
        opt_state=(opt_state[0], moments),
        skipped=jnp.int32(0),
    )
    found = _prune_state(state, _codes(masks))
    for tree in (gradients, found.model, found.opt_state[1][0].mu):
        by_name = linears_of(tree, within="")
        assert by_name.keys() == kept.keys()
        for name, values in by_name.items():
            assert ((values != 0) == kept[name]).all(), name
    assert len(kept) == 4 and not (masks["a"] == masks["b.a"]).all()


def test_schedules():
    assert one_shot(0.9) == (Stage(step=0, sparsity=0.9),)
    stages = paper_stages(0.62, 5)
    assert [s.step for s in stages] == [0, 5, 10, 15, 20, 25][: len(stages)]
    assert [s.sparsity for s in stages] == [0.25, 0.35, 0.5, 0.55, 0.6, 0.62]
    cubic = cubic_stages(0.8, 4, 2)
    expected = [0.8 * (1 - (1 - i / 4) ** 3) for i in (1, 2, 3, 4)]
    np.testing.assert_allclose([s.sparsity for s in cubic], expected)


def test_schedules_that_cannot_be(model):
    with pytest.raises(ValueError, match="stages is empty"):
        Pruner(TILES, ())
    falling = (Stage(step=0, sparsity=0.5), Stage(step=1, sparsity=0.4))
    with pytest.raises(ValueError, match="sparsities must not fall"):
        Pruner(TILES, falling)
    with pytest.raises(ValueError, match=r"sparsity 1.5, expected"):
        Pruner(TILES, one_shot(1.5))
    with pytest.raises(ValueError, match="stages 0, expected at least 1"):
        cubic_stages(0.5, 0, 1)
    with pytest.raises(ValueError, match="steps_per_stage 0, expected at least 1"):
        paper_stages(0.5, 0)
    pruner = Pruner(TILES, one_shot(0.5))
    with pytest.raises(ValueError, match=r"after start\(model\); call that first"):
        _ = pruner.transform


def test_a_state_without_masks_is_an_error(tmp_path):
    pruner = Pruner(TILES, one_shot(0.5))
    result, _ = run(settings(tmp_path, steps=2), model=pruner.start(decoder()))
    with pytest.raises(ValueError, match=r"0 sets of masks, expected one: pass grad"):
        pruner.masks_of(result.state)
