"""Sampling the next token of many requests at once, each by its own settings.

The settings are columns of the device's rows (`batch_rows.Column`). The result depends
on the logits, the settings, the seed and the position of the token, and not on other
requests. Everything is in fp32.

Legend: B rows, C columns, V vocabulary, E biases of a row.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int16, UInt32

from jaxscale.inference.engine.scheduling.batch_rows import NUM_STOPS, Column


NUM_TOP = 20
"""Number of most likely tokens that `top_logprobs` reports."""

LARGEST = 1e30
"""Bound of penalized logits, so that they stay finite."""

IN_PROMPT = -(2**15)
"""The bit of a token count that marks tokens of the prompt."""


def draw(
    logits: Float[Array, "B V"], rows: Int[Array, "B C"], positions: Int[Array, "B"]
) -> Int[Array, "B"]:
    """The most likely token, or one sampled with the temperature of the row.

    Args:
        logits: Unnormalized log-probabilities.
        rows: Settings.
        positions: Positions of the tokens to sample, in their sequences.

    References:
        The maximum after adding Gumbel noise samples from the softmax: Maddison et al.,
        arXiv 1411.0030.
    """
    warm = _float(rows, Column.TEMPERATURE) > 0
    likely = jnp.argmax(logits, -1)

    def sampled() -> Array:
        noisy = _scaled(logits, rows) + _noise(logits.shape, rows, positions)
        return jnp.where(warm, jnp.argmax(noisy, -1), likely)

    # Tokens come out of both branches: logits would be copied, row by row.
    return jax.lax.cond(jnp.any(warm), sampled, lambda: likely).astype(jnp.int32)


def draw_filtered(
    logits: Float[Array, "B V"], rows: Int[Array, "B C"], positions: Int[Array, "B"]
) -> Int[Array, "B"]:
    """`draw` among the tokens that pass the row's top-k, top-p and min-p."""
    return draw(filtered(logits, rows), rows, positions)


def filtered(
    logits: Float[Array, "B V"], rows: Int[Array, "B C"]
) -> Float[Array, "B V"]:
    """`logits` with ``-inf`` for tokens excluded by the row's top-k, top-p or min-p.

    The temperature is applied before; top-p counts the tokens that pass the other two.
    Ties with the last included token are included.

    References:
        Nucleus (top-p) sampling, arXiv 1904.09751. min-p, arXiv 2407.01082.
    """
    scaled = _scaled(logits, rows)
    order = _order(scaled)
    top_k, top_p = rows[:, Column.TOP_K], _float(rows, Column.TOP_P)
    kept = scaled >= jnp.log(_float(rows, Column.MIN_P))[:, None]

    def at_least_k(least: Array) -> Array:
        return jnp.sum(order >= least[:, None], axis=-1, dtype=jnp.int32) >= top_k

    def reaches_p(kept: Array) -> Array:
        mass = jnp.where(kept, jnp.exp(scaled), 0.0)
        # A threshold that fp32 rounds to zero still keeps the most likely token.
        share = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)
        wanted = share * jnp.sum(mass, axis=-1)

        def holds(least: Array) -> Array:
            inside = jnp.where(order >= least[:, None], mass, 0.0)
            return jnp.sum(inside, axis=-1) >= wanted

        least = jnp.where(top_p < 1, _largest(holds, top_p), 0)
        return kept & (order >= least[:, None])

    least = jax.lax.cond(
        jnp.any(top_k > 0),
        lambda: jnp.where(top_k > 0, _largest(at_least_k, top_p), 0),
        lambda: jnp.zeros(top_k.shape, jnp.uint32),
    )
    kept &= order >= least[:, None]
    kept = jax.lax.cond(jnp.any(top_p < 1), reaches_p, lambda kept: kept, kept)
    return jnp.where(kept, logits, -jnp.inf)


def adjusted(
    logits: Float[Array, "B V"],
    rows: Int[Array, "B C"],
    counts: Int16[Array, "B V"],
    mask: UInt32[Array, "B words"],
    bias: Int[Array, "B E 2"],
) -> Float[Array, "B V"]:
    """`logits` after penalties, biases and masks.

    Args:
        logits: Unnormalized log-probabilities.
        rows: Settings.
        counts: How often each token occurs in the sequence, with the bit `IN_PROMPT`.
        mask: One bit per allowed token, the lowest first.
        bias: Tokens, V or more for unused entries, and the bits of their biases.
    """
    batch, vocab = logits.shape
    seen, drawn = counts != 0, (counts & ~jnp.int16(IN_PROMPT)).astype(jnp.float32)
    factor = _float(rows, Column.REPETITION)[:, None]
    penalized = jnp.where(logits > 0, logits / factor, logits * factor)
    penalized = jnp.clip(penalized, -LARGEST, LARGEST)
    logits = jnp.where(seen & (factor != 1), penalized, logits)
    logits -= _float(rows, Column.FREQUENCY)[:, None] * drawn
    some = (drawn > 0).astype(jnp.float32)
    logits -= _float(rows, Column.PRESENCE)[:, None] * some
    each = jnp.arange(batch)[:, None]
    added = jax.lax.bitcast_convert_type(bias[..., 1], jnp.float32)
    logits = logits.at[each, bias[..., 0]].add(added, mode="drop")
    # Before this many tokens no stop token may be sampled.
    stops = rows[:, Column.STOPS : Column.STOPS + NUM_STOPS]
    early = rows[:, Column.LENGTH] + 1 < rows[:, Column.MIN_LENGTH]
    barred = jnp.where(early[:, None] & (stops >= 0), stops, vocab)
    logits = logits.at[each, barred].set(-jnp.inf, mode="drop")
    bits = mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1  # [B, words, 32]
    allowed = bits.reshape(batch, -1)[:, :vocab] > 0
    return jnp.where(allowed, logits, -jnp.inf)


def logprobs(
    logits: Float[Array, "B V"], tokens: Int[Array, "B"]
) -> tuple[Float[Array, "B"], Bool[Array, "B"]]:
    """The log-probability of a token per row, and whether all logits are finite."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    total = jax.nn.logsumexp(logits, axis=-1)
    return chosen - total, jnp.all(jnp.isfinite(logits), axis=-1)


def top_logprobs(
    logits: Float[Array, "B V"],
) -> tuple[Int[Array, "B 20"], Float[Array, "B 20"]]:
    """The most likely tokens of each row, in order, and their log-probabilities.

    If the vocabulary has fewer than `NUM_TOP`, -1 and ``-inf`` follow.
    """
    most = min(NUM_TOP, logits.shape[-1])
    values, tokens = jax.lax.top_k(logits, most)
    values -= jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    missing = ((0, 0), (0, NUM_TOP - most))
    return (
        jnp.pad(tokens, missing, constant_values=-1),
        jnp.pad(values, missing, constant_values=-jnp.inf),
    )


def _float(rows: Array, column: int) -> Float[Array, "B"]:
    return jax.lax.bitcast_convert_type(rows[:, column], jnp.float32)


def _scaled(logits: Array, rows: Array) -> Float[Array, "B V"]:
    """`logits` by the temperature, shifted to a maximum of 0, for any temperature."""
    temperature = _float(rows, Column.TEMPERATURE)[:, None]
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    return below / jnp.where(temperature > 0, temperature, 1.0)


def _noise(
    shape: tuple[int, ...], rows: Array, positions: Array
) -> Float[Array, "B V"]:
    """Gumbel noise by the seed of the row and the position."""
    words = rows[:, Column.SEED : Column.SEED + 2]
    seeds = jax.lax.bitcast_convert_type(words, jnp.uint32)

    def of_row(seed: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), shape[1:])

    return jax.vmap(of_row)(seeds, positions)


def _order(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Integers in the same order as the numbers."""
    x = jnp.where(x == 0, 0.0, x)  # not -0.0, which is as large
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest(
    holds: Callable[[Array], Array], like: Float[Array, "B"]
) -> UInt32[Array, "B"]:
    """The largest integer of each row for which `holds`, which is true from 0 up to it.

    Bit by bit, the highest first: 32 sums over the vocabulary, without sorting.
    """

    def step(i: Array, least: Array) -> Array:
        bit = jnp.uint32(1) << (31 - i).astype(jnp.uint32)
        return jnp.where(holds(least | bit), least | bit, least)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros(like.shape, jnp.uint32))
