"""Tensor and sequence parallelism: matmuls with all-gather or reduce-scatter of tokens.

Between tensor-parallel regions each device has some tokens of a sequence with all
features, inside them all tokens with some features (heads, hidden features). A
*column-parallel* matmul enters a region: it all-gathers the tokens. A *row-parallel*
matmul leaves it: it reduce-scatters over the tokens. Both exist in three forms,

- ``None``: `contract` and constraints; the compiler inserts the collectives,
- ``"xla"``: explicit collectives, each next to its matmul,
- ``"fused"``: each is one kernel that overlaps matmul and communication, if
  `pallas_kernels.collective_matmul` has one for the device and the shapes, otherwise as
  ``"xla"``; the logger ``pallas_kernels`` says once which it is,

which take the same parameters and give the same result.

Legend: B batch, T tokens of a sequence, K contracted features, N features of the
result.

References:
    Megatron-LM, arXiv 1909.08053. Sequence parallelism, arXiv 2205.05198. Flux, arXiv
    2406.06858.
"""

import dataclasses
import functools
import math
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.checks import check_choice
from jaxscale.sharding import decode_all_reduce
from jaxscale.sharding.fp8 import (
    Fp8,
    Norm,
    RoundedWeight,
    Stored,
    Weight,
    axes_of,
    check_fp8,
    fp8_all_gather_matmul,
    fp8_feed_forward,
    fp8_matmul_reduce_scatter,
    parameter_of,
)
from jaxscale.sharding.operations import constrain, contract
from jaxscale.sharding.rules import AxisRules
from jaxscale.sharding.shards import Shards
from pallas_kernels.collective_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)


type TensorParallel = Literal["fused", "xla"] | None
"""How to communicate: fused kernels, explicit XLA collectives, or the compiler's
choice."""

_SPLIT = ("batch", "tokens", None)
_WHOLE = ("batch", None, None)
_IMPLEMENTATIONS: dict[str, str | None] = {"fused": None, "xla": "xla"}


def launch_in_order() -> None:
    """Make GPUs launch kernels in program order; call it before using devices.

    A fused kernel fills a GPU and waits for its peers, and so does an NCCL collective
    that XLA runs concurrently. If two GPUs launch the two in different orders, they may
    deadlock, each waiting for a kernel that finds no room on the other. With one
    hardware queue the order is the same everywhere. The command line does this for
    ``"fused"``.

    It sets the environment variable ``CUDA_DEVICE_MAX_CONNECTIONS`` to 1 unless it is
    set; CUDA reads it when the first GPU is used.

    References:
        Megatron-LM requires the same of its overlapped tensor parallelism.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def column_parallel(
    x: Float[Array, "B T K"],
    kernels: Sequence[Weight],
    *,
    kernel_axes: Sequence[tuple[str | None, str | None]],
    out_axes: Sequence[Sequence[str | None]],
    rules: AxisRules,
    tensor_parallel: TensorParallel = None,
    quantization: Fp8 = None,
    norm: Norm = None,
) -> tuple[Float[Array, "B T _N"], ...]:
    """``x @ kernel`` for several kernels that share one all-gather of the tokens.

    If the tokens are not split (one new token per sequence) nothing is gathered, and
    the three forms are the same.

    Args:
        x: Activations, split along the tokens or not.
        kernels: Parameters [K, N] in the type of the computation; in fp8 in any type,
            or from `rounded_weight`.
        kernel_axes: Logical axes of each kernel.
        out_axes: Logical axes of each result.
        rules: Mesh axes of each logical axis.
        tensor_parallel: Form of the collectives.
        quantization: Matmuls in fp8, see `jaxscale.sharding.fp8`: collectives are then
            explicit in every form, and tokens are all-gathered in fp8. ``"fused"``
            takes kernels that were tuned and are not slower than XLA.
        norm: An RMS norm of `x`, which is rounded as it is computed; not with one
            scale.

    Returns:
        One result per kernel, with all tokens.

    Raises:
        ValueError: `tensor_parallel` or `quantization` is unknown, shapes disagree, or
            the rules split the features over several mesh axes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.sharding import fsdp_tp, make_mesh
        >>> with jax.set_mesh(make_mesh({"fsdp": -1, "tensor": 4})):
        ...     x, up = jnp.ones((2, 8, 4)), jnp.ones((4, 16))
        ...     (hidden,) = column_parallel(
        ...         x, [up], kernel_axes=[("embed", "mlp")],
        ...         out_axes=[("batch", None, "act_mlp")], rules=fsdp_tp(),
        ...         tensor_parallel="xla",
        ...     )
        >>> hidden.shape, hidden.sharding.spec
        ((2, 8, 16), P(('data', 'fsdp'), None, 'tensor'))
    """
    _check_shapes([x] * len(kernels), kernels)
    region = _Region.of(
        [x], kernels, kernel_axes, rules, tensor_parallel, quantization, rows=False
    )
    product: Any
    if region is not None and quantization is not None:
        product = functools.partial(
            fp8_all_gather_matmul,
            axis_names=region.tokens,
            quantization=quantization,
            fused=tensor_parallel == "fused",
            stored=region.stored,
        )
    elif region is not None and region.tokens == region.axes:
        product = functools.partial(all_gather_matmul, **region.options)
    else:
        x = constrain(x, _WHOLE, rules)
        return tuple(
            contract("btk,kn->btn", x, parameter_of(w), w_axes, axes, rules)
            for w, w_axes, axes in zip(kernels, kernel_axes, out_axes, strict=True)
        )

    def local(xs: Sequence[Array], kernels: Sequence[Array]) -> tuple[Array, ...]:
        x, *scale = xs
        return product(x, kernels, **_normed(scale, norm))

    xs = [x] if norm is None else [x, norm[0]]
    local_axes = [("batch", None, axis) for axis in region.features]
    outs = region.with_vectors(len(xs) - 1).run(local, xs, kernels, local_axes)
    return tuple(
        constrain(out, axes, rules) for out, axes in zip(outs, out_axes, strict=True)
    )


def _normed(scale: Sequence[Array], norm: Norm) -> dict[str, Norm]:
    return {} if norm is None else {"norm": (scale[0], norm[1])}


def feed_forward(
    x: Float[Array, "B T K"],
    kernels: Sequence[Weight],
    *,
    kernel_axes: Sequence[tuple[str | None, str | None]],
    out_axes: Sequence[str | None],
    activation: str,
    rules: AxisRules,
    tensor_parallel: TensorParallel = None,
    quantization: Fp8 = "fp8",
    norm: Norm = None,
) -> Float[Array, "B T K"] | None:
    """A gated feed-forward network in fp8, see `jaxscale.sharding.fp8`.

    Args:
        x: Activations, split along the tokens or not.
        kernels: Gate, up and down projection.
        kernel_axes: Logical axes of each kernel.
        out_axes: Logical axes of the result.
        activation: That of the gate.
        rules: Mesh axes of each logical axis.
        tensor_parallel: Form of the collectives, as for `column_parallel`.
        quantization: A scale per row, or per block.
        norm: An RMS norm of `x`.

    Returns:
        The result; None where devices that split the features do not split the tokens.
    """
    _check_shapes([x, x], kernels[:2])
    region = _Region.of(
        [x],
        kernels[:2],
        kernel_axes[:2],
        rules,
        tensor_parallel,
        quantization,
        rows=False,
    )
    assert region is not None  # there always is one in fp8
    if region.split[0] != region.split[1] or region.tokens != region.split[0]:
        return None

    xs = [x] if norm is None else [x, norm[0]]
    region = region.with_vectors(len(xs) - 1, kernel_axes[2])

    def local(xs: Sequence[Array], kernels: Sequence[Array]) -> tuple[Array]:
        x, *scale = xs
        out = fp8_feed_forward(
            x,
            kernels,
            axis_names=region.tokens,
            quantization=quantization,
            activation=activation,
            fused=tensor_parallel == "fused",
            stored=region.stored,
            **_normed(scale, norm),
        )
        return (out,)

    (out,) = region.run(local, xs, kernels, [_SPLIT])
    return constrain(out, out_axes, rules)


def row_parallel(
    xs: Sequence[Float[Array, "B T _K"]],
    kernels: Sequence[Weight],
    *,
    kernel_axes: Sequence[tuple[str | None, str | None]],
    out_axes: Sequence[str | None],
    rules: AxisRules,
    tensor_parallel: TensorParallel = None,
    quantization: Fp8 = None,
) -> Float[Array, "B T N"]:
    """``sum_i xs[i] @ kernels[i]``, with one reduction over the devices for all of
    them.

    The result is reduce-scattered over the tokens if the rules split them and their
    number divides; otherwise it is all-reduced (one new token per sequence).

    Args:
        xs: Activations whose features are split as the rows of their kernel.
        kernels: Parameters [K, N] in the type of the computation; in fp8 in any type,
            or from `rounded_weight`.
        kernel_axes: Logical axes of each kernel.
        out_axes: Logical axes of the result.
        rules: Mesh axes of each logical axis.
        tensor_parallel: Form of the collectives.
        quantization: Matmuls in fp8, as for `column_parallel`.

    Returns:
        The sum, sharded as `out_axes` say.

    Raises:
        ValueError: `tensor_parallel` or `quantization` is unknown, shapes disagree, or
            the rules split the features over several mesh axes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.sharding import fsdp_tp, make_mesh
        >>> with jax.set_mesh(make_mesh({"fsdp": -1, "tensor": 4})):
        ...     hidden, down = jnp.ones((2, 8, 16)), jnp.ones((16, 4))
        ...     out = row_parallel(
        ...         [hidden], [down], kernel_axes=[("mlp", "embed")],
        ...         out_axes=("batch", "tokens", "act_embed"), rules=fsdp_tp(),
        ...         tensor_parallel="xla",
        ...     )
        >>> float(out[0, 0, 0]), out.sharding.spec
        (16.0, P(('data', 'fsdp'), 'tensor', None))
    """
    _check_shapes(xs, kernels)
    in_workspace = quantization is None and decode_all_reduce.current() is not None
    form = tensor_parallel or ("xla" if in_workspace else None)
    region = _Region.of(xs, kernels, kernel_axes, rules, form, quantization, rows=True)
    if region is None or (quantization is None and not all(region.split)):
        outs = (
            contract("btk,kn->btn", x, parameter_of(w), axes, out_axes, rules)
            for x, w, axes in zip(xs, kernels, kernel_axes, strict=True)
        )
        return functools.reduce(operator.add, outs)
    names = region.split[0]
    if any(other != names for other in region.split):
        alone = (
            row_parallel(
                [x],
                [w],
                kernel_axes=[axes],
                out_axes=out_axes,
                rules=rules,
                tensor_parallel=tensor_parallel,
                quantization=quantization,
            )
            for x, w, axes in zip(xs, kernels, kernel_axes, strict=True)
        )
        return functools.reduce(operator.add, alone)
    scatters = region.tokens == names
    if in_workspace and not scatters:
        parts_axes = (region.features[0], *_WHOLE)
        (parts,) = region.run(_part_of_sum, xs, kernels, [parts_axes])  # [D, B, T, N]
        return constrain(decode_all_reduce.sum_over_devices(parts), out_axes, rules)

    def local(xs: Sequence[Array], kernels: Sequence[Array]) -> tuple[Array]:
        if quantization is None:
            product = matmul_reduce_scatter if scatters else matmul_all_reduce
            return (product(xs, kernels, **region.options),)
        out = fp8_matmul_reduce_scatter(
            xs,
            kernels,
            axis_names=names if scatters else (),
            quantization=quantization,
            fused=tensor_parallel == "fused",
            stored=region.stored,
        )
        return (jax.lax.psum(out, names) if names and not scatters else out,)

    local_axes = _SPLIT if scatters else _WHOLE
    (out,) = region.run(local, xs, kernels, [local_axes])
    return constrain(out, out_axes, rules)


def _part_of_sum(xs: Sequence[Array], kernels: Sequence[Array]) -> tuple[Array]:
    """A device's partial sum of `row_parallel`, [1, B, T, N]."""
    wide = None if len(xs) == 1 else jnp.float32
    products = [
        jnp.einsum("btk,kn->btn", x, w, preferred_element_type=wide)
        for x, w in zip(xs, kernels, strict=True)
    ]
    return (functools.reduce(operator.add, products).astype(xs[0].dtype)[None],)


def _check_shapes(xs: Sequence[Array], kernels: Sequence[Weight]) -> None:
    for x, kernel in zip(xs, map(parameter_of, kernels), strict=True):
        if x.ndim != 3 or x.shape[-1] != kernel.shape[0]:
            raise ValueError(
                f"x has shape {x.shape} and its kernel {kernel.shape}, expected "
                f"[batch, tokens, {kernel.shape[0]} features]"
            )


def tensor_axis(rules: AxisRules, *features: str | None) -> str | None:
    """The one mesh axis over which the rules split `features`; None if over none.

    Axes that split the batch only store parameters and do not count.

    Raises:
        ValueError: there are several.

    Example:
        >>> from jaxscale.sharding import fsdp, fsdp_tp
        >>> tensor_axis(fsdp_tp(), "heads", "mlp"), tensor_axis(fsdp(), "heads")
        ('tensor', None)
    """
    storage = rules.mesh_axes(["batch"])
    split = [rules.mesh_axes([axis]) for axis in features]
    split = [names for names in split if names - storage]
    found = frozenset().union(*split)
    if len(found) > 1:
        raise ValueError(
            f"the rules split {features} over the mesh axes {sorted(found)}, but "
            "tensor_parallel communicates over one; give these logical axes the same "
            "single mesh axis, or set tensor_parallel=None"
        )
    return next(iter(found), None)


def check_tensor_parallel(
    tensor_parallel: str | None, rules: AxisRules | None = None
) -> None:
    """Raise if `tensor_parallel` is unknown, or `rules` do not use it.

    Example:
        >>> from jaxscale.sharding import fsdp, fsdp_tp
        >>> check_tensor_parallel("fused", fsdp_tp())
        >>> check_tensor_parallel("fused", fsdp())
        Traceback (most recent call last):
        ...
        ValueError: tensor_parallel 'fused' needs rules that split heads and mlp over
        one mesh axis, got heads=None and mlp=None; use fsdp_tp() or megascale_3d(), or
        set tensor_parallel=None
    """
    if tensor_parallel is None:
        return
    check_choice("tensor_parallel", tensor_parallel, (*_IMPLEMENTATIONS, None))
    if rules is not None and not (
        tensor_axis(rules, "heads", "mlp")
        and tensor_axis(rules, "heads")
        and tensor_axis(rules, "mlp")
    ):
        raise ValueError(
            f"tensor_parallel {tensor_parallel!r} needs rules that split heads and mlp "
            f"over one mesh axis, got heads={rules.heads!r} and mlp={rules.mlp!r}; use "
            "fsdp_tp() or megascale_3d(), or set tensor_parallel=None"
        )


def _gathered(stored: Stored) -> Stored:
    """The storage of kernels that are gathered in fp8: parts of rows or of columns.

    Where rules store both of a kernel in parts, all are gathered and then rounded.
    """
    return () if any(rows and columns for rows, columns in stored) else stored


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Region:
    """A matmul on each device's shards, with explicit collectives."""

    shards: Shards
    features: tuple[str | None, ...]
    """For each kernel the logical axis that may be split inside of the region."""
    split: tuple[tuple[str, ...], ...]
    """For each kernel the mesh axes of several devices that split its features."""
    tokens: tuple[str, ...]
    """The mesh axes of several devices that split the tokens outside of the region."""
    implementation: str | None
    stored: Stored
    """How the kernels are stored, if they are gathered in fp8."""

    @classmethod
    def of(
        cls,
        xs: Sequence[Array],
        kernels: Sequence[Weight],
        kernel_axes: Sequence[tuple[str | None, str | None]],
        rules: AxisRules,
        tensor_parallel: TensorParallel,
        quantization: Fp8,
        *,
        rows: bool,
    ) -> "_Region | None":
        """The region of a matmul, or None if the compiler inserts the collectives.

        In fp8 there always is one. Otherwise there is none without a mesh, on an axis
        of one device or that divides no features, and inside a `jax.shard_map` over the
        axis, where parameters are unsharded.

        Args:
            xs: Activations, one for each kernel or one for all.
            kernels: The kernels.
            kernel_axes: Logical axes of each kernel.
            rules: Mesh axes of each logical axis.
            tensor_parallel: Form of the collectives.
            quantization: Matmuls in fp8, or None.
            rows: The features that may be split are the rows of kernels, which are
                contracted, instead of their columns.
        """
        check_tensor_parallel(tensor_parallel)
        check_fp8(quantization)
        columns = [axes[0 if rows else 1] for axes in kernel_axes]
        if quantization is None and not (
            tensor_parallel and tensor_axis(rules, *columns)
        ):
            return None
        storing = rules.mesh_axes(["batch"])
        features = tuple(
            None if rules.mesh_axes([axis]) & storing else axis for axis in columns
        )
        x_axes = [("batch", None, axis if rows else None) for axis in features]
        in_axes = [*x_axes[: len(xs)], *kernel_axes]
        shards = Shards.of([*xs, *map(parameter_of, kernels)], in_axes, rules)
        sizes = shards.mesh.shape

        def dividing(axis: str | None) -> tuple[str, ...]:
            return tuple(name for name in shards.names(axis) if sizes[name] > 1)

        split = tuple(map(dividing, features))
        if quantization is None and not any(split):
            return None
        tokens = dividing("tokens")
        if xs[0].shape[1] % math.prod(sizes[name] for name in tokens):
            tokens = ()
        if tokens and not rows:
            in_axes[0] = _SPLIT
            shards = dataclasses.replace(shards, in_axes=tuple(in_axes))
        region = cls(
            shards=shards,
            features=features,
            split=split,
            tokens=tokens,
            implementation=_IMPLEMENTATIONS.get(tensor_parallel or ""),
            stored=(),
        )
        if quantization != "fp8":
            return region
        fused = tensor_parallel == "fused" and tokens and len(kernels) > 1
        stored = region.storage(kernel_axes)
        # A kernel joins its weights along the other axis than that of their parts.
        joins = fused and any(each != stored[0] or each[not rows] for each in stored)
        return dataclasses.replace(region, stored=() if joins else _gathered(stored))

    def with_vectors(self, count: int, *kernels: tuple[str | None, ...]) -> "_Region":
        """The same of vectors after `x`, which all devices have, and more kernels."""
        first, *others = self.shards.in_axes
        in_axes = (first, *[(None,)] * count, *others, *kernels)
        shards = dataclasses.replace(self.shards, in_axes=in_axes)
        stored = self.stored and (*self.stored, *self.storage(kernels))
        return dataclasses.replace(self, shards=shards, stored=_gathered(stored))

    def storage(self, kernel_axes: Sequence[tuple[str | None, ...]]) -> Stored:
        """The mesh axes over which rows and columns of kernels are stored in parts."""
        storing, sizes = (
            self.shards.free.difference(*self.split),
            self.shards.mesh.shape,
        )

        def names(axis: str | None) -> tuple[str, ...]:
            found = self.shards.names(axis)
            return tuple(n for n in found if n in storing and sizes[n] > 1)

        return tuple((names(rows), names(columns)) for rows, columns in kernel_axes)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split features, one unless in fp8."""
        return max(self.split)

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of the ops of `pallas_kernels.collective_matmul`."""
        return {
            "axis_name": self.axes[0],
            "implementation": self.implementation,
        }

    def run(
        self,
        product: Callable[[Sequence[Array], Sequence[Array]], tuple[Array, ...]],
        xs: Sequence[Array],
        kernels: Sequence[Weight],
        out_axes: Sequence[Sequence[str | None]],
    ) -> tuple[Array, ...]:
        """``product(xs, kernels)`` of each device's shards, with unsharded kernels.

        Those that are stored in parts are gathered in the type of `xs`, unless
        `stored` leaves that to `product`.
        """
        shards, count = self.shards, len(xs)
        storing = shards.free.difference(*self.split)
        if not self.stored and any(map(any, self.storage(shards.in_axes[count:]))):
            kernels = [parameter_of(w).astype(xs[0].dtype) for w in kernels]
        stored = self.stored or [((), ())] * len(kernels)
        axes = map(axes_of, kernels, shards.in_axes[count:], stored)
        in_axes = (*shards.in_axes[:count], *axes)
        shards = dataclasses.replace(shards, in_axes=in_axes)
        args = shards.place([*xs, *kernels])
        gathered = [
            i for i in range(count, len(args)) if not isinstance(args[i], RoundedWeight)
        ]
        return shards.over(
            lambda *args: product(args[:count], args[count:]),
            out_axes,
            parameters=() if self.stored else gathered,
            storing=storing,
        )(*args)
