"""Convolution along the tokens of a sequence.

Legend: B batch, T tokens of a (packed) row, D model, W taps.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxscale.checks import check_choice
from jaxscale.nn.embeddings import NORMAL_INIT
from jaxscale.sharding.operations import constrain, contract
from jaxscale.sharding.parameters import partitioned
from jaxscale.sharding.rules import REPLICATED, AxisRules


type ConvolutionActivation = Literal["gelu", "relu", "tanh"]

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}


class SequenceConvolution(nnx.Module):
    """``act(sum_w x[t + w - W // 2] @ kernel[w] + bias)`` within each sequence.

    Tokens beyond either end of a sequence count as zeros, so packed sequences do not
    mix.

    Example:
        >>> layer = SequenceConvolution(4, 3, rngs=nnx.Rngs(0))
        >>> x, positions = jnp.ones((1, 5, 4)), jnp.array([[0, 1, 0, 1, 2]])
        >>> y = layer(x, positions)
        >>> bool((y[0, 0] == y[0, 2]).all())  # both begin a sequence
        True

    References:
        The convolution of DeBERTa-v2, arXiv 2111.09543.
    """

    def __init__(
        self,
        features: int,
        taps: int,
        *,
        activation: ConvolutionActivation = "gelu",
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = NORMAL_INIT,
        rules: AxisRules = REPLICATED,
        rngs: nnx.Rngs,
    ) -> None:
        """Make a kernel [W, D, D] and a bias of zeros.

        Args:
            features: Features of the input and the output.
            taps: W, odd: kernel size.
            activation: ``"gelu"`` (exact), ``"relu"`` or ``"tanh"``.
            dtype: Type of the result; sums are in fp32.
            param_dtype: Type of the parameters.
            kernel_init: Initializer of the kernel.
            rules: Mesh axes of each logical axis.
            rngs: Source of the keys.

        Raises:
            ValueError: `taps` is not odd or `activation` is unknown.
        """
        if taps < 1 or taps % 2 == 0:
            raise ValueError(
                f"taps {taps} must be odd and positive, so that as many tokens come "
                "out as go in"
            )
        check_choice("activation", activation, tuple(_ACTIVATIONS))
        self.taps = taps
        self.activation = activation
        self.dtype = dtype
        self.rules = rules
        self.kernel = nnx.Param(
            partitioned(kernel_init, None, "embed", None)(
                rngs.params(), (taps, features, features), param_dtype
            )
        )
        zeros = partitioned(jax.nn.initializers.zeros, None)
        self.bias = nnx.Param(zeros(rngs.params(), (features,), param_dtype))

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """The convolution of each sequence, in `dtype`.

        Args:
            x: Activations.
            positions: Position of each token in its sequence, from 0; they mark where
                sequences end.
        """
        half, tokens = self.taps // 2, x.shape[1]
        x = constrain(x.astype(self.dtype), ("batch", None, "act_embed"), self.rules)
        x = jnp.pad(x, ((0, 0), (half, half), (0, 0)))
        # No token counts on to -taps, so nothing beyond the row is of its sequence.
        around = jnp.pad(positions, ((0, 0), (half, half)), constant_values=-self.taps)
        out_axes = ("batch", "tokens", "act_embed")

        def term(tap: int) -> Array:
            here = slice(tap, tap + tokens)
            same = around[:, here] == positions + (tap - half)  # [B, T]
            return contract(
                "btc,cd->btd",
                jnp.where(same[..., None], x[:, here], 0),  # [B, T, D]
                self.kernel[...][tap].astype(self.dtype),
                ("embed", None),
                out_axes,
                self.rules,
                preferred_element_type=jnp.float32,
            )

        out = functools.reduce(jnp.add, map(term, range(self.taps)))
        bias = constrain(self.bias[...], out_axes[-1:], self.rules)
        out = (out + bias.astype(jnp.float32)).astype(self.dtype)
        return _ACTIVATIONS[self.activation](out)
