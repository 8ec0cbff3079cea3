"""Continue prompts, all together, until each has ended.

Legend: B batch, T tokens of a prompt, D model, E tokens that end a continuation.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxscale.inference.sampling import SamplingConfig, sample
from jaxscale.models.decoder import Decoder
from jaxscale.nn.cache import KVCache
from jaxscale.sharding.operations import constrain, per_shard


PROMPT_BLOCK = 64
"""Prompts are padded to a multiple of this, so that few lengths are compiled."""

GREEDY = SamplingConfig(temperature=0.0)
"""The most likely token, always."""

type _State = tuple[Array, Array, Array, Array, KVCache]
"""Step, newest token, all drawn tokens, which rows have ended, and the cache."""


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig = GREEDY,
    eos_id: int | Sequence[int] | None = None,
    key: Key[Array, ""] | None = None,
) -> list[list[int]]:
    """Continuations of `prompts`, drawn token by token.

    The prompts, of any lengths, go through the model once, padded to one length; then
    one compiled loop draws a token for every row until all have drawn `eos_id` or
    `max_new_tokens`. The result depends on the arguments alone: the same key gives the
    same tokens.

    Args:
        model: A decoder, on one device or sharded. On Explicit mesh axes the number of
            prompts must divide, and the rules must not split tokens, which come singly.
        prompts: Token ids, at least one a prompt.
        max_new_tokens: Most tokens to draw for a prompt.
        sampling: How to draw.
        eos_id: Token that ends a continuation, or several of which any does; None
            always draws `max_new_tokens`.
        key: Source of randomness; needed unless the temperature is 0.

    Returns:
        The drawn tokens of each prompt, without the prompt and without the
        token that ended them.

    Raises:
        ValueError: a prompt is empty or holds an id outside the vocabulary, prompt and
            continuation exceed ``config.max_cache_len``, or the key is missing.

    Example:
        >>> from flax import nnx
        >>> from jaxscale.models.llama import llama_tiny
        >>> model = Decoder(llama_tiny(), rngs=nnx.Rngs(0))
        >>> [len(tokens) for tokens in generate(
        ...     model, [[1, 2, 3], [4]], max_new_tokens=5)]
        [5, 5]
    """
    ends = [] if eos_id is None else np.atleast_1d(eos_id).tolist()
    lengths = _check(model, prompts, max_new_tokens, sampling, ends, key)
    if not lengths:
        return []
    longest = max(lengths)
    padded = -(-longest // PROMPT_BLOCK) * PROMPT_BLOCK
    capacity = padded + max_new_tokens
    if (limit := model.config.max_cache_len) is not None:
        capacity = min(capacity, limit)
        padded = min(padded, capacity)
    tokens = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    drawn = _generate(
        model,
        tokens,
        np.array(lengths, np.int32),
        jax.random.key(0) if key is None else key,
        np.array(ends, np.int32),
        capacity=capacity,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
    )
    return [_until(row, ends) for row in np.asarray(drawn).tolist()]


def _check(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingConfig,
    eos_ids: Sequence[int],
    key: Array | None,
) -> list[int]:
    """The lengths of the prompts, once everything is found possible."""
    config = model.config
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens} must be positive")
    if key is None and sampling.temperature > 0:
        raise ValueError(
            f"key None cannot be drawn from at temperature {sampling.temperature}; pass"
            " key=jax.random.key(seed), or SamplingConfig(temperature=0.0)"
        )
    for eos_id in eos_ids:
        if not 0 <= eos_id < config.vocab_size:
            raise ValueError(
                f"eos_id {eos_id} is outside the vocabulary of {config.vocab_size}"
            )
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(
                f"prompts[{i}] is empty; begin it with a token, such as the "
                "beginning-of-sequence id of the tokenizer"
            )
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= config.vocab_size:
            raise ValueError(
                f"prompts[{i}] holds the token {low if low < 0 else high}, outside the "
                f"vocabulary of {config.vocab_size}; does the tokenizer belong to the "
                "model?"
            )
        total = len(prompt) + max_new_tokens
        limit = config.max_cache_len
        if limit is not None and total > limit:
            what = (
                "max_seq_len {}, the size of the table of learned positions"
                if config.position == "learned"
                else "{}, the original length of dynamic rotary scaling"
            ).format(limit)
            raise ValueError(
                f"prompts[{i}] has {len(prompt)} tokens; with max_new_tokens "
                f"{max_new_tokens} they exceed {what}; shorten one of them"
            )
    return [len(prompt) for prompt in prompts]


@functools.partial(jax.jit, static_argnames=("capacity", "max_new_tokens", "sampling"))
def _generate(
    model: Decoder,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    key: Key[Array, ""],
    eos_ids: Int[Array, "E"],
    *,
    capacity: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
) -> Int[Array, "B new"]:
    """The drawn tokens; what follows one of `eos_ids` in a row means nothing."""
    batch = tokens.shape[0]
    hidden, cache = model.decode_hidden(
        tokens, model.init_cache(batch, capacity), lengths=lengths, cache_is_empty=True
    )
    logits = model.unembed(_last(model, hidden, lengths))

    def draw(logits: Array, step: Array) -> Array:
        # Every device draws every row: tokens are few, and sorting wants whole rows.
        logits = constrain(logits, (None, None, None), model.rules)
        return sample(logits[:, 0], jax.random.fold_in(key, step), sampling)

    def ends(token: Array) -> Array:
        return jnp.any(token[:, None] == eos_ids, axis=-1)  # [B, E] to [B]

    def going(state: _State) -> Array:
        step, _, _, ended, _ = state
        return (step < max_new_tokens) & ~jnp.all(ended)

    def advance(state: _State) -> _State:
        step, token, drawn, ended, cache = state
        logits, cache = model.decode(token[:, None], cache)
        token = draw(logits, step)
        drawn = jax.lax.dynamic_update_index_in_dim(drawn, token, step, axis=1)
        return step + 1, token, drawn, ended | ends(token), cache

    first = draw(logits, jnp.int32(0))
    drawn = jnp.zeros((batch, max_new_tokens), jnp.int32).at[:, 0].set(first)
    state = (jnp.int32(1), first, drawn, ends(first), cache)
    return jax.lax.while_loop(going, advance, state)[2]


def _last(
    model: Decoder, hidden: Float[Array, "B T D"], lengths: Int[Array, "B"]
) -> Float[Array, "B 1 D"]:
    """The activations of the last token of each prompt."""

    def take(hidden: Array, lengths: Array) -> tuple[Array]:
        index = lengths[:, None, None] - 1
        return (jnp.take_along_axis(hidden, index, axis=1),)

    axes = ("batch", None, "act_embed")
    return per_shard(take, [axes, ("batch",)], [axes], model.rules)(hidden, lengths)[0]


def _until(tokens: list[int], eos_ids: Sequence[int]) -> list[int]:
    """`tokens` before the first of `eos_ids`."""
    ends = (i for i, token in enumerate(tokens) if token in eos_ids)
    return tokens[: next(ends, len(tokens))]
