"""Speculative decoding by prompt lookup: draft tokens from the request's own tokens.

The newest n-gram is looked up among the earlier tokens, and what followed there is the
draft. It works well for edited code, quoted or summarized text, and repetitions. A step
then computes the newest token and its draft tokens together, which takes about as long
as one token while the batch is small.

The token at each position is sampled as without drafts, with the noise of its position,
and counts if all drafts before it equal the sampled tokens. So only the number of steps
changes: a draft of probability p is sampled with this probability, otherwise another
token by its share of the rest. That is rejection sampling with a deterministic draft
model.

Legend: B rows, C columns of a row, M tokens of the longest request, D draft tokens, R =
1 + D tokens per step, V vocabulary.

References:
    Prompt lookup decoding: https://github.com/apoorvumang/prompt-lookup-decoding.
    Speculative sampling: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
    2302.01318.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxscale.inference.engine import sampling
from jaxscale.inference.engine.scheduling.batch_rows import Column


def look_up(
    history: Int[Array, "B M"],
    last: Int[Array, "B"],
    *,
    drafts: int,
    shortest: int,
    longest: int,
) -> tuple[Int[Array, "B D"], Bool[Array, "B"]]:
    """Draft the tokens that followed the same n-gram before.

    Of the n-grams that end with the newest token, the longest that occurs earlier is
    used, at its last occurrence. If fewer than D tokens followed, the repetition is
    assumed to continue.

    Args:
        history: Tokens of each row; those after `last` are undefined.
        last: Position of the newest token.
        drafts: D, number of draft tokens.
        shortest: Shortest n-gram.
        longest: Longest n-gram.

    Returns:
        The draft tokens, and which rows have any; the others have zeros.

    Example:
        >>> history, last = jnp.array([[5, 6, 7, 8, 6, 7, 0, 0]]), jnp.array([5])
        >>> look_up(history, last, drafts=4, shortest=1, longest=3)[0].tolist()
        [[8, 6, 7, 8]]
    """
    width = history.shape[1]
    at = jnp.arange(width, dtype=jnp.int32)
    # How many tokens up to each place match the newest ones. [B, M]
    run = jnp.ones(history.shape, bool)
    length = jnp.zeros(history.shape, jnp.int32)
    for back in range(longest):
        place = jnp.maximum(last - back, 0)
        token = jnp.take_along_axis(history, place[:, None], axis=1)
        here = jnp.pad(history, ((0, 0), (back, 0)))[:, :width]
        # Before the first token there is nothing.
        run &= (here == token) & (at >= back)
        length += run.astype(jnp.int32)
    found = (length >= shortest) & (at < last[:, None])
    best = jnp.argmax(jnp.where(found, length * width + at, -1), axis=1)
    any_found = jnp.any(found, axis=1)
    period = jnp.maximum(last - best, 1)[:, None]
    ahead = best[:, None] + 1 + jnp.arange(drafts, dtype=jnp.int32) % period
    guesses = jnp.take_along_axis(history, ahead, axis=1)
    return jnp.where(any_found[:, None], guesses, 0), any_found


def verify(
    logits: Float[Array, "B_times_R V"],
    rows: Int[Array, "B C"],
    tokens: Int[Array, "B R"],
    num_new: Int[Array, "B"],
) -> tuple[Int[Array, "B R"], Bool[Array, "B D"]]:
    """Sample the token that follows each of `tokens`, and find the accepted drafts.

    Args:
        logits: Logits of the token that follows each.
        rows: The state: settings, seeds and lengths.
        tokens: The newest token of each row, then its drafts.
        num_new: How many of them are real.

    Returns:
        The sampled tokens, and for each draft whether it equals the token sampled
        there.
    """
    width = tokens.shape[1]
    at = rows[:, Column.LENGTH, None] + 1 + jnp.arange(width)
    each = jnp.repeat(rows, width, axis=0)
    drawn = sampling.draw(logits, each, at.reshape(-1)).reshape(tokens.shape)
    drafted = jnp.arange(1, width) < num_new[:, None]
    return drawn, drafted & (tokens[:, 1:] == drawn[:, :-1])


def write_history(
    history: Int[Array, "S M"],
    start: Int[Array, "B"],
    tokens: Int[Array, "B R"],
    num_new: Int[Array, "B"],
) -> Int[Array, "S M"]:
    """`history` with the first `num_new` tokens of each row from `start` on."""
    count = jnp.arange(tokens.shape[1])
    at = jnp.where(count < num_new[:, None], start[:, None] + count, history.shape[1])
    return history.at[jnp.arange(len(tokens))[:, None], at].set(tokens, mode="drop")
