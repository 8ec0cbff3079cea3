"""Schedules at their corners, the decay mask on stacked layers, types of moments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale.models import EncoderModel, encoder_head, encoder_preset
from jaxscale.models.families.llama import llama_tiny
from jaxscale.sharding import fsdp_tp, make_mesh, shardings
from jaxscale.sharding.parameters import partitioned
from jaxscale.training.checkpoint.store import named_leaves
from jaxscale.training.config import TrainConfig
from jaxscale.training.data.packed import DataConfig
from jaxscale.training.layerwise import of_muon, scale_by_trust_ratio_of_layers
from jaxscale.training.monitoring.console import describe
from jaxscale.training.optimizer import (
    OptimizerConfig,
    decays,
    make_optimizer,
    make_schedule,
)
from jaxscale.training.step import TrainState
from tests.training import toy


def rates(total, counts, **options):
    schedule = make_schedule(OptimizerConfig(learning_rate=2.0, **options), total)
    return [float(schedule(n)) for n in counts]


def test_cosine_corners():
    got = rates(110, [0, 9, 10, 60, 110, 500], warmup_steps=10, min_ratio=0.1)
    np.testing.assert_allclose(got, [0.2, 2.0, 2.0, 1.1, 0.2, 0.2], rtol=1e-5)


def test_wsd_corners():
    got = rates(
        100,
        [0, 3, 4, 79, 80, 90, 100, 200],
        schedule="wsd",
        warmup_steps=4,
        decay_fraction=0.2,
        min_ratio=0.0,
    )
    np.testing.assert_allclose(got, [0.5, 2, 2, 2, 2, 1, 0, 0], rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "wsd", "decay_fraction": 0.0, "warmup_steps": 0},
        {"schedule": "wsd", "decay_fraction": 0.04, "warmup_steps": 0},
        {"schedule": "cosine", "warmup_steps": 10},
    ],
)
def test_without_steps_for_a_descent_the_peak_stays(options):
    assert rates(20, [9, 10, 11, 19], schedule_steps=10, **options) == [2.0] * 4


def test_constant_and_no_warmup():
    counts = [0, 50, 1000]
    assert rates(100, counts, schedule="constant", warmup_steps=0) == [2.0, 2.0, 2.0]
    assert rates(10, [0], warmup_steps=0) == [2.0]


@pytest.mark.parametrize(("total", "warmup"), [(5, 0), (20, 2), (5000, 100)])
def test_the_default_warmup_fits_every_run(total, warmup):
    counts = [0, 1, warmup, total]
    assert rates(total, counts) == rates(total, counts, warmup_steps=warmup)


def test_schedule_that_does_not_fit():
    with pytest.raises(ValueError, match=r"warmup_steps 90 .* fit in 100 steps.*110"):
        rates(100, [0], schedule="wsd", warmup_steps=90, decay_fraction=0.2)


def test_decay_follows_the_logical_axes_of_stacked_layers():
    params = nnx.state(toy.Toy(), nnx.Param)
    assert {name: decays(v) for name, v in params.items()} == {
        "embedding": True,
        "scale": False,  # [L, D]: its rank alone says matrix
        "up": True,
        "down": True,
        "output": True,
    }
    config = OptimizerConfig(
        learning_rate=0.5, schedule="constant", warmup_steps=0, weight_decay=0.1
    )
    optimizer = make_optimizer(config, 1)
    updates = updated(optimizer, jax.tree.map(np.zeros_like, params), params)
    for name, update in updates.items():
        factor = np.float32(0.0 if name == "scale" else -0.5 * 0.1)
        expected = factor * np.asarray(params[name][...])
        np.testing.assert_allclose(update[...], expected, rtol=1e-6)


def test_moments_keep_their_type_and_are_updated_in_fp32():
    config = OptimizerConfig(mu_dtype="bfloat16", nu_dtype="bfloat16")
    optimizer = make_optimizer(config, 200)
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    state = optimizer.init(params)
    exact = optax.adam(1.0, b1=config.b1, b2=config.b2)
    reference = exact.init({"w": jnp.ones((4, 4), jnp.float32)})
    for i in range(5):
        grads = {"w": jax.random.normal(jax.random.key(i), (4, 4)) / 10}
        with jax.numpy_dtype_promotion("standard"):
            _, state = optimizer.update(grads, state, params)
            _, reference = exact.update(grads, reference)
    for name in ("mu", "nu"):
        got, want = getattr(state[1], name)["w"], getattr(reference[0], name)["w"]
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0.03, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate 0.0 must be > 0"),
        ({"schedule": "linear"}, "schedule 'linear' must be cosine, wsd or constant"),
        ({"warmup_steps": -1}, "warmup_steps -1 must be >= 0"),
        ({"min_ratio": 1.5}, "min_ratio 1.5 must be between 0 and 1"),
        ({"b2": 1.0}, "b2 1.0 must be at least 0 and below 1"),
        ({"clip_norm": 0.0}, "clip_norm 0.0 must be > 0, or None"),
        ({"mu_dtype": "float16"}, "mu_dtype 'float16' must be float32 or bfloat16"),
        ({"nu_dtype": "bfloat16", "b2": 0.999}, "b2 0.999 must be at most 0.98 with"),
    ],
)
def test_impossible_settings(no_shape_hook, options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)


def stack(shape, *axes):
    init = partitioned(jax.nn.initializers.normal(1.0), *axes)
    return nnx.Param(init(jax.random.key(sum(shape)), shape, jnp.float32))


def layers_of(tree):
    """The same as parameters of single layers."""
    return [jax.tree.map(lambda x, i=i: x[i], nnx.to_pure_dict(tree)) for i in range(3)]


@pytest.fixture
def stacked():
    """Weights of three layers, each ten times the last, and updates for them."""
    shapes = {"kernel": ((3, 8, 4), "layers", "embed", "mlp")}
    shapes["scale"] = ((3, 8), "layers", "norm")
    weights = nnx.State({n: stack(s, *axes) for n, (s, *axes) in shapes.items()})
    factor = jnp.array([1.0, 10.0, 100.0])
    weights = jax.tree.map(
        lambda w: w * factor.reshape(-1, *[1] * (w.ndim - 1)), weights
    )
    return weights, jax.tree.map(jnp.cos, weights)


def test_the_trust_ratio_is_that_of_each_layer(stacked):
    weights, updates = stacked
    lamb, theirs = scale_by_trust_ratio_of_layers(), optax.scale_by_trust_ratio()
    scaled = updated(lamb, updates, weights)
    for got, w, u in zip(*map(layers_of, (scaled, weights, updates)), strict=True):
        want = updated(theirs, u, w)
        for name in w:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5)
            norms = [np.linalg.norm(x[name]) for x in (got, w)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    # Optax takes the stack for one layer: the first moves by 20 times what it is.
    wrong = updated(theirs, updates, weights)
    first = [np.linalg.norm(np.asarray(x["kernel"])[0]) for x in (wrong, weights)]
    assert first[0] > 20 * first[1]


def test_a_parameter_or_an_update_of_zero_has_the_ratio_one():
    lamb = scale_by_trust_ratio_of_layers()
    ones, zeros = jnp.ones((2, 3)), jnp.zeros((2, 3))
    for update, weight in ((ones, zeros), (zeros, ones)):
        scaled, _ = lamb.update({"w": update}, lamb.init({"w": weight}), {"w": weight})
        np.testing.assert_array_equal(scaled["w"], update)


def updated(optimizer, updates, weights):
    with jax.numpy_dtype_promotion("standard"):  # as in the training step
        update = jax.jit(lambda u, w: optimizer.update(u, optimizer.init(w), w)[0])
        return update(updates, weights)


def test_muon_is_that_of_each_layers_matrix(stacked):
    weights, updates = stacked
    kind = OptimizerConfig(
        kind="muon", learning_rate=1.0, schedule="constant", warmup_steps=0,
        weight_decay=0.0, clip_norm=None,
    )  # fmt: skip
    got = updated(make_optimizer(kind, 10), updates, weights)
    one = optax.contrib.muon(1.0, consistent_rms=0.2)
    for layer, (w, u) in enumerate(
        zip(layers_of(weights), layers_of(updates), strict=True)
    ):
        w, u = {"kernel": w["kernel"]}, {"kernel": u["kernel"]}
        want = updated(one, u, w)
        np.testing.assert_allclose(got["kernel"][layer], want["kernel"], atol=1e-5)
    adam = make_optimizer(dataclasses.replace(kind, kind="adamw"), 10)
    want = updated(adam, updates, weights)
    np.testing.assert_allclose(got["scale"][...], want["scale"][...], rtol=1e-6)


@pytest.mark.parametrize("kind", ["lamb", "muon"])
def test_moments_are_split_as_their_parameters(kind):
    optimizer = make_optimizer(OptimizerConfig(kind=kind), 10)
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    state = jax.eval_shape(lambda: TrainState.create(toy.Toy(), optimizer))
    placed = named_leaves(shardings(state, mesh, fsdp_tp()))
    mine = {n: s.spec for n, s in placed.items() if n.endswith(".mu.up")}
    assert list(mine.values()) == [placed["model.up"].spec] and len(placed) > 10


def test_a_layer_of_zeros_stays_zero():
    """A place without a layer in a pipeline."""
    weights = nnx.State({"w": stack((2, 4, 4), "layers", "embed", "mlp")})
    zeros = jax.tree.map(jnp.zeros_like, weights)
    for kind in ("adamw", "lamb", "muon"):
        optimizer = make_optimizer(OptimizerConfig(kind=kind), 10)
        np.testing.assert_array_equal(updated(optimizer, zeros, zeros)["w"][...], 0)


class Own(nnx.Module):
    """A model that knows nothing of logical axes."""

    def __init__(self, rngs):
        self.wte = nnx.Embed(50, 8, rngs=rngs)
        self.wpe = nnx.Embed(16, 8, rngs=rngs)
        self.blocks = nnx.List(
            [
                nnx.Dict(
                    norm=nnx.LayerNorm(8, rngs=rngs),
                    attention=nnx.Linear(8, 8, rngs=rngs),
                    up=nnx.Linear(8, 16, rngs=rngs),
                    down=nnx.Linear(16, 8, rngs=rngs),
                )
                for _ in range(2)
            ]
        )
        self.conv = nnx.Conv(8, 8, (3,), rngs=rngs)
        self.out = nnx.Linear(8, 50, use_bias=False, rngs=rngs)
        self.lm_head = nnx.Linear(8, 3, rngs=rngs)


def test_muon_takes_the_matrices_of_the_layers_of_any_model():
    params = nnx.state(Own(nnx.Rngs(0)), nnx.Param)
    of_each = named_leaves(of_muon(params))
    assert {name for name, by_muon in of_each.items() if by_muon} == {
        f"blocks.{i}.{layer}.kernel"
        for i in range(2)
        for layer in ("attention", "up", "down")
    }
    kind = OptimizerConfig(
        kind="muon", learning_rate=1.0, schedule="constant", warmup_steps=0,
        weight_decay=0.0, clip_norm=None,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    updates = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params
    )
    got = named_leaves(updated(make_optimizer(kind, 10), updates, params))
    adam = dataclasses.replace(kind, kind="adamw")
    want = named_leaves(updated(make_optimizer(adam, 10), updates, params))
    for name, gradient in named_leaves(updates).items():
        if not of_each[name]:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
            continue
        # As U V^T of the gradient, to the precision of five iterations.
        left, _, right = np.linalg.svd(gradient, full_matrices=False)
        scale = 0.2 * max(gradient.shape) ** 0.5
        singular = np.diag(left.T @ np.asarray(got[name]) @ right.T) / -scale
        assert (np.abs(singular - 1) < 0.4).all(), name


@pytest.mark.parametrize("name", ["modernbert_tiny", "bert_tiny", "deberta_v2_tiny"])
def test_muon_takes_the_first_layer_of_encoders_too(name):
    config = encoder_preset(name)
    head = encoder_head(config, "masked_lm")
    model = jax.eval_shape(lambda: EncoderModel(config, head=head, rngs=nnx.Rngs(0)))
    params = nnx.state(model, nnx.Param)
    of_each = named_leaves(of_muon(params))
    for name, by_muon in of_each.items():
        hidden = name.startswith(("first.", "blocks.")) and name.endswith(".kernel")
        assert by_muon == (hidden and "conv" not in name), name
    assert sum(of_each.values()) >= 6


def test_a_run_says_what_muon_takes():
    config = TrainConfig(
        model=llama_tiny(),
        data=DataConfig(seq_len=64, vocab_size=256),
        optimizer=OptimizerConfig(kind="muon"),
    )
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    state = TrainState.create(toy.Toy(), make_optimizer(config.optimizer, 10))
    lines = describe(config, mesh, state)
    assert "muon takes down, up" in lines
    assert "adamw takes embedding, output, scale" in lines
