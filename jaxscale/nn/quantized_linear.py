"""Linear layers with 8-bit weights, for inference.

Axis letters: B batch, T tokens.
"""

import math
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from jaxscale.checks import check_choice
from jaxscale.nn.joined import JoinedLinear, Parts
from jaxscale.nn.linear import Linear
from jaxscale.nn.norms import RMSNorm
from jaxscale.sharding.decode_all_reduce import sum_over_devices
from jaxscale.sharding.operations import constrain
from jaxscale.sharding.rules import REPLICATED, AxisRules, check_axes
from jaxscale.sharding.shards import per_shard
from pallas_kernels.fp8_operands import (
    QuantizedRows,
    quantize_gated,
    quantize_rms_norm,
    quantize_rows,
)
from pallas_kernels.matmul.activations import activate
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.scaled_matmul import scaled_matmul


type Quantization = Literal["int8", "fp8", "fp8_dynamic"]
"""Type of quantized weights: int8, or fp8 (E4M3).

``"fp8_dynamic"`` has the weights of ``"fp8"``, and from `FP8_ACTIVATION_ROWS` tokens on
rounds activations, too, by a scale of each token: what vLLM calls W8A8 and
``quantization="fp8"``, and llm-compressor ``FP8_DYNAMIC``.

Layers in training use `jaxscale.sharding.Fp8` instead: they quantize both operands of a
matmul, and keep the weights in full precision.
"""

FP8_ACTIVATION_ROWS = 64
"""Tokens from which on a matmul with ``"fp8_dynamic"`` has two operands in fp8. With
fewer it reads weights for most of its time, as it does with 16-bit activations."""

_TYPES = {
    "int8": (jnp.int8, 127.0),
    "fp8": (jnp.float8_e4m3fn, 448.0),
    "fp8_dynamic": (jnp.float8_e4m3fn, 448.0),
}
"""Data type of the weights, and the largest value in use."""

_ROWS = 8
"""Output features are padded to a multiple of this, as the kernel needs."""


class QuantizedWeight(nnx.Variable):
    """8-bit weights and their scales, which are not trained."""


def quantize_kernel(
    kernel: Float[Array, "in out"], weights: Quantization
) -> tuple[Num[Array, "out in"], Float[Array, "out"]]:
    """Quantize a kernel to 8 bits, with a scale per output feature.

    The largest weight of an output feature maps to the largest value of the type, 127
    or 448; the others are rounded to nearest. A feature of zeros stays zero.

    Args:
        kernel: Weights; if one is NaN or infinite, the scale of its output feature is
            not finite.
        weights: Type of the quantized weights.

    Raises:
        ValueError: `weights` is unknown.

    Example:
        >>> kernel = jnp.array([[1.27, 0.0], [-0.5, 0.0]])
        >>> numbers, scale = quantize_kernel(kernel, "int8")
        >>> print(numbers.tolist(), scale)
        [[127, -50], [0, 0]] [0.01 1.  ]
    """
    check_choice("weights", weights, Quantization)
    dtype, largest = _TYPES[weights]
    kernel = kernel.T.astype(jnp.float32)  # [out, in]
    scale = jnp.abs(kernel).max(1) / largest
    # Too small a divisor: it may be flushed to zero.
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    # The maximum may have skipped a NaN.
    scale = jnp.where(jnp.isfinite(kernel).all(1), scale, jnp.nan)
    numbers = jnp.clip(kernel / scale[:, None], -largest, largest)
    if dtype == jnp.int8:
        numbers = jnp.round(numbers)
    return numbers.astype(dtype), scale


class QuantizedLinear(Parts, nnx.Module):
    """``y = activation((x @ kernel.T) * scale + bias)`` with an 8-bit kernel.

    `jaxscale.models.quantize` makes it from a `Linear` or a `JoinedLinear`, whose
    output it splits as well. A decode step mostly reads weights, here half as many
    bytes as in bf16. On Hopper GPUs a kernel reads them as they are stored; otherwise
    (input features that are no multiple of 64), XLA may write a copy in the type of the
    computation. Tensor parallelism splits the output features, or the input features:
    then each device scales its partial sums before the reduction. The layer has no
    derivatives.

    With ``"fp8_dynamic"`` and at least `FP8_ACTIVATION_ROWS` tokens both operands are
    fp8, and the matmul is `pallas_kernels.scaled_matmul`. A token's scale is the least
    power of two for its own largest value (on each device, of the features there), so a
    result does not depend on what the other tokens of its batch are, only on how many.
    A token with an infinite activation, as where fp16 overflows, has no scale: its
    whole result is NaN, while the layer with 16-bit activations may stay finite.

    Example:
        >>> layer = QuantizedLinear(
        ...     jnp.array([[2.0, 0.0], [1.0, 3.0]]), "int8",
        ...     kernel_axes=("embed", "mlp"), out_axes=("batch", None, "act_mlp"),
        ... )
        >>> print(layer(jnp.ones((1, 1, 2))).round(2))
        [[[3.01 3.  ]]]
    """

    low_rank: Any = None
    """As that of `Linear`."""

    def __init__(
        self,
        kernel: Float[Array, "in out"],
        weights: Quantization,
        *,
        kernel_axes: tuple[str | None, str | None],
        out_axes: tuple[str | None, ...],
        bias: Float[Array, "out"] | None = None,
        dtype: DTypeLike = jnp.float32,
        out_dtype: DTypeLike | None = None,
        rules: AxisRules = REPLICATED,
    ) -> None:
        """Quantize a kernel.

        Args:
            kernel: Weights of a dense layer.
            weights: Type of the quantized weights.
            kernel_axes: Logical axes of the dense kernel.
            out_axes: Logical axes of the result, (batch, tokens, features).
            bias: Bias of the dense layer.
            dtype: Type of the computation.
            out_dtype: Type of the result; None is that of the computation.
            rules: Mesh axes of each logical axis.
        """
        check_axes(*kernel_axes, *out_axes)
        self.kernel_axes, self.out_axes = kernel_axes, out_axes
        self.dtype = dtype
        self.out_dtype = dtype if out_dtype is None else out_dtype
        self.rules = rules
        self.shards, self.parts = 1, ((kernel.shape[1], out_axes),)
        self.features = kernel.shape[1]
        self.rounds_activations = weights == "fp8_dynamic"
        numbers, scale = quantize_kernel(kernel, weights)
        missing = -self.features % _ROWS

        def variable(array: Array, *axes: str | None) -> QuantizedWeight:
            if missing:
                array = jnp.pad(array, ((0, missing), (0, 0))[: array.ndim])
            return QuantizedWeight(array, out_sharding=axes, eager_sharding=False)

        self.kernel = variable(numbers, *kernel_axes[::-1])
        self.scale = variable(scale, kernel_axes[1])
        param = None
        if bias is not None:
            axes = kernel_axes[1:]
            param = nnx.Param(bias, out_sharding=axes, eager_sharding=False)
        self.bias = param

    @classmethod
    def of(cls, layer: Linear, weights: Quantization) -> "QuantizedLinear":
        """The quantized form of a dense layer."""
        made = cls(
            layer.kernel[...],
            weights,
            kernel_axes=layer.kernel_axes,
            out_axes=layer.out_axes,
            bias=None if layer.bias is None else layer.bias[...],
            dtype=layer.dtype,
            rules=layer.rules,
        )
        if isinstance(layer, JoinedLinear):
            made.shards, made.parts = layer.shards, layer.parts
        return made

    def __call__(
        self, x: Float[Array, "B T in"], activation: str | None = None
    ) -> Float[Array, "B T out"]:
        """The projection of each token, in `out_dtype`.

        Args:
            x: Activations.
            activation: Activation of the result, a name in
                `pallas_kernels.matmul.ACTIVATIONS`.
        """
        inner, outer = self.kernel_axes
        by_rows = bool(self.rules.mesh_axes([inner]))

        def product(x: Array, kernel: Array, scale: Array) -> tuple[Array]:
            y = self._product(x, kernel, scale)
            return (y[None] if by_rows else y,)

        y_axes = ("batch", None, outer)
        (out,) = per_shard(
            product,
            [("batch", None, inner), (outer, inner), (outer,)],
            [(inner, *y_axes) if by_rows else y_axes],
            self.rules,
        )(x.astype(self.dtype), self.kernel[...], self.scale[...])
        if by_rows:
            out = sum_over_devices(out)
        if out.shape[-1] != self.features:
            out = out[..., : self.features]
        out = constrain(out, self.out_axes, self.rules)
        if self.low_rank is not None:
            out = out + self.low_rank(x, self, self.out_axes).astype(self.out_dtype)
        return activate(self._add_bias(out), activation)

    def after_norm(
        self, x: Float[Array, "B T in"], norm: RMSNorm, activation: str | None = None
    ) -> Float[Array, "B T out"] | None:
        """The projection of ``norm(x)``, which is rounded as it is computed.

        None where that is not all that the layer does with it: few tokens are not
        rounded, and those on several devices by their features there.

        Args:
            x: Activations.
            norm: Of the input.
            activation: As of a call.
        """
        if not self._rounds_alone(x) or x.dtype != norm.dtype:
            return None
        weight = norm.scale[...]
        if norm.plus_one or weight.dtype != x.dtype:
            weight = norm.factors
        rows = x.reshape(-1, x.shape[-1])
        found = quantize_rms_norm(
            rows, weight, self.kernel.dtype, eps=norm.eps, columns=False
        )
        return activate(self._of_rows(found, x.shape[:-1]), activation)

    def after_gate(
        self, both: Float[Array, "B T _two"], activation: str
    ) -> Float[Array, "B T out"] | None:
        """The projection of ``activation(gate) * up``, which is rounded in one pass.

        None as of `after_norm`.

        Args:
            both: Gate and up side by side.
            activation: Of the gate.
        """
        if not self._rounds_alone(both):
            return None
        rows = both.reshape(-1, both.shape[-1])
        found = quantize_gated(
            rows, None, self.kernel.dtype, activation=activation, columns=False
        )
        return self._of_rows(found, both.shape[:-1])

    def _rounds_alone(self, x: Float[Array, "B T _in"]) -> bool:
        """Whether `x` is read in fp8 alone, by one device."""
        axes = (*self.kernel_axes, *self.out_axes)
        return (
            math.prod(x.shape[:-1]) >= self.rounds_from
            and x.dtype == self.dtype
            and self.low_rank is None
            and not any(self.rules.mesh_axes([axis]) for axis in axes)
        )

    def _of_rows(
        self, rows: QuantizedRows, tokens: tuple[int, ...]
    ) -> Float[Array, "B T out"]:
        """The projection of what is rounded."""
        kernel, scale = self.kernel[...], self.scale[...]
        out = scaled_matmul(
            rows.data, kernel, rows.scale, scale, out_dtype=self.out_dtype
        )
        return self._add_bias(out.reshape(*tokens, -1)[..., : self.features])

    def _add_bias(self, out: Float[Array, "B T out"]) -> Float[Array, "B T out"]:
        if self.bias is None:
            return out
        bias = self.bias[...].astype(self.out_dtype)
        return out + constrain(bias, self.out_axes[-1:], self.rules)

    @property
    def rounds_from(self) -> float:
        """Tokens from which on activations are rounded to fp8; infinity if never."""
        return FP8_ACTIVATION_ROWS if self.rounds_activations else math.inf

    def _product(
        self, x: Float[Array, "B T in"], kernel: Array, scale: Array
    ) -> Float[Array, "B T out"]:
        """The product of what one device holds."""
        if math.prod(x.shape[:-1]) < self.rounds_from:
            return quantized_matmul(x, kernel, scale, out_dtype=self.out_dtype)
        # One pass over the activations; XLA would take one for the scales, another one.
        rows = quantize_rows(x.reshape(-1, x.shape[-1]), kernel.dtype, columns=False)
        y = scaled_matmul(
            rows.data, kernel, rows.scale, scale, out_dtype=self.out_dtype
        )
        return y.reshape(*x.shape[:-1], y.shape[-1])
