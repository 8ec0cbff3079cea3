"""The benchmark of disentangled attention: two ways agree with the definition."""

import jax
import numpy as np
import pytest

from benchmarks import disentangled_attention as benchmark
from benchmarks import layer_norm
from benchmarks.measure import command, harness


def test_the_command_runs_anywhere_and_writes_nothing(tmp_path, capsys):
    arguments = ["--quick", "--out", str(tmp_path)]
    assert command.main(benchmark.BENCHMARK, arguments) == 0
    out = capsys.readouterr().out
    assert "mosaic_gpu: not supported" in out and "torch with a GPU" in out
    assert "; pass fwd_bwd, batch 3, max_len 16," in out and not [*tmp_path.rglob("*")]


def test_padded_forms_give_what_the_definition_does():
    params = benchmark.case("tiny", 3, 16, "fwd_bwd", (2, 16, 4)).params
    operands = harness.to_fp32(benchmark.inputs(params, jax.random.key(0)))
    found = benchmark.padded(params, cudnn=False)(*operands)
    wanted = jax.jit(benchmark.reference(params))(*operands)
    assert len(found) == 6 and harness.max_rel_error(found, wanted) < 1e-5


def test_padding_goes_and_comes_back():
    params = benchmark.case("tiny", 3, 16, "fwd", (2, 16, 4)).params
    rows, valid = benchmark.places(params)
    lengths = benchmark.lengths_of(params)
    assert len({*lengths}) > 1 and rows.shape == (3, 16)
    packed = np.arange(params["tokens"])
    np.testing.assert_array_equal(packed[rows].reshape(-1)[valid], packed)
    # Distances fall to the right, and the last entries are shared.
    entries = benchmark.entries_of(params)
    assert (np.diff(entries, axis=1) <= 0).all() and entries[0, 0] == 4
    assert entries.min() == 0 and entries.max() == 7


def test_what_is_not_installed_is_said(monkeypatch):
    params = benchmark.case("tiny", 3, 16, "fwd", (2, 16, 4)).params
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match="flashdeberta is not installed"):
        benchmark.flash_deberta(params)


@pytest.mark.parametrize("adds", [True, False])
def test_norms_are_measured(adds, tmp_path, capsys):
    arguments = ["--quick", "--out", str(tmp_path), "--adds", str(adds)]
    assert command.main(layer_norm.BENCHMARK, arguments) == 0
    out = capsys.readouterr().out
    assert "| tiny |" in out and f"; T 8, D 64, adds {adds}. cpu" in out
    assert not [*tmp_path.rglob("*")]
    params = layer_norm.case("tiny", 8, 64, adds).params
    x = layer_norm.inputs(params, jax.random.key(0))
    assert len(x) == (5 if adds else 3)
