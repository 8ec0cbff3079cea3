"""The gradient rule of variable-length attention, one for all implementations.

With scores ``s``, weights ``p = exp(s - lse)`` and ``out = p v``, the gradient of a
score is ``p * (dout . v - delta)``, where ``delta = dout . out - dlse`` is a number for
each query and head. An implementation gives the two passes over the scores; what needs
no scores is here: which queries see anything, delta, and the gradient of the sinks.

Where one key has nearly all of the weight, ``dout . v`` and ``delta`` are nearly equal.
With out rounded to 16 bits their difference would be mostly the error of the rounding,
as it is in FlashAttention-2 and -3. So a forward pass that is differentiated also gives
``rest``, what the rounding took from out, in 16 bits of its own. What stays is the
rounding of the two sums in fp32, about 2^-22 of ``|dout| . |v|``: gradients below that
are noise. Only a sum of ``p * (dout . v)`` over all keys, another pass, would be exact.

Axes: R rows of the batch, T packed queries, N query heads, Hv head dim of values.
"""

import functools
import typing

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels.varlen_attention.inputs import Inputs


__all__ = ["Passes", "attention"]


@typing.runtime_checkable
class Passes(typing.Protocol):
    """The two passes of an implementation; hashable, and equal if they do the same."""

    def forward(
        self, x: Inputs, with_rest: bool
    ) -> tuple[
        Float[Array, "R T N Hv"], Float[Array, "R T N"], Float[Array, "R T N Hv"] | None
    ]:
        """``(out, lse, rest)``: zeros and ``-inf`` for a query that sees nothing.

        None stands for no rest: it was not asked for, or out is fp32.
        """
        ...

    def backward(
        self,
        x: Inputs,
        dout: Float[Array, "R T N Hv"],
        lse: Float[Array, "R T N"],
        delta: Float[Array, "R T N"],
    ) -> Inputs:
        """Inputs with gradients in the place of the floating arrays but the sinks.

        `delta` is zero for a query that sees nothing, and so is `dout`, but for rows
        past the last sequence, which may hold anything.
        """
        ...


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(passes: Passes, x: Inputs) -> tuple[Array, Array]:
    out, lse, _ = passes.forward(x, False)
    return out, lse


type _Residuals = tuple[Inputs, Array, Array, Array | None]


def _attention_fwd(passes: Passes, x: Inputs) -> tuple[tuple[Array, Array], _Residuals]:
    # Rematerialization policies may keep these by name.
    out, lse, rest = passes.forward(x, True)
    out, rest = checkpoint_name((out, rest), "varlen_attention_out")
    lse = checkpoint_name(lse, "varlen_attention_lse")
    return (out, lse), (x, out, lse, rest)


def _attention_bwd(
    passes: Passes, residuals: _Residuals, cotangents: tuple[Array, Array]
) -> tuple[Inputs]:
    x, out, lse, rest = residuals
    dout, dlse = cotangents
    inside = jnp.arange(x.q.shape[1], dtype=jnp.int32) < x.cu_q[:, -1:]  # [R, T]
    seen = inside[..., None] & (lse > -jnp.inf)
    # What arrives for a query that sees nothing, NaN too, is nobody's gradient.
    if x.cu_k is not None:
        dout = jnp.where(seen[..., None], dout, 0)  # [R, T, N, Hv]
    exact = out.astype(jnp.float32)
    if rest is not None:
        exact += rest.astype(jnp.float32)
    delta = jnp.sum(dout.astype(jnp.float32) * exact, axis=-1)
    delta = jnp.where(seen, delta - dlse, 0.0)
    sinks = x.sinks
    if sinks is not None:
        # A sink is a key whose value is zero.
        logits = jnp.where(seen, sinks.astype(jnp.float32) - lse, -jnp.inf)
        of_rows = -jnp.exp(logits) * delta  # [R, T, N]
        sinks = jnp.sum(of_rows, axis=(0, 1)).astype(sinks.dtype)
    grads = passes.backward(x, dout, lse, delta)
    return (grads._replace(cu_q=None, cu_k=None, sinks=sinks),)


_attention.defvjp(_attention_fwd, _attention_bwd)

attention = jax.jit(_attention, static_argnums=0)
"""``(out, lse)`` of inputs: one program outside of any jit, not a hundred operations.

Differentiable once in reverse mode. Its first argument gives the passes.
"""
