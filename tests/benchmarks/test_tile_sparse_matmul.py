"""The benchmark of tile-sparse products: its operands, forms and quick run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import command
from benchmarks import tile_sparse_matmul as benchmark


SMALL = benchmark.QUICK.params | {"M": 16, "K": 128, "N": 192}


def test_weights_have_the_sparsity_asked_for():
    params = SMALL | {"sparsity": 0.75, "mask": "equal"}
    w = benchmark.sparse_weight(params, 0)
    assert w.sparsity == pytest.approx(0.75) and w.equal_counts
    assert benchmark.kept_features(params) == 32
    uneven = benchmark.sparse_weight(params | {"mask": "uneven", "k_granularity": 8}, 0)
    counts = np.asarray(uneven.counts)
    assert len(set(counts)) > 1 and np.all((counts >= 24) & (counts <= 40))
    assert uneven.granularity == 8


def test_the_pruner_makes_a_mask_of_its_own():
    params = SMALL | {"sparsity": 0.75, "mask": "pruned"}
    w = benchmark.sparse_weight(params, 0)
    assert w.sparsity == pytest.approx(0.75) and len(set(np.asarray(w.counts))) > 1


@pytest.mark.parametrize(
    "name", ["auto", "tew_auto", "dense", "ideal", "bcoo", "int8_dense"]
)
def test_forms_compute_what_they_say(name, no_shape_hook):
    ready = benchmark.make_ready(benchmark.compiled(benchmark.FORMS[name](SMALL)))
    assert 0 < ready.max_rel_error < 3e-2
    assert len(ready.take(2)) == 2


def test_operands_of_torch_are_pruned_as_they_say():
    _, w = benchmark.FORMS["cusparselt_2_4"](SMALL).operands(0)
    groups = np.asarray(w.astype(jnp.float32)).reshape(-1, 4)
    assert np.all(np.count_nonzero(groups, axis=1) == 2)
    _, w = benchmark.FORMS["torch_bsr"](SMALL | {"N": 256}).operands(0)
    blocks = np.asarray(w.astype(jnp.float32)).reshape(4, 64, 2, 64).any((1, 3))
    assert blocks.sum() == 4
    with pytest.raises(NotImplementedError, match="prunes 50%"):
        benchmark.FORMS["cusparselt_2_4"](SMALL | {"sparsity": 0.75})
    with pytest.raises(NotImplementedError, match="for decoding"):
        benchmark.FORMS["int8_dense"](SMALL | {"M": 512})


def test_speed_up_is_over_the_best_dense_product():
    found = benchmark.compare(SMALL, {"dense": 4.0, "torch_dense": 3.0, "auto": 1.5})
    assert found["auto"]["speed_up"] == 2.0 and found["dense"]["speed_up"] == 0.75
    assert benchmark.compare(SMALL, {"auto": 1.0}) == {}


def test_cases_hold_the_shapes_of_the_bars():
    found = {
        (c.params["K"], c.params["N"], c.params["M"], c.params["sparsity"])
        for c in benchmark.BENCHMARK.cases
    }
    assert {(4096, 14336, 64, 0.75), (8192, 8192, 8192, 0.5)} <= found


def test_the_command_runs_anywhere_and_writes_nothing(tmp_path, capsys, no_shape_hook):
    arguments = ["--quick", "--out", str(tmp_path)]
    assert command.main(benchmark.BENCHMARK, arguments) == 0
    out = capsys.readouterr().out
    assert "mosaic_gpu: not supported" in out and "torch with a GPU" in out
    assert "speed_up" in out and "tiny" in out
    assert not [*tmp_path.rglob("*")]
    assert jax.devices()[0].platform == "cpu"
