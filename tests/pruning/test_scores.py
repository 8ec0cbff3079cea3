"""Scores against what they estimate, computed in another way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import sharding
from jaxscale.models import Decoder, stack
from jaxscale.pruning import (
    input_products,
    input_squares,
    linears,
    magnitude_scores,
    taylor_scores,
    wanda_scores,
)
from jaxscale.pruning.layers import replace_linears
from jaxscale.pruning.scores import _Probed
from tests.pruning.conftest import CONFIG, batches, mean_loss, perturbed


def inputs_of(model, data, monkeypatch):
    """What each layer was given, recorded layer by layer without a scan."""
    seen = {}
    call = _Probed.__call__

    def record(self, x, activation=None):
        kernel = np.asarray(self.kernel[...])
        seen.setdefault(kernel.tobytes(), []).append(np.asarray(x))
        return call(self, x, activation)

    monkeypatch.setattr(_Probed, "__call__", record)
    unrolled = replace_linears(model, dict.fromkeys(linears(model), _Probed))
    unrolled.scan_layers, unrolled.remat = False, "none"
    # Not compiled, so that there are numbers to record.
    monkeypatch.setattr(stack, "_run_block", stack._run_block.__wrapped__)
    for batch in data:
        unrolled.hidden(batch.tokens, cu_seqlens=batch.cu_seqlens)
    monkeypatch.undo()
    return seen


@pytest.fixture(scope="module")
def measured():
    """A model, batches, and the sums of squares of the inputs of its layers."""
    model = perturbed(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    model.remat = "full"
    data = batches(2)
    return model, data, input_squares(model, mean_loss, data)


def test_input_squares_are_those_of_the_inputs(measured, monkeypatch):
    """Through a scan over rematerialized layers."""
    model, data, found = measured
    seen = inputs_of(model, data, monkeypatch)
    assert set(found) == set(linears(model))
    for name, layer in linears(model).items():
        for i, kernel in enumerate(np.asarray(layer.kernel[...])):
            inputs = np.concatenate(seen[kernel.tobytes()])
            expected = np.square(inputs).sum((0, 1))
            np.testing.assert_allclose(found[name][i], expected, rtol=2e-5)


def test_input_products_are_those_of_the_inputs(measured, monkeypatch):
    model, data, squares = measured
    found = input_products(model, mean_loss, data)
    seen = inputs_of(model, data, monkeypatch)
    assert set(found) == set(squares)
    for name, layer in linears(model).items():
        for i, kernel in enumerate(np.asarray(layer.kernel[...])):
            x = np.concatenate(seen[kernel.tobytes()]).reshape(-1, len(kernel))
            scale = np.diagonal(found[name][i]).max()
            np.testing.assert_allclose(
                found[name][i], x.T @ x, rtol=0, atol=1e-5 * scale
            )
            np.testing.assert_allclose(
                np.diagonal(found[name][i]), squares[name][i], rtol=2e-5
            )


def test_wanda_is_weight_times_input_norm(measured):
    model, data, squares = measured
    before, structure = jax.tree.leaves(model), jax.tree.structure(model)
    scores = wanda_scores(model, mean_loss, data)
    weight = np.asarray(model.blocks.mlp.down.kernel[...])
    norms = np.sqrt(squares["blocks.mlp.down"])
    expected = np.square(np.abs(weight) * norms[:, :, None])
    np.testing.assert_allclose(scores["blocks.mlp.down"], expected, rtol=1e-5)
    # The model is left as it was.
    assert jax.tree.structure(model) == structure
    for old, new in zip(before, jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(old, new)


def test_taylor_is_what_removing_a_weight_changes(model):
    """To first order, and so for small weights: the loss without it, less the loss."""
    model = perturbed(model)
    batch = batches(1)[0]
    scores = taylor_scores(model, mean_loss, [batch])["blocks.mlp.up"]
    kernel = model.blocks.mlp.up.kernel
    loss = jax.jit(mean_loss)
    # The derivative along the weight by central differences.
    for place in [(0, 3, 5), (1, 20, 40), (1, 31, 63)]:
        step = 0.05
        sides = []
        for sign in (1, -1):
            changed = nnx.clone(model)
            changed.blocks.mlp.up.kernel = nnx.Param(
                kernel[...].at[place].multiply(1 + sign * step)
            )
            sides.append(float(loss(changed, batch)))
        change = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(np.sqrt(scores[place]), abs(change), atol=2e-5)


def test_scores_on_a_mesh_are_those_of_one_device(measured):
    model, data, squares = measured
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    rules = sharding.preset("fsdp_tp")
    split = Decoder(CONFIG, rules=rules, rngs=nnx.Rngs(0))
    split = sharding.place(perturbed(split), mesh, rules)
    taylor = taylor_scores(model, mean_loss, data)
    with jax.set_mesh(mesh):
        found = input_squares(split, mean_loss, data)
        split_taylor = taylor_scores(split, mean_loss, data)
    for name in squares:
        np.testing.assert_allclose(found[name], squares[name], rtol=1e-4)
        expected = taylor[name]
        atol = 1e-5 * expected.max()
        np.testing.assert_allclose(split_taylor[name], expected, 1e-3, atol)


def test_taylor_adds_squares_of_batches(model):
    """Of two equal batches twice the score: not the square of their sum."""
    (batch,) = batches(1)
    twice, once = (
        taylor_scores(model, mean_loss, data) for data in ([batch, batch], [batch])
    )
    for name, score in twice.items():
        np.testing.assert_allclose(score, 2 * once[name], rtol=1e-5)


def test_scores_need_a_batch(model):
    for scores in (wanda_scores, taylor_scores):
        with pytest.raises(ValueError, match="batches is empty; give at least one"):
            scores(model, mean_loss, [])


def test_magnitude_in_low_precision_is_in_fp32():
    low = Decoder(CONFIG, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    score = magnitude_scores(low)["blocks.mlp.up"]
    weight = np.asarray(low.blocks.mlp.up.kernel[...].astype(jnp.float32))
    assert score.dtype == np.float32
    np.testing.assert_array_equal(score, weight**2)
