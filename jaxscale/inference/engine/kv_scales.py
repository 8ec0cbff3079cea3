"""Scales of an fp8 KV cache, one per layer and head.

A value ``x`` is stored as ``x / scale``, rounded to E4M3 (four significant bits) and
clipped to 448. So a scale must fit the largest value, and may be generous: only values
below 2**-12 of that have fewer bits.

Legend: B prompts, T tokens, L layers, K key/value heads.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from jaxscale.models.adapters import adapter_names, use_adapters
from jaxscale.models.config import DecoderConfig
from jaxscale.models.decoder import Decoder
from jaxscale.nn.cache import PagedChunks, empty_pages
from jaxscale.sharding.operations import constrain


FP8 = jnp.dtype(jnp.float8_e4m3fn)
"""The type."""

_ROOM = 2.0
"""Margin by which values may exceed the measured maximum."""


def measure_kv_scales(
    model: Decoder, tokens: Int[np.ndarray, "B T"] | None = None
) -> Float[np.ndarray, "L 2 K"]:
    """Scales that hold twice the largest keys and values of `tokens`.

    They are powers of two: these do not change the mantissa, so that prefill and decode
    see the same keys and values in any compute type.

    Args:
        model: A decoder; all of its adapters are measured too.
        tokens: Prompts to measure; None uses one of random tokens.

    Returns:
        fp32, for `make_engine` or `Runner`.

    Raises:
        ValueError: keys or values are not finite.

    Example:
        >>> from flax import nnx
        >>> from jaxscale.models.families.llama import llama_tiny
        >>> model = Decoder(llama_tiny(), rngs=nnx.Rngs(0))
        >>> measure_kv_scales(model).shape
        (2, 2, 2)
    """
    model = model.for_inference()
    where = jax.tree.leaves(model)[0].sharding
    mesh: Any = where.mesh if isinstance(where, NamedSharding) else None
    prompts = tokens
    if prompts is None:
        longest = min(256, model.config.max_cache_len or model.config.max_seq_len)
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, model.config.vocab_size, (1, longest), np.int32)
    measure = jax.jit(_largest)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        found = [
            np.asarray(measure(model, row, np.int32(adapter)))
            for row in prompts
            for adapter in range(1 + len(adapter_names(model)))
        ]
    largest = np.max(found, axis=0)
    if not np.isfinite(largest).all():
        raise ValueError(
            "keys or values of the model are not finite, so that they have no scale; "
            "check its weights"
        )
    limit = float(jnp.finfo(FP8).max) / _ROOM
    largest = np.where(largest > 0, largest, limit)  # 1 for heads that are always zero
    return np.exp2(np.ceil(np.log2(largest / limit)))


def check_scales(
    model: DecoderConfig, scales: np.ndarray | None
) -> Float[np.ndarray, "L 2 K"] | None:
    """`scales` in fp32.

    Raises:
        ValueError: they do not fit the model, or some are not positive and finite.
    """
    if scales is None:
        return None
    shape = (model.num_layers, 2, model.num_kv_heads)
    scales = np.asarray(scales, np.float32)
    if scales.shape != shape:
        raise ValueError(
            f"kv_scales has shape {scales.shape}, expected [L, 2, K] = {shape}"
        )
    wrong = scales[~(np.isfinite(scales) & (scales > 0))]
    if wrong.size:
        raise ValueError(f"kv_scales must be positive and finite, got {wrong[0]}")
    return scales


def _largest(
    model: Decoder, tokens: Int[Array, "T"], adapter: Int[Array, ""]
) -> Float[Array, "L 2 K"]:
    """The magnitude of the largest keys and values of a prompt."""
    config, length = model.config, len(tokens)
    if model.adapters is not None:
        model = use_adapters(model, jnp.full((1, length), adapter))
    pages = empty_pages(
        num_layers=config.num_layers,
        num_pages=1,
        page_size=length,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
        rules=model.rules,
    )
    at = jnp.arange(length, dtype=jnp.int32)
    state = PagedChunks(
        positions=at[None],
        pages=pages,
        layer=jnp.int32(0),
        rows=at,
        cu_q=jnp.array([0, length]),
        prompt_table=jnp.zeros((1, 1), jnp.int32),
        ends=jnp.array([length]),
    )
    _, state = model.run(tokens[None], state)
    largest = jnp.abs(state.pages.astype(jnp.float32)).max(axis=(1, 4, 5))  # [L, 2, K]
    return constrain(largest, (None, None, None), model.rules)
