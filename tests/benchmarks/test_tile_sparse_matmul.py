"""The benchmark of tile-sparse products: its operands, forms and quick run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import pruned_model, pruning_accuracy
from benchmarks import tile_sparse_matmul as benchmark
from benchmarks.measure import command
from benchmarks.publish import due


SMALL = benchmark.QUICK.params
TEW = {**SMALL, "mask": "tew", "sparsity": 0.9}
UP = {**SMALL, "N": 512, "part": "up"}
DOWN = {**SMALL, "K": 512, "N": 128, "part": "down"}


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("auto", SMALL),
        ("auto", TEW),
        ("auto", UP),
        ("auto", DOWN),
        ("dense", SMALL),
        ("int8", SMALL),
    ],
)
def test_forms_compute_what_they_say(name, params, no_shape_hook):
    ready = benchmark.make_ready(benchmark.compiled(benchmark.FORMS[name](params)))
    assert 0 < ready.max_rel_error < 3e-2
    assert len(ready.take(2)) == 2


def test_tiles_times_two_of_four_keep_half_of_the_tiles(no_shape_hook):
    part = pruned_model.Part(
        shape=(256, 256),
        inputs=256,
        packed=True,
        counts=(128, 67),
        weights=195 * 64,
        tile=128,
        two_of_four=True,
    )
    dense = np.asarray(part.weight(0).to_dense(), np.float32)
    assert np.count_nonzero(dense) == 128 * (64 + 32)
    w = part.weight(1)
    x = pruned_model.normal(2, 256, 8)
    y = benchmark.tile_sparse_matmul(x, w, feature_major=True)
    want = np.asarray(w.to_dense(), np.float32).T @ np.asarray(x, np.float32)
    assert np.abs(np.asarray(y, np.float32) - want).max() < 1e-2 * np.abs(want).max()


def test_hidden_features_that_are_left_out_are_not_multiplied():
    """Up gives only those that are left, and down takes no others."""
    _, up = benchmark.FORMS["auto"](UP).operands(0, 0)
    x, down = benchmark.FORMS["auto"](DOWN).operands(0, 0)
    assert up.columns is None and up.shape[1] == down.shape[0] == len(x) < 512
    assert len(set(np.asarray(up.counts))) > 1  # tiles are uneven
    assert down.shape[1] == 128


def test_the_baseline_of_torch_is_pruned_as_it_says():
    _, w = benchmark.FORMS["cusparselt_2_4"](SMALL).operands(0, 0)
    groups = np.asarray(w.astype(jnp.float32)).reshape(-1, 4)
    assert np.all(np.count_nonzero(groups, axis=1) == 2)
    with pytest.raises(NotImplementedError, match="prunes 50%"):
        benchmark.FORMS["cusparselt_2_4"]({**SMALL, "sparsity": 0.75})


def test_speed_stands_beside_accuracy_and_the_ideal(monkeypatch):
    small = pruned_model.load(pruned_model.UNTRAINED)
    bits = {"dense": 1.5, "int8": 1.51, "two_four": 1.6, "tw 0.5": 1.7}
    known = pruned_model.PrunedModel(bits=bits, blocks=small.blocks)
    monkeypatch.setattr(pruned_model, "load", lambda name: known)
    times = {"mosaic_gpu": 1.5, "dense": 4.0, "torch_dense": 3.0, "int8": 2.0}
    found = benchmark.compare(SMALL, times | {"cusparselt_2_4": 2.5})
    share = benchmark.kept(benchmark.parts_of(SMALL))
    assert found["mosaic_gpu"] == {
        "bits_per_byte": 1.7,
        "speed_up": 2.0,
        "ideal_speed_up": 1 / share,
    }
    assert found["torch_dense"] == {"bits_per_byte": 1.5, "speed_up": 1.0}
    assert found["dense"]["speed_up"] == 0.75
    assert found["int8"]["bits_per_byte"] == 1.51
    assert found["cusparselt_2_4"]["bits_per_byte"] == 1.6
    # Without a dense product there is no speed-up, but there are bits.
    assert benchmark.compare(SMALL, {"auto": 1.0}) == {"auto": {"bits_per_byte": 1.7}}


def test_a_mask_that_the_model_lacks_is_said_and_not_timed():
    case = dataclasses.replace(benchmark.QUICK, params=SMALL | {"sparsity": 0.99})
    ((_, found),) = benchmark.measure([case], ["auto", "dense"], 1)
    assert all("lacks tw 0.99" in one.reason for one in found.values())
    assert benchmark.compare(case.params, {}) == {}


def test_what_all_layers_keep_and_take_is_said():
    """Ours of each layer, whose shapes differ; a baseline of one, as often."""
    form, dense = benchmark.FORMS["auto"](TEW), benchmark.FORMS["dense"](TEW)
    layers = [form.operands(0, i) for i in range(form.layers)]
    assert form.metrics is not None and dense.metrics is not None
    parts = benchmark.parts_of(TEW)
    assert len(parts) == form.layers == dense.repeats == 2 and dense.layers == 1
    found = form.metrics(layers)
    weights = sum(part.weights for part in parts)
    assert found["kept"] == weights / (2 * TEW["K"] * TEW["N"])
    assert found["kept"] < found["multiplied"] < 1  # rows for single weights
    stored = jax.tree.leaves([w for _, w in layers])
    assert found["weight_mb"] == pytest.approx(sum(x.nbytes for x in stored) / 1e6)
    one = dense.operands(0, 0)
    assert dense.metrics([one])["weight_mb"] == 2 * one[1].nbytes / 1e6
    assert not np.array_equal(*(x[0].astype(np.float32) for x in layers))  # inputs


def test_layers_that_are_alike_share_a_program(monkeypatch):
    """Those that stay dense are products; times are of all of them."""
    small = pruned_model.load(pruned_model.UNTRAINED)
    one = dataclasses.replace(small.parts("tw", 0.5, "query")[0], dense=False)
    full = dataclasses.replace(one, dense=True, counts=(64,) * len(one.counts))
    blocks = {"tw 0.5": [{"query": part} for part in (one, full, one, full, full)]}
    known = pruned_model.PrunedModel(bits={}, blocks=blocks)
    monkeypatch.setattr(pruned_model, "load", lambda name: known)
    done = benchmark.compiled(benchmark.FORMS["auto"](SMALL))
    assert len(done.functions) == 5 and len(set(map(id, done.functions))) == 2
    assert [*done.exact] == [0, 1]
    ready = benchmark.make_ready(done)
    assert 0 < ready.max_rel_error < 3e-2


def test_cases_are_every_mask_at_real_shapes():
    found = {
        (c.name, c.params["M"], c.params["mask"], c.params["sparsity"])
        for c in benchmark.BENCHMARK.cases
    }
    for mask in ("tw", "tew"):
        for sparsity in (0.5, 0.75, 0.9):
            for tokens in (1, 32, 4096):
                assert ("llama3_8b_up", tokens, mask, sparsity) in found
    assert {c.params["model"] for c in benchmark.BENCHMARK.cases} == {"bytes_27m"}
    model = pruning_accuracy.SETUPS["bytes_27m"].model
    for kind, k, n in benchmark.LAYERS.values():
        hidden, width = model.d_ff, model.d_model
        shapes = {"up": (width, hidden), "down": (hidden, width)}
        inputs, outputs = shapes.get(kind, (width, width))
        assert k % inputs == n % outputs == 0  # of the trained model


def test_no_case_is_of_the_old_masks():
    """A row of tiles that keep all columns, equally full, is no longer wanted."""
    folder = due.ROOT / "benchmarks" / "results" / "nvidia_h200"
    for name in ("tile_sparse_matmul", "tile_sparse_layers"):
        for row in due._stored(name, [folder]).values():
            assert row["params"]["mask"] in (*pruned_model.MASKS, "tw24")
            assert row["metrics"].get("bits_per_byte", 0) >= 0


def test_the_command_runs_anywhere_and_writes_nothing(tmp_path, capsys, no_shape_hook):
    arguments = ["--quick", "--out", str(tmp_path)]
    assert command.main(benchmark.BENCHMARK, arguments) == 0
    out = capsys.readouterr().out
    assert "mosaic_gpu: not supported" in out and "torch with a GPU" in out
    assert "speed_up" in out and "tiny" in out
    assert not [*tmp_path.rglob("*")]
    assert jax.devices()[0].platform == "cpu"
