"""Draws follow the distribution that a loop over tokens gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.inference import SamplingConfig, filter_logits, sample


LOGITS = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32) * 2


def expected_distribution(logits, temperature, top_k, top_p):
    """Token by token, in the order of likelihood, in fp64."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled)
    kept = order if top_k is None else order[:top_k]
    weights = np.exp(scaled[kept] - scaled[kept].max())
    weights /= weights.sum()
    if top_p is not None:
        count = 1
        while count < len(weights) and weights[:count].sum() < top_p:
            count += 1
        kept, weights = kept[:count], weights[:count] / weights[:count].sum()
    out = np.zeros(len(logits))
    out[kept] = weights
    return out


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, None, None),
        (0.5, None, None),
        (1.0, 5, None),
        (1.0, None, 0.7),
        (1.7, 20, 0.5),
        (1.0, None, 1.0),
        (1.0, None, 1e-6),
        (1.0, 50, None),
    ],
)
def test_the_distribution_is_that_of_a_loop_over_tokens(temperature, top_k, top_p):
    config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    actual = jax.nn.softmax(filter_logits(jnp.asarray(LOGITS), config), axis=-1)
    for row, logits in zip(np.asarray(actual), LOGITS, strict=True):
        expected = expected_distribution(logits, temperature, top_k, top_p)
        np.testing.assert_allclose(row, expected, atol=1e-6)


def test_by_default_nothing_is_changed_and_all_is_fp32():
    found = filter_logits(jnp.asarray(LOGITS), SamplingConfig())
    np.testing.assert_array_equal(found, LOGITS)
    low = jnp.asarray(LOGITS, jnp.bfloat16)  # divided in fp32
    found = filter_logits(low, SamplingConfig(temperature=0.7))
    np.testing.assert_allclose(found, np.asarray(low, np.float32) / 0.7, rtol=1e-6)


def test_draws_follow_the_distribution():
    config = SamplingConfig(temperature=1.3, top_k=8)
    num = 20_000
    logits = jnp.tile(LOGITS[:1], (num, 1))
    tokens = np.asarray(sample(logits, jax.random.key(1), config))
    counts = np.bincount(tokens, minlength=50)
    expected = num * expected_distribution(LOGITS[0], 1.3, 8, None)
    assert counts[expected == 0].sum() == 0
    inside = expected > 0
    chi_squared = ((counts - expected)[inside] ** 2 / expected[inside]).sum()
    assert chi_squared < 24.3  # 7 degrees of freedom, p = 0.001


def test_rows_are_drawn_independently_and_keys_matter():
    config = SamplingConfig()
    logits = jnp.zeros((64, 50))
    tokens = sample(logits, jax.random.key(0), config)
    assert len(set(np.asarray(tokens).tolist())) > 20
    assert (tokens == sample(logits, jax.random.key(0), config)).all()
    assert (tokens != sample(logits, jax.random.key(1), config)).any()


def test_temperature_zero_takes_the_most_likely_token():
    tokens = sample(
        jnp.asarray(LOGITS), jax.random.key(0), SamplingConfig(temperature=0.0)
    )
    np.testing.assert_array_equal(tokens, LOGITS.argmax(-1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1 must not be negative"),
        ({"temperature": float("nan")}, "temperature nan must not be negative"),
        ({"top_k": 0}, "top_k 0 must be positive, or None"),
        ({"top_p": 0.0}, "top_p 0.0 must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p 1.5 must be above 0 and at most 1"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**settings)


def test_temperature_zero_is_no_distribution():
    with pytest.raises(ValueError, match="temperature 0 is no distribution"):
        filter_logits(jnp.asarray(LOGITS), SamplingConfig(temperature=0.0))


def test_tokens_as_likely_as_the_last_that_is_in_are_in():
    logits = filter_logits(jnp.array([[0.0, 1.0, 1.0]]), SamplingConfig(top_k=1))
    np.testing.assert_array_equal(np.isneginf(logits), [[True, False, False]])


def test_top_k_larger_than_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="top_k 51 exceeds the vocabulary of 50"):
        sample(jnp.asarray(LOGITS), jax.random.key(0), SamplingConfig(top_k=51))


@pytest.mark.parametrize("top_p", [1e-9, 1e-45])
def test_a_tiny_top_p_leaves_the_most_likely_token(top_p):
    logits = jax.random.normal(jax.random.key(3), (8, 40))
    drawn = sample(logits, jax.random.key(4), SamplingConfig(top_p=top_p))
    np.testing.assert_array_equal(drawn, logits.argmax(-1))


def test_tokens_past_a_sum_that_equals_top_p_are_out():
    # Probabilities 1/2, 1/2, 0, 0 in fp32: the sum before the third is top_p itself.
    logits = filter_logits(
        jnp.array([[0.0, 0.0, -200.0, -300.0]]), SamplingConfig(top_p=1.0)
    )
    np.testing.assert_array_equal(np.isneginf(logits), [[False, False, True, True]])
