"""Rotary embeddings against complex numbers, and their scaling by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.nn import Embed, RopeConfig, RopeScaling, rope_inv_freq, rotary


RNG = np.random.default_rng(0)


def rotated(x, positions, inv_freq, interleaved):
    """Pairs as complex numbers, in fp64."""
    pairs = len(inv_freq)
    x, out = x.astype(np.float64), x.astype(np.float64).copy()
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    angles = positions[..., None, None] * inv_freq.astype(np.float64)
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    out[..., first], out[..., second] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotary_multiplies_complex_numbers(interleaved, rotary_dim):
    x = RNG.normal(size=(2, 5, 3, 8)).astype(np.float32)
    positions = RNG.integers(0, 3000, size=(2, 5))
    inv_freq = rope_inv_freq(rotary_dim, 500.0)
    actual = rotary(jnp.asarray(x), jnp.asarray(positions), inv_freq, interleaved)
    expected = rotated(x, positions, inv_freq, interleaved)
    # fp32 angles up to 3000 radians are exact to 2**-13.
    np.testing.assert_allclose(actual, expected, atol=1e-3)
    assert np.abs(expected - x).max() > 0.1
    np.testing.assert_array_equal(actual[..., rotary_dim:], x[..., rotary_dim:])


def test_products_of_queries_and_keys_depend_on_their_distance_alone():
    q, k = (jnp.asarray(RNG.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in "qk")
    inv_freq = rope_inv_freq(8)

    def score(i, j):
        at = [jnp.array([[p]]) for p in (i, j)]
        return (rotary(q, at[0], inv_freq) * rotary(k, at[1], inv_freq)).sum()

    np.testing.assert_allclose(score(7, 3), score(107, 103), rtol=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_angles_are_computed_in_fp32_whatever_the_type_of_the_activations():
    x = jnp.asarray(RNG.normal(size=(1, 1, 1, 8)), jnp.bfloat16)
    positions = jnp.array([[1001]])  # rounds to 1000 in bf16
    actual = rotary(x, positions, rope_inv_freq(8))
    expected = rotated(
        np.asarray(x, np.float64), np.array([[1001]]), rope_inv_freq(8), False
    )
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(actual.astype(jnp.float32), expected, atol=2e-2)


def test_llama_3_scaling_by_hand():
    scaling = RopeScaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain = 500_000.0 ** (-np.arange(0, 128, 2) / 128)
    expected = []
    kinds = set()
    for frequency in plain:
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            kinds.add("kept")
            expected.append(frequency)
        elif wavelength > 8192 / 1:
            kinds.add("stretched")
            expected.append(frequency / 8)
        else:
            kinds.add("between")
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    assert kinds == {"kept", "stretched", "between"}
    actual = rope_inv_freq(128, 500_000.0, scaling)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_linear_scaling_divides_positions():
    scaling = RopeScaling(kind="linear", factor=4.0)
    x = jnp.asarray(RNG.normal(size=(1, 3, 2, 8)), jnp.float32)
    positions = jnp.array([[4, 8, 40]])
    config = RopeConfig(scaling=scaling)
    np.testing.assert_allclose(
        rotary(x, positions, config.inv_freq(8)),
        rotary(x, positions // 4, RopeConfig().inv_freq(8)),
        atol=1e-5,
    )


def test_dynamic_scaling_enlarges_the_base():
    scaling = RopeScaling(
        kind="dynamic", factor=4.0, original_max_position_embeddings=100
    )
    config = RopeConfig(theta=500.0, scaling=scaling)
    np.testing.assert_array_equal(config.inv_freq(8), rope_inv_freq(8, 500.0))
    lengths = jnp.array([[7, 100, 101, 400]])
    actual = config.dynamic_inv_freq(8, lengths)
    bases = [500.0 * stretch ** (8 / 6) for stretch in (1, 1, 1.04, 13)]
    expected = [rope_inv_freq(8, base) for base in bases]
    np.testing.assert_allclose(actual[0, :, 0], expected, rtol=1e-6)
    with pytest.raises(ValueError, match="at least 4 rotated features instead of 2"):
        config.dynamic_inv_freq(2, lengths)
    with pytest.raises(ValueError, match="scaling None must be dynamic"):
        RopeConfig().dynamic_inv_freq(8, lengths)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factor": 0.5}, "factor 0.5 must be at least 1"),
        ({"factor": float("nan")}, "factor nan must be at least 1 and finite"),
        ({"factor": 2.0, "low_freq_factor": 4.0}, "low_freq_factor 4.0 must be"),
        ({"factor": 2.0, "kind": "ntk"}, "kind 'ntk' is unknown; use 'llama3'"),
        ({"factor": 2.0, "beta_fast": 1.0}, "beta_slow 1.0 must be positive and less"),
        ({"factor": 2.0, "attention_factor": 0.0}, "attention_factor 0.0 must be posi"),
        (
            {"factor": 2.0, "original_max_position_embeddings": 0},
            "original_max_position_embeddings 0 must be positive",
        ),
    ],
)
def test_bad_scaling_is_refused(settings, message, no_shape_hook):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**settings)


def test_more_pairs_than_features_are_refused():
    x, positions = jnp.ones((1, 1, 1, 4)), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="inv_freq has 3 pairs, but x has only 4"):
        rotary(x, positions, rope_inv_freq(6))
    with pytest.raises(ValueError, match="rotary_dim 5 must be positive and even"):
        rope_inv_freq(5)


def test_look_ups_and_their_gradients():
    embed = Embed(7, 3, rngs=nnx.Rngs(0))
    table = np.asarray(embed.table[...])
    look_up = jax.jit(lambda embed, indices: embed(indices))
    indices = np.array([[2, 2, 6]], np.int32)
    np.testing.assert_array_equal(look_up(embed, indices), table[indices])
    weights = RNG.normal(size=(1, 3, 3)).astype(np.float32)
    loss = lambda embed, indices: (embed(indices) * weights).sum()  # noqa: E731
    grads = jax.jit(jax.grad(loss))(embed, indices)
    expected = np.zeros((7, 3), np.float32)
    np.add.at(expected, indices[0], weights[0])
    np.testing.assert_allclose(grads.table[...], expected, rtol=1e-6)
    assert np.isnan(look_up(embed, np.array([[7, -1, 7]], np.int32))).all()
