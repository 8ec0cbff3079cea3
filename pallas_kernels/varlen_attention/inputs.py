"""The parts of a call of variable-length attention: arrays, scores, two passes.

Axes: R rows of the batch, T packed queries, S packed keys, N query heads, K key/value
heads, H head dim of queries and keys, Hv head dim of values, P entries of a row of
relative terms.
"""

import contextlib
import dataclasses
import math
import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.varlen_attention.relative import RelativeBuckets
from pallas_kernels.varlen_attention.segments import (
    Window,
    segment_ids_from_cu_seqlens,
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class KnownPacking:
    """Prefix sums that are known while a program is traced, the same for each row."""

    q: tuple[int, ...]
    """Of the queries."""
    k: tuple[int, ...] | None
    """Of the keys; None: they are packed as the queries are."""


class Inputs(NamedTuple):
    """The arrays of a call. One that is not given is None, which is no leaf.

    Within a `jax.vmap` over rows they have no leading axis.
    """

    q: Float[Array, "*R T N H"]
    k: Float[Array, "*R S K H"]
    v: Float[Array, "*R S K Hv"]
    cu_q: Int[Array | np.ndarray, "*R bounds"]
    cu_k: Int[Array | np.ndarray, "*R bounds"] | None = None
    """None: keys are packed as the queries are, so every query sees at least itself."""
    sinks: Float[Array, "*R N"] | None = None
    slopes: Float[Array, "*R N"] | None = None
    query_terms: Float[Array, "*R T N P"] | None = None
    key_terms: Float[Array, "*R S N P"] | None = None
    score_descale: Float[Array, "*R B K"] | None = None
    """Of 8-bit queries and keys: what their product is multiplied by."""
    v_descale: Float[Array, "*R B K"] | None = None
    known: KnownPacking | None = None
    """The values of `cu_q` and `cu_k`, where a kernel may be built for them."""

    @property
    def fp8(self) -> bool:
        """Whether queries, keys and values are 8-bit numbers, with scales."""
        return self.q.dtype.itemsize == 1

    def widened(self) -> "Inputs":
        """8-bit arrays with rows as bfloat16, the scales multiplied in."""
        if not self.fp8:
            return self

        def of_row(a: Array, bounds: Array, descale: Any) -> Array:
            ids = segment_ids_from_cu_seqlens(bounds, a.shape[0])  # -1 past the last
            factors = jnp.repeat(descale[ids], a.shape[1] // descale.shape[1], axis=1)
            return (a.astype(jnp.float32) * factors[..., None]).astype(jnp.bfloat16)

        widen = jax.vmap(of_row)
        cu_q, cu_k = (jnp.asarray(cu) for cu in (self.cu_q, self.packing_of_keys))
        q = widen(self.q, cu_q, self.score_descale)
        v = widen(self.v, cu_k, self.v_descale)
        wide = self._replace(q=q, k=self.k.astype(jnp.bfloat16), v=v)
        return wide._replace(score_descale=None, v_descale=None)

    @property
    def packing_of_keys(self) -> Int[Array | np.ndarray, "*R bounds"]:
        """The prefix sums of the keys, given or not."""
        return self.cu_q if self.cu_k is None else self.cu_k

    def numbers_by_row(self) -> "Inputs":
        """The inputs with the numbers of heads for each row, [R, N] in fp32."""

        def each(a: Array | None) -> Array | None:
            if a is None:
                return None
            a = a.astype(jnp.float32)
            return jnp.broadcast_to(a, (self.q.shape[0], *a.shape))

        return self._replace(sinks=each(self.sinks), slopes=each(self.slopes))

    def with_known(self) -> "Inputs":
        """The inputs with prefix sums of numpy where they are known."""
        if self.known is None:
            return self

        def of_rows(bounds: tuple[int, ...] | None) -> Any:
            if bounds is None:
                return None
            # A broadcast would be one in the program too, and a kernel of its own.
            return np.tile(np.array(bounds, np.int32), (self.q.shape[0], 1))

        return self._replace(cu_q=of_rows(self.known.q), cu_k=of_rows(self.known.k))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Scores:
    """The static part of the score function, which maps ``q . k`` to a score."""

    window: Window
    """Keys that a query sees left and right of the diagonal, the causal mask in it."""
    scale: float = 1.0
    """Factor of the product."""
    softcap: float | None = None
    """Bound on the magnitude."""
    alibi: bool = False
    """True where ALiBi slopes are subtracted."""
    relative: tuple[RelativeBuckets, bool, bool] | None = None
    """A relative bias: its buckets, and whether it has query terms, and key terms."""
    deterministic: bool = True
    """Whether gradients have to be bitwise equal between runs."""

    @property
    def plain(self) -> bool:
        """Nothing happens to a product but a positive factor."""
        changed = self.softcap is not None or self.alibi or self.relative is not None
        return not changed and self.scale > 0


@typing.runtime_checkable
class Passes(typing.Protocol):
    """The two passes of an implementation; hashable, and equal if they do the same."""

    def forward(
        self, x: Inputs, with_rest: bool
    ) -> tuple[
        Float[Array, "R T N Hv"], Float[Array, "R T N"], Float[Array, "R T N Hv"] | None
    ]:
        """``(out, lse, rest)``: zeros and ``-inf`` for a query that attends to nothing.

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


def check_arrays(
    x: Inputs, widest: int, kernel: str = "the kernel", fp8: bool = False
) -> None:
    """Refuses types, head dims and sizes that no kernel takes.

    Args:
        x: the arrays.
        widest: the largest head dim that the kernel takes.
        kernel: what to call it.
        fp8: whether it takes 8-bit numbers.

    Raises:
        Unsupported: it does not take them.
    """
    if not (x.fp8 and fp8) and x.q.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(
            f"varlen_attention: type {x.q.dtype.name}, {kernel} takes bfloat16 or"
            " float16; cast them or use implementation='xla'"
        )
    head_dim = max(x.q.shape[3], x.v.shape[3])
    if head_dim > widest:
        raise Unsupported(
            f"varlen_attention: head dim {head_dim}, {kernel} takes at most {widest};"
            " use implementation='xla'"
        )
    shapes = x.q.shape, x.k.shape, x.v.shape
    if any(0 in shape for shape in shapes):
        raise Unsupported(
            f"varlen_attention: empty arrays of shapes {', '.join(map(str, shapes))};"
            " use implementation='xla'"
        )


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """The factor of the products; None is ``1 / sqrt(H)``.

    Raises:
        TypeError: it is traced or no number.
        ValueError: it is not finite.
    """
    scale = _number("scale", head_dim**-0.5 if scale is None else scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return scale


def resolve_softcap(softcap: float | None) -> float | None:
    """The bound on scores, if any.

    Raises:
        TypeError: it is traced or no number.
        ValueError: it is not positive.
    """
    softcap = None if softcap is None else _number("softcap", softcap)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive, got {softcap}; None disables it")
    return softcap


def resolve_descales(
    q: Array,
    descales: dict[str, Array | np.ndarray | float | None],
    shape: tuple[int, ...],
) -> tuple[Array, Array] | tuple[None, None]:
    """What the products of 8-bit queries and keys, and values, are multiplied by.

    Args:
        q: queries.
        descales: of q, k and v, by the name of the argument.
        shape: ``[*R, B, K]``.

    Raises:
        TypeError: there are some, but q has no 8 bits.
        ValueError: one does not broadcast to the shape.
    """
    if q.dtype.itemsize > 1:
        for name in (n for n, x in descales.items() if x is not None):
            raise TypeError(
                f"{name} is for q, k and v of type float8_e4m3fn, got {q.dtype}; drop "
                "it or quantize them"
            )
        return None, None
    whole = []
    for name, x in descales.items():
        x = jnp.asarray(1.0 if x is None else x, jnp.float32)
        try:
            whole.append(jnp.broadcast_to(x, shape))
        except ValueError:
            raise ValueError(
                f"{name} must broadcast to one number for each sequence and key/value "
                f"head, {list(shape)}, got shape {x.shape}"
            ) from None
    return whole[0] * whole[1], whole[2]


def resolve_per_head(name: str, x: Array | None, heads: int) -> Array | None:
    """One number for each query head, if given.

    Raises:
        TypeError: they are not floating.
        ValueError: their number is another one.
    """
    if x is None:
        return None
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating, got {x.dtype}")
    if x.shape != (heads,):
        raise ValueError(
            f"{name} must hold one number for each of the N={heads} query heads, got "
            f"shape {x.shape}"
        )
    return x


def resolve_window(causal: bool, window: Window, num_rows: int) -> Window:
    """The window with the causal mask folded in.

    A side as large as both buffers together hides nothing and becomes None, which also
    keeps sums of positions and sizes within int32.
    """
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(f"window must be (left, right), got {window!r}")
    sizes = []
    for side, size in zip(("left", "right"), window, strict=True):
        known = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if size is not None and not (known and size >= 0):
            raise ValueError(
                f"window must hold non-negative integers or None, got {side}={size}; "
                "None is no limit"
            )
        sizes.append(None if size is None or size >= num_rows else int(size))
    left, right = sizes
    return (left, 0) if causal else (left, right)


def _number(name: str, value: Any) -> float:
    """A number that programs are built for, so it must be known now."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"{name} must be known when the program is traced, got {value}; make it a "
            "static argument"
        )
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)
    raise TypeError(f"{name} must be a number, got {value!r}")
