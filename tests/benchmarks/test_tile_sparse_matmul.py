"""The benchmark of tile-sparse products: its operands, forms and quick run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import command, due, pruned_model
from benchmarks import tile_sparse_matmul as benchmark


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


def test_hidden_features_that_are_left_out_are_not_multiplied():
    """Up gives only those that are left, and down takes no others."""
    _, up, _ = benchmark.FORMS["auto"](UP).operands(0)
    x, down, _ = benchmark.FORMS["auto"](DOWN).operands(0)
    assert up.columns is None and up.shape[1] == down.shape[0] == len(x) < 512
    assert len(set(np.asarray(up.counts))) > 1  # tiles are uneven
    assert down.shape[1] == 128


def test_the_baseline_of_torch_is_pruned_as_it_says():
    _, w = benchmark.FORMS["cusparselt_2_4"](SMALL).operands(0)
    groups = np.asarray(w.astype(jnp.float32)).reshape(-1, 4)
    assert np.all(np.count_nonzero(groups, axis=1) == 2)
    with pytest.raises(NotImplementedError, match="prunes 50%"):
        benchmark.FORMS["cusparselt_2_4"]({**SMALL, "sparsity": 0.75})


def test_speed_stands_beside_accuracy_and_the_ideal(monkeypatch):
    small = pruned_model.load(pruned_model.UNTRAINED)
    bits = {"dense": 1.5, "int8": 1.51, "two_four": 1.6, "tw 0.5": 1.7}
    known = pruned_model.PrunedModel(bits=bits, parts=small.parts)
    monkeypatch.setattr(pruned_model, "load", lambda name: known)
    times = {"mosaic_gpu": 1.5, "dense": 4.0, "torch_dense": 3.0, "int8": 2.0}
    found = benchmark.compare(SMALL, times | {"cusparselt_2_4": 2.5})
    share = benchmark.part_of(SMALL).kept
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


def test_kept_is_said_of_each_matrix():
    form = benchmark.FORMS["auto"](TEW)
    part = benchmark.part_of(TEW)
    x, w, singles = form.operands(0)
    assert form.metrics is not None
    assert form.metrics((x, w, singles))["kept"] == part.kept
    assert part.kept > 1 - w.sparsity  # the single weights count too


def test_cases_are_every_mask_at_real_shapes():
    found = {
        (c.name, c.params["M"], c.params["mask"], c.params["sparsity"])
        for c in benchmark.BENCHMARK.cases
    }
    for mask in ("tw", "tew"):
        for sparsity in (0.5, 0.75, 0.9):
            for tokens in (1, 32, 4096):
                assert ("llama3_8b_up", tokens, mask, sparsity) in found
    assert {c.params["model"] for c in benchmark.BENCHMARK.cases} == {"bytes_34m"}
    for kind, k, n in benchmark.LAYERS.values():
        inputs, outputs = {"up": (512, 2048), "down": (2048, 512)}.get(kind, (512, 512))
        assert k % inputs == n % outputs == 0  # of the trained model


def test_no_case_is_of_the_old_masks():
    """A row of tiles that keep all columns, equally full, is no longer wanted."""
    folder = due.ROOT / "benchmarks" / "results" / "nvidia_h200"
    for name in ("tile_sparse_matmul", "tile_sparse_layers"):
        for row in due._stored(name, [folder]).values():
            assert row["params"]["mask"] in pruned_model.MASKS
            assert row["metrics"].get("bits_per_byte", 0) >= 0


def test_the_command_runs_anywhere_and_writes_nothing(tmp_path, capsys, no_shape_hook):
    arguments = ["--quick", "--out", str(tmp_path)]
    assert command.main(benchmark.BENCHMARK, arguments) == 0
    out = capsys.readouterr().out
    assert "mosaic_gpu: not supported" in out and "torch with a GPU" in out
    assert "speed_up" in out and "tiny" in out
    assert not [*tmp_path.rglob("*")]
    assert jax.devices()[0].platform == "cpu"
