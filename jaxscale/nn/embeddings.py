"""Token embeddings and rotary position embeddings.

Legend: B batch, T tokens, N heads, H head dim, D model, V vocabulary.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxscale.checks import check_positive
from jaxscale.keywords import explain_keywords
from jaxscale.sharding.lookup import gather
from jaxscale.sharding.manual import sum_for_all
from jaxscale.sharding.operations import constrain
from jaxscale.sharding.parameters import partitioned
from jaxscale.sharding.rules import REPLICATED, AxisRules


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the context length of pretraining.

    Example:
        >>> RopeScaling(factor=8.0, original_max_position_embeddings=8192).kind
        'llama3'
    """

    kind: Literal["llama3", "linear", "yarn", "dynamic"] = "llama3"
    """`linear` divides every frequency by `factor`; `llama3` only low ones; `yarn`
    (arXiv 2309.00071) too, by another ramp, and scales the logits up; `dynamic`
    increases the base with the length of sequences longer than the original context."""
    factor: float
    """Factor by which the context is extended."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original / low_freq_factor are stretched."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original / high_freq_factor are kept."""
    original_max_position_embeddings: int = 8192
    """Context length of pretraining, in tokens; ignored by linear."""
    beta_fast: float = 32.0
    """yarn: pairs with more rotations within that length are kept."""
    beta_slow: float = 1.0
    """yarn: pairs with fewer rotations are stretched."""
    truncate: bool = True
    """yarn: the ramp between them begins and ends at whole pairs."""
    attention_factor: float | None = None
    """yarn: factor of rotated queries and keys; None is ``0.1 log(factor) + 1``."""

    def __post_init__(self) -> None:
        if self.kind not in ("llama3", "linear", "yarn", "dynamic"):
            raise ValueError(
                f"kind {self.kind!r} is unknown; use 'llama3', 'linear', 'yarn' or "
                "'dynamic'"
            )
        if not 0 < self.beta_slow < self.beta_fast < math.inf:
            raise ValueError(
                f"beta_slow {self.beta_slow} must be positive and less than beta_fast "
                f"{self.beta_fast}"
            )
        if self.attention_factor is not None:
            check_positive(self, "attention_factor")
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor {self.factor} must be at least 1 and finite")
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} must be positive and less "
                f"than high_freq_factor {self.high_freq_factor}"
            )
        if not self.original_max_position_embeddings >= 1:
            raise ValueError(
                "original_max_position_embeddings "
                f"{self.original_max_position_embeddings} must be positive"
            )


def rope_inv_freq(
    rotary_dim: int, theta: float = 10_000.0, scaling: RopeScaling | None = None
) -> Float[np.ndarray, "pairs"]:
    """The angular frequency, in radians per token, of each rotated pair of features.

    ``inv_freq[i] = theta ** (-2 i / rotary_dim)``, stretched as `scaling` says. Llama-3
    scaling divides frequencies whose wavelength exceeds ``original / low_freq_factor``
    by `factor`, keeps those below ``original / high_freq_factor`` and interpolates
    between. Dynamic scaling returns the frequencies of sequences of the original
    length.

    Args:
        rotary_dim: Number of rotated features of a head, even.
        theta: Base of the geometric progression.
        scaling: Context extension, or None.

    Returns:
        ``rotary_dim / 2`` frequencies in fp32, rounded from fp64.

    Raises:
        ValueError: `rotary_dim` is not positive and even.

    Example:
        >>> rope_inv_freq(4, theta=100.0)
        array([1. , 0.1], dtype=float32)

    References:
        RoFormer, arXiv 2104.09864. Llama 3, arXiv 2407.21783.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim {rotary_dim} must be positive and even")
    inv_freq = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if scaling is None or scaling.kind == "dynamic":
        pass
    elif scaling.kind == "linear":
        inv_freq = inv_freq / scaling.factor
    elif scaling.kind == "yarn":
        ramp = _yarn_ramp(rotary_dim, theta, scaling)
        inv_freq = inv_freq * (1 - ramp + ramp / scaling.factor)
    else:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = scaling.original_max_position_embeddings * inv_freq / (2 * np.pi)
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        inv_freq = inv_freq * (kept + (1 - kept) / scaling.factor)
    return inv_freq.astype(np.float32)


def _yarn_ramp(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Weight of the scaling for each pair, from 0 for fast ones to 1 for slow ones."""

    def pair(turns: float) -> float:
        """The (fractional) pair with so many rotations in the original context."""
        length = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return dim * math.log(length) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # as transformers avoids a division by zero
    return np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a layer.

    Example:
        >>> RopeConfig(theta=100.0).inv_freq(4)
        array([1. , 0.1], dtype=float32)
    """

    theta: float = 10_000.0
    """Base of the frequencies."""
    rotary_dim: int | None = None
    """Rotated features of a head; None rotates all."""
    interleaved: bool = False
    """Pairs are (2i, 2i+1), as in GPT-J, instead of (i, i + rotary_dim/2)."""
    scaling: RopeScaling | None = None
    """Context extension."""

    @property
    def is_dynamic(self) -> bool:
        """True if the frequencies depend on the lengths of the sequences."""
        return self.scaling is not None and self.scaling.kind == "dynamic"

    def inv_freq(self, head_dim: int) -> Float[np.ndarray, "pairs"]:
        """The frequencies for heads of `head_dim` features."""
        dim = head_dim if self.rotary_dim is None else self.rotary_dim
        return rope_inv_freq(dim, self.theta, self.scaling)

    def dynamic_inv_freq(
        self, head_dim: int, lengths: Int[Array, "B T"]
    ) -> Float[Array, "B T 1 pairs"]:
        """The frequencies for tokens of sequences of these lengths, in fp32.

        The base becomes ``theta * stretch ** (dim / (dim - 2))`` with ``stretch =
        factor * length / original - (factor - 1)``, for lengths above the original.

        Raises:
            ValueError: the scaling is not dynamic, or fewer than four features rotate.

        Example:
            >>> scaling = RopeScaling(
            ...     kind="dynamic", factor=2.0, original_max_position_embeddings=8
            ... )
            >>> rope = RopeConfig(theta=100.0, scaling=scaling)
            >>> print(rope.dynamic_inv_freq(4, jnp.array([[8, 16]]))[0, :, 0])
            [[1.         0.1       ]
             [1.         0.03333334]]
        """
        fixed = self.inv_freq(head_dim)
        pairs = fixed.shape[0]
        if self.scaling is None or not self.is_dynamic or pairs < 2:
            raise ValueError(
                f"scaling {self.scaling} must be dynamic, with at least 4 rotated "
                f"features instead of {2 * pairs}"
            )
        factor, original = (
            self.scaling.factor,
            self.scaling.original_max_position_embeddings,
        )
        longer = jnp.maximum(lengths, original).astype(jnp.float32)
        stretch = factor * longer / original - (factor - 1)
        # theta ** (-2 i / dim) times stretch ** (-2 i / (dim - 2)).
        power = -np.arange(pairs, dtype=np.float32) / np.float32(pairs - 1)
        return stretch[..., None, None] ** power * fixed  # [B, T, 1, pairs]

    @property
    def attention_factor(self) -> float:
        """Factor of rotated queries and keys, 1 without yarn."""
        if self.scaling is None or self.scaling.kind != "yarn":
            return 1.0
        given = self.scaling.attention_factor
        return 0.1 * math.log(self.scaling.factor) + 1 if given is None else given


def rotary(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    inv_freq: Float[np.ndarray | Array, "*BT1 pairs"],
    interleaved: bool = False,
    factor: float = 1.0,
) -> Float[Array, "B T N H"]:
    """`x` with its first ``2 * pairs`` features rotated by position.

    Pair `i` of a token at position `p`, seen as a complex number, is multiplied by
    ``exp(1j * p * inv_freq[i])``. Features past ``2 * pairs`` are left alone. Angles
    and products are computed in fp32.

    Args:
        x: Queries or keys.
        positions: Position of each token in its sequence.
        inv_freq: Radians per token, as `rope_inv_freq` makes them, or those of each
            token, [B, T, 1, pairs].
        interleaved: Pair `i` is features ``(2 i, 2 i + 1)`` as in GPT-J instead of
            ``(i, i + pairs)`` as in LLaMA.
        factor: Factor of the rotated features, `RopeConfig.attention_factor`.

    Returns:
        The rotated array in the type of `x`.

    Raises:
        ValueError: there are more pairs than `x` has features for.

    Example:
        >>> x = jnp.ones((1, 2, 1, 2))
        >>> positions = jnp.arange(2)[None]
        >>> print(rotary(x, positions, rope_inv_freq(2))[0, :, 0])
        [[ 1.          1.        ]
         [-0.30116868  1.3817732 ]]

    References:
        RoFormer, arXiv 2104.09864.
    """
    pairs = inv_freq.shape[-1]
    if 2 * pairs > x.shape[-1]:
        raise ValueError(
            f"inv_freq has {pairs} pairs, but x has only {x.shape[-1]} features a head"
        )
    angles = positions[..., None, None].astype(jnp.float32) * inv_freq  # [B, T, 1, P]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if factor != 1:
        cos, sin = factor * cos, factor * sin
    rotated, rest = x[..., : 2 * pairs].astype(jnp.float32), x[..., 2 * pairs :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]  # [B, T, N, P] each
        out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)  # [..., P, 2]
        out = out.reshape(rotated.shape)  # [B, T, N, 2 P]
    else:
        a, b = rotated[..., :pairs], rotated[..., pairs:]  # [B, T, N, P] each
        out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([out.astype(x.dtype), rest], axis=-1)


NORMAL_INIT = jax.nn.initializers.normal(0.02)
"""Initialization of tables and kernels in GPT-2 and LLaMA."""


def zero_behind(init: Initializer, dimension: int, size: int) -> Initializer:
    """`init` for the first `size` entries of a dimension, and zeros after them.

    Example:
        >>> init = zero_behind(jax.nn.initializers.ones, 1, 2)
        >>> print(init(jax.random.key(0), (1, 3)))
        [[1. 1. 0.]]
    """

    def padded(key: Any, shape: Any, *rest: Any, **options: Any) -> Array:
        drawn, widths = list(shape), [(0, 0)] * len(shape)
        drawn[dimension] = size
        widths[dimension] = (0, shape[dimension] - size)
        return jnp.pad(init(key, tuple(drawn), *rest, **options), widths)

    return padded


class Embed(nnx.Module):
    """A table of vectors, looked up by index.

    An index outside the table gives NaN rather than another token's vector.

    Example:
        >>> embed = Embed(16, 4, rngs=nnx.Rngs(0))
        >>> embed(jnp.array([[3, 7]])).shape
        (1, 2, 4)
    """

    @explain_keywords
    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        rows: int | None = None,
        row_axis: str | None = "vocab",
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        table_init: Initializer = NORMAL_INIT,
        rules: AxisRules = REPLICATED,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the table.

        Args:
            num_embeddings: Number of vectors that indices select from.
            rows: Rows of the table, if more than vectors: zero padding, which no index
                reads, for a number of vectors that devices do not divide.
            features: Columns of the table.
            row_axis: Logical axis of the rows, None where they are never split.
            dtype: Type of the result.
            param_dtype: Type of the table.
            table_init: Initializer of the table.
            rules: Mesh axes of each logical axis.
            rngs: Source of the keys.
        """
        rows = num_embeddings if rows is None else rows
        if rows > num_embeddings:
            table_init = zero_behind(table_init, 0, num_embeddings)
        self.num_embeddings = num_embeddings
        self.axes = (row_axis, "embed")
        self.dtype = dtype
        self.rules = rules
        self.table = nnx.Param(
            partitioned(table_init, *self.axes)(
                rngs.params(), (rows, features), param_dtype
            )
        )

    def __call__(
        self, indices: Int[Array, "B T"], row_axes: tuple[str, ...] = ()
    ) -> Float[Array, "B T D"]:
        """The rows of the table at `indices`, in `dtype`.

        Args:
            indices: Vectors to look up; indices outside the table give NaN.
            row_axes: Manual mesh axes over which the caller has split the rows of the
                table, outermost first. Each device gets all results.
        """
        at, rows = indices, self.table.shape[0]
        if row_axes:
            at = indices - jax.lax.axis_index(row_axes) * rows
            here = (at >= 0) & (at < rows)
            at = jnp.where(here, at, 0)
        elif rows > self.num_embeddings:
            at = jnp.where(at < self.num_embeddings, at, rows)  # outside of the table
        out_axes = ("batch", "tokens", "act_embed")
        out = gather(
            self.table[...], at, self.axes, out_axes, self.rules, dtype=self.dtype
        )
        if not row_axes:
            return out
        masks = here, (indices >= 0) & (indices < self.num_embeddings)
        here, inside = (
            constrain(mask, out_axes[:2], self.rules)[..., None] for mask in masks
        )  # [B, T, 1]
        return jnp.where(
            inside, sum_for_all(jnp.where(here, out, 0), row_axes), jnp.nan
        )
