"""Schedules at their corners, the decay mask on stacked layers, types of moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale.training.optimizer import (
    OptimizerConfig,
    decays,
    make_optimizer,
    make_schedule,
)
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
    zeros = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    for name, update in updates.items():
        factor = 0.0 if name == "scale" else -0.5 * 0.1
        np.testing.assert_allclose(update[...], factor * params[name][...], rtol=1e-6)


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
