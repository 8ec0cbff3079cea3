"""What the Mosaic GPU kernels share: the device they are built for, layouts, orders.

Kernels never ask the hardware. A `DeviceSpec` is handed down from the public function,
so that the same kernel can be traced, interpreted and lowered where there is no GPU.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import jaxpr_as_fun
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Unsupported


__all__ = [
    "H200",
    "DeviceSpec",
    "as_varying",
    "check_hopper",
    "check_smem",
    "largest_divisor",
    "smem_bytes",
    "smem_transforms",
    "snake_order",
    "unmarked",
    "use_device",
    "vary_alike",
    "varying",
]

# Largest dynamic shared memory of one block, by compute capability.
_SMEM_BYTES = {(8, 0): 166_912, (8, 9): 101_376, (9, 0): 232_448, (10, 0): 232_448}

_assumed: ContextVar["DeviceSpec | None"] = ContextVar("assumed_device", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """The facts about a GPU that kernels and heuristics depend on."""

    name: str
    """Lower-case name with underscores, as in ``tuned/<name>.json``."""
    num_sms: int
    """Streaming multiprocessors: how many persistent blocks run at a time."""
    smem_bytes: int
    """Largest shared memory of one block, in bytes."""
    compute_capability: tuple[int, int]
    """``(9, 0)`` is Hopper."""

    def __post_init__(self) -> None:
        for field in ("num_sms", "smem_bytes"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"{field} {getattr(self, field)}, expected a positive number"
                )

    @classmethod
    def current(cls) -> "DeviceSpec | None":
        """The NVIDIA GPU that computations run on, or None where there is none.

        Inside ``with use_device(spec)`` it is that spec; `jax.default_device` counts,
        and so does a mesh of CPUs (`jax.shard_map`, `jax.set_mesh`). The placement of
        arrays does not: it is not known under `jax.jit`.
        """
        if (spec := _assumed.get()) is not None:
            return spec
        if _platform() == "cpu":
            return None
        device: Any = jax.config.jax_default_device
        if device is None or isinstance(device, str):
            device = jax.local_devices(backend=device)[0]
        capability = getattr(device, "compute_capability", "")
        if not re.fullmatch(r"\d+\.\d+", str(capability)):  # a CPU, or AMD's "gfx942"
            return None
        major, minor = (int(x) for x in str(capability).split("."))
        return cls(
            name=re.sub(r"[^a-z0-9]+", "_", device.device_kind.lower()).strip("_"),
            num_sms=device.core_count,
            smem_bytes=_SMEM_BYTES.get((major, minor), 49_152),
            compute_capability=(major, minor),
        )


H200 = DeviceSpec(
    name="nvidia_h200",
    num_sms=132,
    smem_bytes=_SMEM_BYTES[9, 0],
    compute_capability=(9, 0),
)
"""NVIDIA H200 SXM, for lowering and interpreting kernels without a GPU."""


@contextlib.contextmanager
def use_device(spec: DeviceSpec) -> Iterator[DeviceSpec]:
    """Makes public ops build their kernels for `spec`, whatever device is there.

    Args:
        spec: the device to assume, for example `H200` to lower kernels on a CPU.

    Example:
        >>> with use_device(H200):
        ...     DeviceSpec.current().num_sms
        132
    """
    token = _assumed.set(spec)
    try:
        yield spec
    finally:
        _assumed.reset(token)


def _platform() -> str | None:
    """The platform of the mesh in use, which a program may have beside the default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.platform


def check_hopper(device: DeviceSpec | None, op_name: str) -> DeviceSpec:
    """Returns the device if the Hopper kernels run on it.

    Raises:
        Unsupported: there is no NVIDIA GPU, or it is of another generation.
    """
    if device is None:
        raise Unsupported(
            f"{op_name}: the Mosaic GPU kernel needs an NVIDIA Hopper GPU and the"
            f" backend is {(_platform() or jax.default_backend())!r}; use"
            " implementation='xla'"
        )
    if device.compute_capability[0] != 9:
        raise Unsupported(
            f"{op_name}: the Mosaic GPU kernel needs compute capability 9.x, got"
            f" {device.compute_capability} ({device.name}); use implementation='xla'"
        )
    return device


def check_smem(num_bytes: int, device: DeviceSpec, what: str) -> None:
    """Checks the shared memory of one block before lowering fails on it.

    Raises:
        Unsupported: it is more than a block of this device can have.
    """
    if num_bytes > device.smem_bytes:
        raise Unsupported(
            f"{what} needs {num_bytes} bytes of shared memory a block and"
            f" {device.name} has {device.smem_bytes}; use smaller tiles or fewer stages"
        )


def smem_transforms(minor_size: int, dtype: DTypeLike) -> tuple[Any, ...]:
    """The layout that the tensor cores and the copy engine both read without conflicts.

    Args:
        minor_size: size of the last dimension of the buffer, in elements.
        dtype: type of the elements.

    Returns:
        Transforms for `plgpu.SMEM`: tiles of 8 rows of one swizzled line.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(minor_size * itemsize * 8)
    # Their base class is a protocol, which makes them look abstract to a type checker.
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # pyright: ignore[reportAbstractUsage]
    return (tiling, plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]


def smem_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Bytes of a shared-memory buffer, rounded up to the alignment of 1,024."""
    return -(-math.prod(shape) * jnp.dtype(dtype).itemsize // 1024) * 1024


def snake_order(
    index: jax.Array,
    tiles: tuple[int, int],
    minor: Literal["m", "n"],
    group: int,
) -> tuple[jax.Array, jax.Array]:
    """Position of the `index`-th output tile in an order that reuses the L2 cache.

    The grid of tiles is cut into bands of `group` along the minor dimension. A band is
    walked line by line, and every other band backwards, so that blocks that run at the
    same time share rows of one operand and columns of the other.

    Args:
        index: int32, ``0 <= index < tiles[0] * tiles[1]``.
        tiles: number of tiles along m and n.
        minor: dimension that is cut into bands.
        group: tiles across one band.

    Returns:
        Tile indices ``(m, n)``.

    Example:
        >>> import jax.numpy as jnp
        >>> [tuple(map(int, snake_order(jnp.int32(i), (2, 4), "n", 2)))
        ...  for i in range(8)]
        [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (0, 2), (0, 3)]
    """
    minor_size, major_size = tiles if minor == "m" else (tiles[1], tiles[0])
    group = min(group, minor_size)
    band = lax.div(index, jnp.int32(group * major_size))
    within = lax.rem(index, jnp.int32(group * major_size))
    # The last band may be narrower.
    width = jnp.minimum(jnp.int32(group), minor_size - band * group)
    line = lax.div(within, width)
    line = jnp.where(lax.rem(band, jnp.int32(2)) == 0, line, major_size - 1 - line)
    across = band * group + lax.rem(within, width)
    return (across, line) if minor == "m" else (line, across)


def varying(*arrays: jax.Array) -> frozenset[str]:
    """Mesh axes over which any of the arrays varies, inside `jax.shard_map`."""
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))


def unmarked(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose body does not see over which mesh axes its arguments vary.

    `plgpu.warp_map` refuses references that are marked so.
    """

    def run(*args: jax.Array) -> Any:
        unmarked_args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
        jaxpr, outputs = jax.make_jaxpr(kernel, return_shape=True)(*unmarked_args)
        results = jaxpr_as_fun(jaxpr)(*args)
        return jax.tree.unflatten(jax.tree.structure(outputs), results)

    return run


def as_varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Marks an array as varying over mesh axes: kernels lose the mark.

    The transpose of the mark sums gradients over the axes, which a gradient rule,
    seeing only local values, could not know.
    """
    missing = tuple(sorted(axes - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(tree: Any) -> Any:
    """Marks all arrays as varying over the mesh axes over which any of them does."""
    axes = varying(*jax.tree.leaves(tree))
    return jax.tree.map(lambda x: as_varying(x, axes), tree)


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor up to `most`; 1 where that is less."""
    return max(n for n in range(1, max(1, min(number, most)) + 1) if number % n == 0)
