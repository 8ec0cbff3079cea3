"""Drawing the next token from logits.

Legend: B batch, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The settings of drawing tokens: temperature first, then top-k, then top-p.

    Example:
        >>> SamplingConfig(temperature=0.8, top_p=0.95).top_k is None
        True
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 always takes the most likely token."""
    top_k: int | None = None
    """Draw among this many most likely tokens."""
    top_p: float | None = None
    """Draw among the fewest most likely tokens whose probabilities reach it."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(
                f"temperature {self.temperature} must not be negative; 0 is greedy"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} must be positive, or None for all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be above 0 and at most 1")


def filter_logits(
    logits: Float[Array, "B V"], config: SamplingConfig
) -> Float[Array, "B V"]:
    """Logits in fp32 whose softmax is the distribution that `sample` draws from.

    Tokens that are out have ``-inf``. Tokens as likely as the last that is in are in.

    Raises:
        ValueError: the temperature is 0, or `top_k` exceeds the vocabulary.

    Example:
        >>> logits = jnp.array([[0.0, 2.0, 1.0]])
        >>> print(filter_logits(logits, SamplingConfig(temperature=0.5, top_k=2)))
        [[-inf   4.   2.]]

    References:
        Nucleus (top-p) sampling, arXiv 1904.09751.
    """
    if config.temperature == 0:
        raise ValueError("temperature 0 is no distribution; take the argmax")
    logits = logits.astype(jnp.float32) / config.temperature
    if config.top_k is not None:
        if config.top_k > logits.shape[-1]:
            raise ValueError(
                f"top_k {config.top_k} exceeds the vocabulary of {logits.shape[-1]}; "
                "use None for all tokens"
            )
        smallest = jax.lax.top_k(logits, config.top_k)[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if config.top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        inside = jnp.where(before < config.top_p, ordered, jnp.inf)
        smallest = jnp.min(inside, axis=-1, keepdims=True)
        # The first is in even where fp32 rounds top_p to zero.
        smallest = jnp.minimum(smallest, ordered[:, :1])
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return logits


def sample(
    logits: Float[Array, "B V"], key: Key[Array, ""], config: SamplingConfig
) -> Int[Array, "B"]:
    """One token for each row.

    Args:
        logits: Unnormalized log-probabilities.
        key: Source of randomness, unused at temperature 0.
        config: How to draw.

    Returns:
        Token ids, int32.

    Raises:
        ValueError: `top_k` exceeds the vocabulary.

    Example:
        >>> logits = jnp.array([[0.0, 2.0, 1.0]])
        >>> print(sample(logits, jax.random.key(0), SamplingConfig(temperature=0.0)))
        [1]
    """
    if config.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        tokens = jax.random.categorical(key, filter_logits(logits, config), axis=-1)
    return tokens.astype(jnp.int32)
