"""What is kept of a trained model, and that it stays so at other sizes."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks import pruned_model, pruning_accuracy
from benchmarks.pruned_model import MASKS, SPARSITIES, UNTRAINED, Part
from benchmarks.workloads import byte_text
from jaxscale import models, pruning
from jaxscale.models.stack import unstacked


PART = Part(
    shape=(64, 128),
    inputs=48,
    packed=False,
    counts=(40, 8, 24),
    weights=900,
    tile=16,
)


def test_scaling_keeps_every_share():
    large = PART.scaled(256, 384)
    assert large.counts == (160,) * 3 + (32,) * 3 + (96,) * 3
    assert large.kept == PART.kept and large.inputs == 4 * 48
    assert large.multiplied == PART.multiplied == 72 * 16 / (64 * 128)
    with pytest.raises(ValueError, match="no multiple of the trained one"):
        PART.scaled(100, 128)


@pytest.mark.parametrize("packed", [True, False])
def test_weights_keep_what_the_part_says(packed):
    part = dataclasses.replace(PART, packed=packed).scaled(128, 256)
    w, other = part.weight(0), part.weight(1)
    assert tuple(np.asarray(w.counts)) == part.counts and not w.equal_counts
    width = 6 * 16
    assert w.shape == (96, width if packed else 256)
    np.testing.assert_array_equal(w.rows, other.rows)
    assert np.any(np.asarray(w.values) != np.asarray(other.values))
    mask = np.asarray(w.mask())
    assert mask.sum() == 16 * sum(part.counts)
    assert mask.any(0).sum() == width
    stored = np.asarray(w.values) != 0  # rows are there for some of their weights
    assert abs(stored.sum() - part.weights) < 0.05 * part.weights
    np.testing.assert_array_equal(stored, np.asarray(other.values) != 0)


def test_every_block_keeps_what_the_masks_do():
    """So that all together keep what the model does whose bits are known."""
    model = models.Decoder(byte_text.decoder(64, 3, 16, 32), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    scores = {
        name: size
        * np.array([0.4, 1.0, 3.0])[:, None, None]
        * np.exp(0.5 * rng.standard_normal((3, *size.shape[1:])))
        for name, size in pruning.magnitude_scores(model).items()
    }
    for mask in MASKS:
        config = pruning.PruneConfig(
            pattern=mask, sparsity=0.75, tile=16, max_layer_sparsity=1.0
        )
        masks = pruning.make_model_masks(model, scores, config)
        found = pruned_model.parts_of(model, masks)
        assert len(found) == 3
        stored = {"tile": 16, "bits_per_byte": {}, "masks": {"tw 0.75": found}}
        blocks = pruned_model._read(stored).blocks["tw 0.75"]
        parts = [part for block in blocks for part in block.values()]
        size = sum(kept.size for kept in masks.kept.values())
        # What belongs to hidden features without gate or up is in vain.
        assert 0.245 * size < sum(part.weights for part in parts) <= 0.25 * size
        dense = pruning.dense_layers(unstacked(model), masks.separated())
        for i, block in enumerate(found):
            assert set(block) == {"query", "key", "value", "out", "gate", "up", "down"}
            for name, whole in masks.kept.items():
                first, path = name.split(".", 1)
                part = block[name.rpartition(".")[2]]
                tiled = masks.tiled[name][i]
                if mask == "tw" and name.endswith(("gate", "up")):
                    both = (masks.tiled[f"blocks.mlp.{n}"][i] for n in ("gate", "up"))
                    tiled = tiled & np.logical_and(*(each.any(0) for each in both))
                assert part["packed"] or not name.endswith(("gate", "up"))
                if mask == "tw":
                    rows = pruning.tile_counts(tiled, 16, mask).tolist()
                    # A layer without a weight is stored as tiles without rows.
                    assert sorted(n for n in part["counts"] if n) == sorted(rows)
                assert sum(part["counts"]) * 16 >= part["weights"]
                assert part["weights"] <= whole[i].sum()
                assert part["dense"] == (f"{first}.{i}.{path}" in dense)
            hidden = 16 * len(block["up"]["counts"])
            assert block["down"]["inputs"] == hidden
            assert max(block["down"]["counts"]) <= hidden
        assert {part.dense for part in parts} == {True, False}


def test_the_untrained_model_has_uneven_tiles_and_no_bits():
    model = pruned_model.load(UNTRAINED)
    assert model.bits_of("dense") == {}
    for mask in MASKS:
        for sparsity in SPARSITIES:
            blocks = model.blocks[pruned_model.label(mask, sparsity)]
            parts = [part for block in blocks for part in block.values()]
            assert len({n for part in parts for n in part.counts}) > 5
            tiles = [part.multiplied - part.kept for part in parts if not part.dense]
            assert any(part > 0 for part in tiles) == (mask == "tew")


def test_a_model_is_trained_written_and_read(tmp_path, monkeypatch, capsys):
    """At the tiny size: every mask has bits of its own, and a file that says all."""
    tiny = dataclasses.replace(pruning_accuracy.SETUPS["tiny"], steps=4, tune_steps=2)
    monkeypatch.setitem(pruning_accuracy.SETUPS, "tiny", tiny)
    monkeypatch.setattr(pruned_model, "FILE", tmp_path / "pruned_model.json")
    monkeypatch.setattr(pruned_model, "SPARSITIES", (0.5,))
    monkeypatch.setattr(pruned_model, "SPARSITIES_24", ())
    seen, write = [], pruned_model.write
    monkeypatch.setattr(
        pruned_model, "write", lambda found: seen.append(found) or write(found)
    )
    pruned_model.make("tiny")
    assert len(seen) == 1  # nobody reads a file that lacks masks
    without = json.loads(pruned_model.FILE.read_text())
    monkeypatch.setattr(pruned_model, "SPARSITIES_24", (0.75,))
    stored = {**without, "masks": {**without["masks"], "tw 0.5": []}}
    pruned_model.make("tiny", stored, ["tw"])  # what it lacks, and that alone
    found = json.loads(pruned_model.FILE.read_text())
    tw24 = found["masks"].pop("tw24 0.75")
    assert found["masks"] == without["masks"] and len(tw24) == 2
    model = pruned_model.load.__wrapped__("tiny")
    names = {"dense", "int8", "two_four", "tw 0.5", "tew 0.5", "tw24 0.75"}
    assert set(model.bits) == names
    assert all(0 < bits < 8.1 for bits in model.bits.values())
    assert abs(model.bits["int8"] - model.bits["dense"]) < 0.05
    assert [part.packed for part in model.parts("tw", 0.5, "up")] == [True] * 2
    assert "tew 0.5" in capsys.readouterr().out


def test_without_a_file_and_a_gpu_nothing_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pruned_model, "FILE", tmp_path / "pruned_model.json")
    with pytest.raises(NotImplementedError, match=r"-m benchmarks\.pruned_model"):
        pruned_model.load.__wrapped__(pruned_model.TRAINED)
    assert pruned_model.main([]) == 1 and "no GPU" in capsys.readouterr().err
    assert jax.devices()[0].platform == "cpu" and not [*tmp_path.iterdir()]
