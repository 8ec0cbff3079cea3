"""The linear projection: the only place where a block's weight meets an activation.

Legend: B batch, T tokens.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.nn.embeddings import NORMAL_INIT
from jaxscale.sharding.operations import constrain, contract
from jaxscale.sharding.parameters import partitioned
from jaxscale.sharding.rules import REPLICATED, AxisRules


class Linear(nnx.Module):
    """``y = x @ kernel + bias``.

    Example:
        >>> up = Linear(
        ...     4, 8, kernel_axes=("embed", "mlp"), out_axes=("batch", None, "act_mlp"),
        ...     rngs=nnx.Rngs(0),
        ... )
        >>> up(jnp.ones((2, 3, 4))).shape
        (2, 3, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        kernel_axes: tuple[str | None, str | None],
        out_axes: tuple[str | None, ...],
        use_bias: bool = False,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = NORMAL_INIT,
        rules: AxisRules = REPLICATED,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the parameters.

        Args:
            in_features: Features of the input.
            out_features: Features of the output.
            kernel_axes: Logical axes of the kernel.
            out_axes: Logical axes of the result, (batch, tokens, features).
            use_bias: Add a bias, zero at first.
            dtype: Type of the computation and the result.
            param_dtype: Type of the parameters.
            kernel_init: Initializer of the kernel.
            rules: The table of the recipe.
            rngs: Source of the keys.
        """
        self.kernel_axes = kernel_axes
        self.out_axes = out_axes
        self.dtype = dtype
        self.rules = rules
        self.kernel = nnx.Param(
            partitioned(kernel_init, *kernel_axes)(
                rngs.params(), (in_features, out_features), param_dtype
            )
        )
        zeros = partitioned(jax.nn.initializers.zeros, kernel_axes[1])
        bias = zeros(rngs.params(), (out_features,), param_dtype) if use_bias else None
        self.bias = None if bias is None else nnx.Param(bias)

    def __call__(self, x: Float[Array, "B T in"]) -> Float[Array, "B T out"]:
        """The projection of each token, in `dtype`."""
        out = contract(
            "bti,io->bto",
            x.astype(self.dtype),
            self.kernel[...].astype(self.dtype),
            self.kernel_axes,
            self.out_axes,
            self.rules,
        )
        if self.bias is None:
            return out
        # The bias is stored split like the kernel; it is added split like the result.
        bias = self.bias[...].astype(self.dtype)
        return out + constrain(bias, self.out_axes[-1:], self.rules)
