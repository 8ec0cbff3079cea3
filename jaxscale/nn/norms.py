"""Normalization layers with statistics in fp32.

Legend: B batch, T tokens, D model.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.keywords import explain_keywords
from jaxscale.sharding.parameters import partitioned
from jaxscale.sharding.rules import REPLICATED, AxisRules
from jaxscale.sharding.shards import per_shard
from pallas_kernels import layer_norm as kernels


def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, "D"], eps: float
) -> Float[Array, "... D"]:
    """``x / sqrt(mean(x**2) + eps) * scale`` over the last dimension, in fp32.

    Args:
        x: Activations, normalized over the last axis.
        scale: Factor of each feature.
        eps: Added to the mean of the squares.

    Example:
        >>> x = jnp.array([[1.0, 7.0]])
        >>> print(rms_norm(x, jnp.ones(2), eps=0.0))
        [[0.2 1.4]]

    References:
        Root Mean Square Layer Normalization, arXiv 1910.07467.
    """
    x = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + eps) * scale.astype(jnp.float32)


def layer_norm(
    x: Float[Array, "... D"],
    scale: Float[Array, "D"],
    bias: Float[Array, "D"] | None,
    eps: float,
) -> Float[Array, "... D"]:
    """``(x - mean) / sqrt(variance + eps) * scale + bias``, in fp32; bias may be None.

    Args:
        x: Activations, normalized over the last axis.
        scale: Factor of each feature.
        bias: Bias of each feature.
        eps: Added to the variance.

    Example:
        >>> x = jnp.array([[1.0, 3.0]])
        >>> print(layer_norm(x, jnp.ones(2), jnp.zeros(2), eps=0.0))
        [[-1.  1.]]

    References:
        Layer Normalization, arXiv 1607.06450.
    """
    return kernels.layer_norm(
        x, scale, bias, eps=eps, dtype=jnp.float32, implementation="xla"
    )


_FEW_TOKENS = 768
"""Up to so many, a matmul of XLA that splits its sums adds them up in the norm after it
if that is XLA's too: BERT base with 256 and 704 tokens on an H200 (a trial)."""


class RMSNorm(nnx.Module):
    """`rms_norm` with a learned scale, or a scale of one plus the parameter.

    Example:
        >>> RMSNorm(4, rngs=nnx.Rngs(0))(jnp.ones((1, 2, 4))).shape
        (1, 2, 4)
    """

    @explain_keywords
    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-5,
        plus_one: bool = False,
        axis: str | None = "norm",
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rules: AxisRules = REPLICATED,
        rngs: nnx.Rngs,
    ) -> None:
        """Initialize the scale to one.

        Args:
            features: Size of the normalized dimension.
            eps: Added to the mean square.
            plus_one: The scale is one plus the parameter, in fp32, as in Gemma; weight
                decay then pulls it to one.
            axis: Logical axis of the scale.
            dtype: Type of the result; statistics are in fp32.
            param_dtype: Type of the scale.
            rules: Mesh axes of each logical axis.
            rngs: Source of the random keys.
        """
        self.eps = eps
        self.plus_one = plus_one
        self.dtype = dtype
        self.rules = rules
        init = jax.nn.initializers.zeros if plus_one else jax.nn.initializers.ones
        init = partitioned(init, axis)
        self.scale = nnx.Param(init(rngs.params(), (features,), param_dtype))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The normalized tokens, or heads of tokens, in `dtype`."""
        return rms_norm(x, self.factors, self.eps).astype(self.dtype)

    @property
    def factors(self) -> Float[Array, "D"]:
        """The factor of each feature, in fp32."""
        scale = self.scale[...].astype(jnp.float32)
        return 1 + scale if self.plus_one else scale


class LayerNorm(nnx.Module):
    """`layer_norm` with a learned scale and, usually, bias.

    Example:
        >>> LayerNorm(4, rngs=nnx.Rngs(0))(jnp.ones((1, 2, 4))).shape
        (1, 2, 4)
    """

    @explain_keywords
    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-5,
        use_bias: bool = True,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rules: AxisRules = REPLICATED,
        rngs: nnx.Rngs,
    ) -> None:
        """Make a scale of ones and a bias of zeros.

        Args:
            features: Size of the normalized dimension.
            eps: Added to the variance.
            use_bias: Add a bias.
            dtype: Type of the result; statistics are in fp32.
            param_dtype: Type of the parameters.
            rules: Mesh axes of each logical axis.
            rngs: Source of the random keys.
        """
        self.eps = eps
        self.dtype = dtype
        self.rules = rules
        ones = partitioned(jax.nn.initializers.ones, "norm")
        zeros = partitioned(jax.nn.initializers.zeros, "norm")
        self.scale = nnx.Param(ones(rngs.params(), (features,), param_dtype))
        bias = zeros(rngs.params(), (features,), param_dtype) if use_bias else None
        self.bias = None if bias is None else nnx.Param(bias)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The normalized tokens, in `dtype`."""
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, self.scale[...], bias, self.eps).astype(self.dtype)

    def of_sum(
        self,
        x: Float[Array, "B T D"],
        residual: Float[Array, "B T D"],
        x_bias: Float[Array, "D"] | None = None,
    ) -> Float[Array, "B T D"]:
        """The normalized sum of the arguments, in `dtype`, by a kernel if there is one.

        Of few tokens XLA's, with the end of the matmul that made `x`.

        The rules may split batch and tokens, each device takes its own; all features of
        a token are on one device.
        """
        vectors = {"scale": self.scale[...], "x_bias": x_bias}
        vectors["bias"] = None if self.bias is None else self.bias[...]
        given = {name: v for name, v in vectors.items() if v is not None}

        def local(x: Array, residual: Array, *vectors: Array) -> tuple[Array]:
            named = dict(zip(given, vectors, strict=True))
            few = math.prod(x.shape[:-1]) <= _FEW_TOKENS
            out = kernels.layer_norm(
                x,
                named["scale"],
                named.get("bias"),
                residual=residual,
                x_bias=named.get("x_bias"),
                eps=self.eps,
                dtype=self.dtype,
                implementation="xla" if few else None,
            )
            return (out,)

        axes, vector = ("batch", "tokens", "act_embed"), (None,)
        mapped = per_shard(
            local, [axes, axes, *[vector] * len(given)], [axes], self.rules
        )
        return mapped(x, residual, *given.values())[0]
