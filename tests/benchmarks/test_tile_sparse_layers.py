"""The benchmark of sparse layers: what it times is what it says, at a small size."""

import jax
import numpy as np
import pytest

from benchmarks import command
from benchmarks import tile_sparse_layers as benchmark
from benchmarks.tile_sparse_matmul import compiled, make_ready
from jaxscale.nn import TileSparseLinear


SMALL = {"D": 64, "F": 128, "length": 16, "tile": 32}


@pytest.mark.parametrize("name", ["auto", "dense"])
@pytest.mark.parametrize("run", ["fwd", "fwd_bwd"])
@pytest.mark.parametrize("layer", ["swiglu", "swiglu_dropped", "bert_base"])
def test_layers_compute_what_they_say(layer, run, name):
    params = benchmark.case(layer, 32, 0.75, run, **SMALL).params
    ready = make_ready(compiled(benchmark.FORMS[name](params)))
    assert 0 < ready.max_rel_error < 3e-2


def test_as_many_weights_are_kept_with_hidden_features_left_out():
    kept = []
    for name in ("swiglu", "swiglu_dropped"):
        params = benchmark.case(name, 32, 0.75, "fwd", **SMALL).params
        _, layer = benchmark.FORMS["auto"](params).operands(0)
        layers = layer.gate, layer.up, layer.down
        assert all(isinstance(each, TileSparseLinear) for each in layers)
        kept.append([int(np.sum(each.counts[...])) * 32 for each in layers])
    assert kept[0] == kept[1] == [64 * 128 // 4] * 3


def test_every_parameter_has_a_gradient():
    params = benchmark.case("swiglu", 32, 0.5, "fwd_bwd", **SMALL).params
    form = benchmark.FORMS["auto"](params)
    _, dx, grads = jax.jit(form.function)(*form.operands(0))
    assert len(grads) == 3
    assert all(float(abs(g).max()) > 0 for g in (dx, *grads))


def test_the_command_runs_anywhere(tmp_path, capsys):
    arguments = ["--quick", "--out", str(tmp_path)]
    assert command.main(benchmark.BENCHMARK, arguments) == 0
    assert "speed_up" in capsys.readouterr().out
