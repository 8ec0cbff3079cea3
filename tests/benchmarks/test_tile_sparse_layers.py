"""The benchmark of sparse layers: what it times is what it says, at a small size."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import pruned_model, pruning_accuracy
from benchmarks import tile_sparse_layers as benchmark
from benchmarks.measure import command
from benchmarks.tile_sparse_matmul import compiled, make_ready
from benchmarks.workloads import byte_text
from jaxscale import models, pruning
from jaxscale.nn import TileSparseLinear
from jaxscale.nn.linear import Linear
from jaxscale.nn.tile_sparse_linear import can_join_sparse


def params_of(name, run="fwd", mask="tw", sparsity=0.5, length=16):
    one = benchmark.case(name, 32, length, run).params
    return {**one, **benchmark.QUICK, "mask": mask, "sparsity": sparsity}


@pytest.mark.parametrize(
    ("layer", "run", "mask", "name"),
    [
        ("swiglu", "fwd", "tw", "auto"),
        ("swiglu", "fwd_bwd", "tew", "auto"),
        ("block", "fwd", "tew", "auto"),
        ("block", "fwd", "tw", "dense"),
        ("block", "fwd", "tw", "int8"),
        ("block", "fwd", "tw", "matmul_only"),
    ],
)
def test_layers_compute_what_they_say(layer, run, mask, name):
    params = params_of(layer, run, mask)
    ready = make_ready(compiled(benchmark.FORMS[name](params)))
    assert 0 < ready.max_rel_error < 3e-2


@pytest.fixture(scope="module")
def pruned_small():
    """A model pruned as the trained one is, by every mask, at the sizes of the cases.

    Half of its feed-forward networks keep most of what they have.
    """
    model = models.Decoder(byte_text.decoder(128, 2, 32, 64), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    scores = {
        name: size
        * np.exp(rng.standard_normal(size.shape) / 2)
        * (np.array([1, 9])[:, None, None] if ".mlp." in name else 1)
        for name, size in pruning.magnitude_scores(model).items()
    }
    found = {}
    for mask in pruned_model.MASKS:
        config = pruning.PruneConfig(pattern=mask, sparsity=0.5, tile=16)
        masks = pruning.make_model_masks(model, scores, config)
        made = pruning.sparsify(model, masks, separate=True)
        found[mask] = pruned_model.parts_of(model, masks), made.blocks
    return found


def test_layers_have_the_structure_that_sparsify_gives(pruned_small, monkeypatch):
    """In every block: widths, tiles, rows, and what stays dense."""
    masks = {f"{mask} 0.5": parts for mask, (parts, _) in pruned_small.items()}
    stored = {"tile": 16, "bits_per_byte": {}, "masks": masks}
    known = pruned_model._read(json.loads(json.dumps(stored)))
    monkeypatch.setattr(pruned_model, "load", lambda name: known)
    dense = []
    for mask, (_, blocks) in pruned_small.items():
        form = benchmark.FORMS["auto"](params_of("block", mask=mask))
        assert form.layers == len(blocks) == 2
        for i, separate in enumerate(blocks):
            made = jax.tree.map(lambda x: x, separate)
            if can_join_sparse(made.mlp.inputs):  # as served
                made.mlp.join_inputs(1)
            _, block = form.operands(0, i)
            for path, want in nnx.iter_modules(made):
                if not isinstance(want, TileSparseLinear | Linear):
                    continue
                found = block
                for key in path:
                    found = getattr(found, str(key))
                assert type(found).__name__.endswith("Linear")
                if isinstance(want, Linear):
                    assert isinstance(found, Linear)
                    assert found.kernel.shape == want.kernel.shape
                    dense.append((mask, i, str(path[-1])))
                    continue
                assert isinstance(found, TileSparseLinear)
                assert found.shape == want.shape
                np.testing.assert_array_equal(found.counts[...], want.counts[...])
                assert (found.columns is None) == (want.columns is None), path
                assert found.zeros_stay == (mask == "tew"), path
                assert found.values[...].shape[0] == 1  # one shard
    assert {("tw", 1, "up"), ("tw", 1, "down")} <= {*dense}
    assert ("tw", 0, "up") not in dense


def test_a_layer_of_tiles_times_two_of_four_computes_what_it_says():
    part = pruned_model.Part(
        shape=(128, 128),
        inputs=128,
        packed=True,
        counts=(64, 20),
        weights=84 * 32,
        tile=64,
        two_of_four=True,
    )
    dense = Linear(128, 128, kernel_axes=(None, None), rngs=nnx.Rngs(0))
    layer = part.linear(dense, 1)
    assert layer.metadata is not None
    x = pruned_model.normal(2, 1, 8, 128).astype(jnp.float32)
    kernel = benchmark._dense_weight(layer)
    np.testing.assert_allclose(layer(x), x @ kernel, atol=1e-4)
    assert np.count_nonzero(kernel) == part.weights


def test_every_parameter_has_a_gradient():
    params = params_of("swiglu", "fwd_bwd", "tew")
    form = benchmark.FORMS["auto"](params)
    _, dx, grads = jax.jit(form.function)(*form.operands(0, 0))
    assert len(grads) == 3
    assert all(float(abs(g).max()) > 0 for g in (dx, *grads))


def test_the_ideal_leaves_what_is_no_product():
    params = params_of("block", sparsity=0.9)
    share = benchmark.kept(params)
    form = benchmark.FORMS["auto"](params)
    stored = sum(
        int(jnp.sum(one.counts[...])) * 16
        for i in range(form.layers)
        for _, one in nnx.iter_modules(form.operands(0, i)[1])
        if isinstance(one, TileSparseLinear)
    )
    assert share == pytest.approx(stored / (2 * (4 * 128 * 128 + 3 * 128 * 512)))
    assert share == pytest.approx(0.1, abs=0.02)  # of 128 and 64 features
    times = {"mosaic_gpu": 3.0, "dense": 6.0, "matmul_only": 5.0}
    found = benchmark.compare(params, times)
    assert found["mosaic_gpu"]["speed_up"] == 2
    np.testing.assert_allclose(
        found["mosaic_gpu"]["ideal_speed_up"], 6 / (1 + 5 * share)
    )
    assert "ideal_speed_up" not in benchmark.compare(params, {"auto": 1.0, "dense": 2})


def test_a_layer_is_the_trained_one_at_larger_sizes():
    """All matrices grow alike, so that together they keep what the model does."""
    trained = pruning_accuracy.SETUPS[pruned_model.TRAINED].model
    large = benchmark.sizes("llama3_8b")
    for name in ("d_model", "d_ff"):
        assert getattr(large, name) == 8 * getattr(trained, name)
    attention = large.attention
    assert attention.num_kv_heads * attention.head_dim == 8 * 2 * 64
    assert attention.num_heads * attention.head_dim == 8 * 8 * 64
    assert (trained.num_heads, trained.num_kv_heads, trained.head_dim) == (8, 2, 64)


def test_what_a_form_cannot_do_is_said():
    for name, params, why in (
        ("triton", params_of("swiglu", "fwd_bwd"), "no kernel for gradients"),
        ("int8", params_of("swiglu", "fwd_bwd"), "no gradients"),
        ("cusparselt_2_4", params_of("block", "fwd_bwd"), "forward pass"),
        ("cusparselt_2_4", params_of("swiglu", sparsity=0.9), "prunes 50%"),
    ):
        with pytest.raises(NotImplementedError, match=why):
            benchmark.FORMS[name](params)


def test_layers_of_torch_are_pruned_two_of_four():
    form = benchmark.FORMS["cusparselt_2_4"](params_of("block"))
    x, weights = form.operands(0, 0)
    assert form.torch and form.repeats == 2
    shapes = {name: w.shape for name, w in weights.items()}
    assert shapes.pop("down") == (128, 512)
    assert {name: shapes.pop(name) for name in ("gate", "up")} == dict.fromkeys(
        ("gate", "up"), (512, 128)
    )
    assert {*shapes} == {"query", "key", "value", "out"}
    for w in weights.values():
        groups = np.asarray(w.astype(jnp.float32)).reshape(-1, 4)
        assert np.all(np.count_nonzero(groups, axis=1) == 2)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, weights))
    y = form.exact(*wide)
    assert y.shape == x.shape and y.dtype == jnp.float32
    none = jax.tree.map(jnp.zeros_like, wide[1])
    np.testing.assert_array_equal(form.exact(wide[0], none), wide[0])  # the residual


def test_the_command_runs_anywhere(tmp_path, capsys):
    arguments = ["--quick", "--out", str(tmp_path)]
    assert command.main(benchmark.BENCHMARK, arguments) == 0
    assert "speed_up" in capsys.readouterr().out
