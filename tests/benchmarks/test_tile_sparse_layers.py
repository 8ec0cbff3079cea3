"""The benchmark of sparse layers: what it times is what it says, at a small size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import command, pruned_model
from benchmarks import tile_sparse_layers as benchmark
from benchmarks.tile_sparse_matmul import compiled, make_ready
from jaxscale import models, pruning
from jaxscale.nn import TileSparseLinear


def params_of(name, run="fwd", mask="tw", sparsity=0.5, length=16):
    one = benchmark.case(name, 32, length, run).params
    return {**one, **benchmark.QUICK, "mask": mask, "sparsity": sparsity}


@pytest.mark.parametrize(
    ("layer", "run", "mask", "name"),
    [
        ("swiglu", "fwd", "tw", "auto"),
        ("swiglu", "fwd_bwd", "tew", "auto"),
        ("block", "fwd", "tew", "auto"),
        ("block", "fwd", "tw", "auto"),
        ("block", "fwd", "tw", "dense"),
        ("swiglu", "fwd_bwd", "tw", "dense"),
        ("block", "fwd", "tw", "int8"),
        ("block", "fwd", "tw", "matmul_only"),
    ],
)
def test_layers_compute_what_they_say(layer, run, mask, name):
    params = params_of(layer, run, mask)
    ready = make_ready(compiled(benchmark.FORMS[name](params)))
    assert 0 < ready.max_rel_error < 3e-2


def test_layers_have_the_structure_that_sparsify_gives():
    """Widths, tiles, columns and single weights of a model pruned as the trained is."""
    config = benchmark.sizes("tiny")
    for mask in pruned_model.MASKS:
        params = params_of("block", mask=mask)
        _, block = benchmark.FORMS["auto"](params).operands(0)
        model = models.Decoder(
            benchmark.byte_text.decoder(128, 1, 32, 64), rngs=nnx.Rngs(0)
        )
        settings = pruning.PruneConfig(pattern=mask, sparsity=0.5, tile=16)
        masks = pruning.make_model_masks(
            model, pruning.magnitude_scores(model), settings
        )
        made = pruning.sparsify(model, masks)
        for path, want in nnx.iter_modules(made.blocks):
            if not isinstance(want, TileSparseLinear):
                continue
            found = block
            for key in path:
                found = getattr(found, str(key))
            assert isinstance(found, TileSparseLinear)
            assert (found.columns is None) == (want.columns is None), path
            assert (found.singles is None) == (want.singles is None), path
            assert found.values[...].shape[0] == 1  # one shard
            hidden = config.d_model if path[-1] in ("gate", "up", "out") else None
            assert hidden is None or found.shape[0] == hidden
        gate, up, down = block.mlp.gate, block.mlp.up, block.mlp.down
        assert gate.shape == up.shape and up.shape[1] == down.shape[0]
        assert (up.shape[1] < config.d_ff) == (mask == "tw")


def test_every_parameter_has_a_gradient():
    params = params_of("swiglu", "fwd_bwd", "tew")
    form = benchmark.FORMS["auto"](params)
    _, dx, grads = jax.jit(form.function)(*form.operands(0))
    assert len(grads) == 6  # tiles and single weights of each
    assert all(float(abs(g).max()) > 0 for g in (dx, *grads))


def test_the_ideal_leaves_what_is_no_product():
    params = params_of("block")
    share = benchmark.kept(params)
    _, block = benchmark.FORMS["auto"](params).operands(0)
    stored = sum(
        int(jnp.sum(one.counts[...])) * 16
        for _, one in nnx.iter_modules(block)
        if isinstance(one, TileSparseLinear)
    )
    assert share == pytest.approx(stored / (4 * 128 * 128 + 3 * 128 * 512))
    times = {"mosaic_gpu": 3.0, "dense": 6.0, "matmul_only": 5.0}
    found = benchmark.compare(params, times)
    assert found["mosaic_gpu"]["speed_up"] == 2
    np.testing.assert_allclose(
        found["mosaic_gpu"]["ideal_speed_up"], 6 / (1 + 5 * share)
    )
    assert "ideal_speed_up" not in benchmark.compare(params, {"auto": 1.0, "dense": 2})


def test_what_a_form_cannot_do_is_said():
    for name, params, why in (
        ("triton", params_of("swiglu", "fwd_bwd"), "no kernel for gradients"),
        ("int8", params_of("swiglu", "fwd_bwd"), "no gradients"),
        ("cusparselt_2_4", params_of("block"), "feed-forward"),
        ("cusparselt_2_4", params_of("swiglu", sparsity=0.9), "prunes 50%"),
    ):
        with pytest.raises(NotImplementedError, match=why):
            benchmark.FORMS[name](params)


def test_the_network_of_torch_is_pruned_two_of_four():
    form = benchmark.FORMS["cusparselt_2_4"](params_of("swiglu"))
    x, *weights = form.operands(0)
    assert form.torch and [w.shape for w in weights] == [(512, 128)] * 2 + [(128, 512)]
    for w in weights:
        groups = np.asarray(w.astype(jnp.float32)).reshape(-1, 4)
        assert np.all(np.count_nonzero(groups, axis=1) == 2)
    wide = [each.astype(jnp.float32) for each in (x, *weights)]
    assert form.exact(*wide).shape == (128, 32)


def test_the_command_runs_anywhere(tmp_path, capsys):
    arguments = ["--quick", "--out", str(tmp_path)]
    assert command.main(benchmark.BENCHMARK, arguments) == 0
    assert "speed_up" in capsys.readouterr().out
