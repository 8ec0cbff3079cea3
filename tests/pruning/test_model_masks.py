"""Masks of models: which layers, how they are applied, saved and checked."""

import dataclasses

import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax import nnx

from jaxscale.models import Decoder
from jaxscale.pruning import (
    Masks,
    PruneConfig,
    apply_masks,
    choose,
    linears,
    magnitude_scores,
    make_model_masks,
)
from tests.changed_files import outcomes
from tests.pruning.conftest import CONFIG


TILES = PruneConfig(sparsity=0.75, tile=8)


def masks_of(model, config=TILES, **options):
    return make_model_masks(model, magnitude_scores(model), config, **options)


def test_all_layers_of_the_blocks_are_pruned_together(model):
    masks = masks_of(model)
    assert list(masks) == list(linears(model)) and "lm_head" not in masks
    kept = sum(mask.sum() for mask in masks.kept.values())
    total = sum(mask.size for mask in masks.kept.values())
    assert kept == total / 4 and masks.sparsity == 0.75
    # One ranking: the layers differ.
    shares = {mask.mean() for name in masks for mask in masks[name]}
    assert len(shares) > 3
    layered = masks_of(model, dataclasses.replace(TILES, scope="layer"))
    for name in layered:
        assert [mask.mean() for mask in layered[name]] == [0.25, 0.25]


def test_layers_stay_dense_by_name_rule_and_place(model):
    config = dataclasses.replace(
        TILES, dense=("blocks.attention.*", "blocks.mlp.up.0", "blocks.mlp.down")
    )
    masks = masks_of(model, config)
    assert masks.chosen == {"blocks.mlp.gate": [0, 1], "blocks.mlp.up": [1]}
    assert masks["blocks.mlp.up"][0].all()
    pruned = [*masks["blocks.mlp.gate"], masks["blocks.mlp.up"][1]]
    assert sum(m.sum() for m in pruned) == 3 * 32 * 64 / 4
    assert masks.sparsity == 0.75


def test_an_unknown_layer_is_an_error(model):
    with pytest.raises(ValueError, match=r"'blocks.mlp.upp' is no layer of the model"):
        choose(model, ["blocks.mlp.upp"])
    with pytest.raises(ValueError, match=r"did you mean blocks.mlp.up"):
        choose(model, ["blocks.mlp.upp"])
    with pytest.raises(ValueError, match=r"dense 'blocks.mlp.up.2' is no layer"):
        masks_of(model, dataclasses.replace(TILES, dense=("blocks.mlp.up.2",)))
    with pytest.raises(ValueError, match="no layer is left to prune"):
        masks_of(model, dataclasses.replace(TILES, dense=("blocks.*",)))


def test_applied_masks_zero_just_the_pruned(model):
    masks = masks_of(model)
    pruned = apply_masks(model, masks)
    for name, layer in linears(pruned).items():
        before = np.asarray(linears(model)[name].kernel[...])
        expected = np.where(masks[name], before, 0)
        np.testing.assert_array_equal(layer.kernel[...], expected)
    np.testing.assert_array_equal(pruned.embed.table[...], model.embed.table[...])
    # A copy: to donate one does not take the other away.
    jax.tree.map(lambda x: x.delete(), pruned)
    assert np.isfinite(np.asarray(model.embed.table[...])).all()


def test_masks_come_back_from_a_file(no_shape_hook, model, tmp_path):
    config = dataclasses.replace(
        TILES, pattern="tew", single_fraction=np.float32(0.5), dense=("*.0",)
    )
    masks = masks_of(model, config)
    masks.save(tmp_path / "masks.safetensors")
    (tmp_path / "other").write_text("")  # as readable as any file
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
    loaded = Masks.load(tmp_path / "masks.safetensors")
    assert loaded.config == config and loaded.chosen == masks.chosen
    for name in masks:
        np.testing.assert_array_equal(loaded[name], masks[name])
        np.testing.assert_array_equal(loaded.tiled[name], masks.tiled[name])
    assert (masks["blocks.mlp.up"] != masks.tiled["blocks.mlp.up"]).any()


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no masks")
    with pytest.raises(ValueError, match="text is no safetensors file"):
        Masks.load(tmp_path / "text")
    safetensors.numpy.save_file({"x": np.ones(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match="other holds None of version None, expected"):
        Masks.load(tmp_path / "other")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda bits, header: header.pop("shapes"), "is damaged: 'shapes'"),
        (lambda bits, header: bits.pop("blocks.mlp.up.kept"), "is damaged: 'blocks.ml"),
        (lambda bits, header: header.update(config="{"), "is damaged: Expecting"),
        (
            lambda bits, header: bits.update({"blocks.mlp.up.tiled": np.ones(3)}),
            "is damaged: blocks.mlp.up.tiled has 3 bytes",
        ),
    ],
)
def test_damaged_files_are_refused(model, tmp_path, damage, message):
    path = tmp_path / "masks.safetensors"
    masks_of(model).save(path)
    with safetensors.safe_open(path, framework="numpy") as file:
        header = file.metadata()
        bits = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # Of the version before, which had no digest: that would be told first.
    assert header.pop("digest")
    header["version"] = "1"
    damage(bits, header)
    safetensors.numpy.save_file(bits, path, metadata=header)
    with pytest.raises(ValueError, match=message):
        Masks.load(path)


def test_no_flipped_bit_gives_other_masks(no_shape_hook, model, tmp_path):
    path = tmp_path / "masks.safetensors"
    masks_of(model, dataclasses.replace(TILES, pattern="tew")).save(path)

    def read():
        masks = Masks.load(path)
        bits = {name: masks[name].tobytes() for name in masks}
        tiled = {name: masks.tiled[name].tobytes() for name in masks}
        return masks.config, masks.chosen, bits, tiled

    found = outcomes(path, read, 60)
    assert not found["wrong"] and found["refused"] > 50
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ValueError, match="is damaged: its digest differs; bring the"):
        Masks.load(path)


def test_masks_must_fit_the_model(no_shape_hook, model):
    masks = masks_of(model)
    wide = Decoder(dataclasses.replace(CONFIG, d_ff=128), rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"blocks.mlp.down has shape \(2, 64, 32\), expected \(2, 128"
    ):
        apply_masks(wide, masks)
    gelu = Decoder(dataclasses.replace(CONFIG, activation="gelu"), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"layer blocks.mlp.gate, which the model lac"):
        apply_masks(gelu, masks)
    for part in ("kept", "tiled"):
        table = getattr(masks, part)
        other = {name: mask.astype(np.float32) for name, mask in table.items()}
        with pytest.raises(ValueError, match="has type float32, expected bool"):
            apply_masks(model, dataclasses.replace(masks, **{part: other}))
        other = {name: mask[..., 1:] for name, mask in table.items()}
        with pytest.raises(ValueError, match=r"has shape .*, expected \(2, 32"):
            apply_masks(model, dataclasses.replace(masks, **{part: other}))
    with pytest.raises(ValueError, match=r"scores lack the layer blocks.attention.key"):
        make_model_masks(model, {}, TILES)
    scores = magnitude_scores(wide)
    with pytest.raises(ValueError, match=r"scores of layer blocks.mlp.gate have shape"):
        make_model_masks(model, scores, TILES)
