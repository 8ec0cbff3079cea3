"""Drawing tokens by the settings of each row, against the definitions in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.inference.engine import sampling
from jaxscale.inference.engine.sampling import IN_PROMPT
from jaxscale.inference.engine.scheduling.batch_rows import Column, float_bits


VOCAB, ROWS = 70, 6
RNG = np.random.default_rng(0)
LOGITS = (3 * RNG.standard_normal((ROWS, VOCAB))).astype(np.float32)
NEUTRAL = {"TEMPERATURE": 1.0, "TOP_P": 1.0, "MIN_P": 0.0, "REPETITION": 1.0}
ALL = np.full((ROWS, 3), 2**32 - 1, np.uint32)
NO_BIAS = np.full((ROWS, 4, 2), VOCAB, np.int32)
NO_COUNTS = np.zeros((ROWS, VOCAB), np.int16)
draw = jax.jit(sampling.draw)
filtered = jax.jit(sampling.filtered)
adjusted = jax.jit(sampling.adjusted)


def rows(seed=0, **settings):
    """Rows of which one setting is a number or one for each."""
    made = np.zeros((ROWS, 40), np.int32)
    made[:, Column.STOPS : Column.STOPS + 8] = -1
    made[:, Column.SEED] = seed + np.arange(ROWS)
    for name, values in (NEUTRAL | settings).items():
        values = np.broadcast_to(values, ROWS)
        floats = values.dtype.kind == "f"
        numbers = [float_bits(v) if floats else v for v in values.tolist()]
        made[:, Column[name]] = numbers
    return made


def kept(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Which tokens are left, one after the other as the definitions say."""
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    p = np.exp(scaled - scaled.max())
    left = p >= min_p * p.max()
    if top_k:
        left &= scaled >= np.sort(scaled)[-top_k]
    p = np.where(left, p, 0) / p[left].sum()
    order = np.argsort(-p, kind="stable")
    reach = np.searchsorted(np.cumsum(p[order]), top_p) + 1
    return left & (p >= p[order[min(reach, VOCAB) - 1]]) if top_p < 1 else left


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 1},
        {"top_k": [1, 2, 5, 69, 70, 0]},
        {"top_p": [0.05, 0.3, 0.5, 0.9, 0.999, 1.0]},
        {"min_p": [0.01, 0.1, 0.3, 0.5, 1.0, 0.0]},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 1.7},
        {"top_k": [0, 3, 0, 9, 0, 1], "top_p": [0.7, 1.0, 0.2, 0.6, 1.0, 0.5]},
        {"temperature": [0.1, 0.5, 0.9, 1.0, 3.0, 50.0], "top_p": 0.6},
    ],
)
def test_what_may_be_drawn(settings):
    upper = {
        name.upper(): np.asarray(v, np.int32 if name == "top_k" else np.float32)
        for name, v in settings.items()
    }
    found = np.asarray(filtered(LOGITS, rows(**upper)))
    for i in range(ROWS):
        own = {n: v[i] if isinstance(v, list) else v for n, v in settings.items()}
        left = kept(LOGITS[i], **own)
        np.testing.assert_array_equal(np.isfinite(found[i]), left)
        np.testing.assert_array_equal(found[i][left], LOGITS[i][left])


def test_equally_likely_tokens_are_in_or_out_together():
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, 7:] = -1.0
    logits[:, ::2] *= -1  # among them -0.0, which is 0.0
    logits[:, 8:] = -1.0
    for settings in ({"TOP_K": 3}, {"TOP_P": 0.1}):
        left = np.isfinite(filtered(logits, rows(**settings)))
        assert left.sum(-1).tolist() == [7] * ROWS


def test_the_last_bit_of_a_logit_decides():
    """Neighbors of every parity are told apart."""
    logits = np.full((ROWS, VOCAB), -9, np.float32)
    logits[:, 0] = 0
    logit = np.float32(-1)
    for row in logits:
        row[5] = logit = np.nextafter(logit, np.float32(-2))
        row[6] = np.nextafter(logit, np.float32(-2))
    left = np.isfinite(filtered(logits, rows(TOP_K=2)))
    assert left[:, [0, 5]].all() and left.sum(-1).tolist() == [2] * ROWS


def test_extremes():
    """One token is always left, whatever the settings and the logits."""
    steep = LOGITS.copy()
    steep[1] *= 1e30
    steep[2] = 5.0
    for settings in (
        {"TOP_P": 1e-30, "TOP_K": VOCAB},
        {"TOP_P": 1e-300},
        {"TEMPERATURE": 1e-38, "TOP_P": 0.5},
        {"TEMPERATURE": 1e30, "MIN_P": 1.0},
    ):
        left = np.isfinite(filtered(steep, rows(**settings)))
        assert (left.sum(-1) >= 1).all()
    cold = np.asarray(draw(steep, rows(TEMPERATURE=1e-38), np.arange(ROWS)))
    np.testing.assert_array_equal(np.delete(cold, 2), np.delete(steep.argmax(-1), 2))


def test_greedy_rows_take_the_first_of_the_likeliest():
    logits = LOGITS.copy()
    logits[:, [3, 9]] = 99.0
    temperature = np.array([0, 1, 0, 1, 0, 1], np.float32)
    at = np.arange(ROWS)
    first = np.asarray(draw(logits, rows(TEMPERATURE=temperature), at))
    assert first[::2].tolist() == [3, 3, 3]
    assert set(first[1::2].tolist()) <= {3, 9}


def test_draws_follow_the_distribution():
    """Frequencies of 6 * 2,000 draws of each row, by a chi-squared statistic."""
    count, vocab = 2000, 8
    logits = RNG.standard_normal((ROWS, vocab)).astype(np.float32)
    temperature = np.array([0.5, 0.7, 1.0, 1.3, 2.0, 5.0], np.float32)
    settings = rows(TEMPERATURE=temperature)
    at = jnp.arange(count)[:, None] + jnp.zeros(ROWS, jnp.int32)
    drawn = np.asarray(jax.jit(jax.vmap(sampling.draw, (None, None, 0)))(
        logits, settings, at
    ))  # fmt: skip
    for i in range(ROWS):
        p = np.exp(logits[i] / temperature[i])
        expected = count * p / p.sum()
        seen = np.bincount(drawn[:, i], minlength=vocab)
        assert ((seen - expected) ** 2 / expected).sum() < 24.3  # p = 0.001


def test_a_draw_depends_on_seed_and_position_alone():
    whole = rows(seed=5)
    at = np.arange(ROWS) + 100
    expected = np.asarray(draw(LOGITS, whole, at))
    order = RNG.permutation(ROWS)
    np.testing.assert_array_equal(
        draw(LOGITS[order], whole[order], at[order]), expected[order]
    )
    others = rows(seed=5)
    others[1:, Column.TEMPERATURE] = 0
    assert draw(LOGITS, others, at)[0] == expected[0]
    flat = np.zeros_like(LOGITS)
    by_seed = {int(draw(flat, rows(seed=s), at)[0]) for s in range(0, 100, 10)}
    by_position = {int(draw(flat, whole, at + s)[0]) for s in range(10)}
    high = rows(seed=5)
    high[:, Column.SEED + 1] = 1
    assert len(by_seed) > 5 and len(by_position) > 5
    assert (np.asarray(draw(flat, high, at)) != draw(flat, whole, at)).any()


def test_filters_leave_the_draw_of_a_row_that_has_none():
    at = np.arange(ROWS)
    settings = rows(TOP_K=np.array([0, 3, 0, 0, 2, 0], np.int32))
    found = jax.jit(sampling.draw_filtered)(LOGITS, settings, at)
    plain = draw(LOGITS, rows(), at)
    np.testing.assert_array_equal(np.delete(found, [1, 4]), np.delete(plain, [1, 4]))


def test_penalties_biases_and_bars():
    counts = NO_COUNTS.copy()
    counts[:, 3], counts[:, 4], counts[:, 5] = 2, IN_PROMPT, IN_PROMPT + 3
    bias = NO_BIAS.copy()
    bias[2, 0] = 9, float_bits(-7.5)
    bias[2, 1] = 3, float_bits(4.0)
    mask = ALL.copy()
    mask[4, 1] = 1 << 5  # of the tokens 32 to 63 only 37
    repetition = np.array([1.0, 1.3, 1.0, 0.5, 1.0, 2.0], np.float32)
    presence = np.array([0, 0.5, 0, -1, 0, 2], np.float32)
    frequency = np.array([0, 0.25, 0, 0, -0.5, 1], np.float32)
    settings = rows(REPETITION=repetition, PRESENCE=presence, FREQUENCY=frequency)
    settings[5, Column.STOPS : Column.STOPS + 3] = 11, 12, 0
    settings[5, Column.LENGTH], settings[5, Column.MIN_LENGTH] = 7, 9
    expected = LOGITS.astype(np.float64)
    for i in range(ROWS):
        for token in (3, 4, 5):
            x = expected[i, token]
            x = x / repetition[i] if x > 0 else x * repetition[i]
            times = {3: 2, 4: 0, 5: 3}[token]
            expected[i, token] = x - frequency[i] * times - presence[i] * (times > 0)
    expected[2, 9] -= 7.5
    expected[2, 3] += 4.0
    expected[4, 32:64] = np.where(np.arange(32, 64) == 37, expected[4, 32:64], -np.inf)
    expected[5, [11, 12, 0]] = -np.inf
    found = adjusted(LOGITS, settings, counts, mask, bias)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    settings[5, Column.LENGTH] = 8  # nine tokens with the newest: enough
    found = adjusted(LOGITS, settings, counts, mask, bias)
    assert np.isfinite(found[5, [11, 12, 0]]).all()
    neutral = adjusted(LOGITS, rows(), counts, ALL, NO_BIAS)
    np.testing.assert_array_equal(neutral, LOGITS)


def test_penalties_leave_large_logits_finite():
    logits, counts = LOGITS.copy(), NO_COUNTS.copy()
    logits[:, 3], counts[:, 3] = 3e38, 1
    found = adjusted(logits, rows(REPETITION=0.5), counts, ALL, NO_BIAS)
    np.testing.assert_array_equal(found[:, 3], np.float32(sampling.LARGEST))


def test_log_probabilities():
    tokens = RNG.integers(0, VOCAB, ROWS).astype(np.int32)
    exact = LOGITS.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    found, finite = jax.jit(sampling.logprobs)(LOGITS, tokens)
    np.testing.assert_allclose(found, exact[np.arange(ROWS), tokens], atol=1e-5)
    assert finite.all()
    top, values = jax.jit(sampling.top_logprobs)(LOGITS)
    order = np.argsort(-exact, axis=-1)[:, :20]
    np.testing.assert_array_equal(top, order)
    np.testing.assert_allclose(values, np.take_along_axis(exact, order, -1), atol=1e-5)
    few, values = sampling.top_logprobs(jnp.asarray(LOGITS[:, :3]))
    assert (few[:, 3:] == -1).all() and np.isneginf(values[:, 3:]).all()
    for bad in (np.nan, np.inf, -np.inf):
        broken = LOGITS.copy()
        broken[2, 5] = bad
        _, finite = jax.jit(sampling.logprobs)(broken, tokens)
        assert finite.tolist() == [i != 2 for i in range(ROWS)]
