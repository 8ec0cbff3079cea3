"""The schedule of a decoder layer in one launch: its stages and how they are cut.

Axis letters: M requests, D model, F hidden, N query heads, K key/value heads, H head
dim.
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec, smem_bytes


GROUP = 64
"""Features whose sums a warpgroup has: the rows of a tensor-core instruction."""

WARPGROUPS = 2
"""Warpgroups of a block that multiply, and groups of an output tile."""

MOST_ROWS = 64
"""Requests that the kernel takes: more are better off with kernels for matmuls."""

type Epilogue = Literal["add", "swiglu", "rotate"]
"""What becomes of the sums of a stage; see `mosaic_gpu`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeLayerConfig:
    """How the kernel cuts a layer."""

    tile_k: int = 128
    """Input features of a tile of a weight: 64 or 128."""
    weight_slots: int | None = None
    """Tiles of weights in flight; None is as many as fit in shared memory."""
    activation_slots: int | None = None
    """Tiles of activations in flight; None is 6, or 3 for more than 32 requests."""

    def __post_init__(self) -> None:
        if self.tile_k not in (64, 128):
            raise ValueError(f"tile_k {self.tile_k!r}, expected 64 or 128")
        for name in ("weight_slots", "activation_slots"):
            value = getattr(self, name)
            if value is not None and value < 2:
                raise ValueError(f"{name} {value!r}, expected None or at least 2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A layer: its sizes, and what the call leaves out."""

    m: int
    """Requests."""
    d_model: int
    d_ff: int
    features: int
    """Of the attention's output."""
    heads: int = 0
    """Query heads of the next layer; 0 after the last."""
    kv_heads: int = 0
    head_dim: int = 0
    bias: bool = False
    """Whether queries, keys and values have a bias."""

    @property
    def projects(self) -> bool:
        """Whether another layer follows."""
        return self.heads > 0

    @property
    def rows(self) -> int:
        """M rounded up to the columns of a tensor-core instruction."""
        return padded_rows(self.m)

    def check(self) -> None:
        """Checks that the kernel can serve the problem.

        Raises:
            Unsupported: it cannot; the message says what to do.
        """
        tile = GROUP * WARPGROUPS
        reasons = {
            f"m={self.m}, the kernel takes 1 to {MOST_ROWS} requests, up to 8 or a"
            " multiple of 8": 0 < self.m <= MOST_ROWS
            and (self.m < 8 or self.m % 8 == 0),
            f"d_model={self.d_model}, d_ff={self.d_ff} and features={self.features},"
            f" the kernel needs multiples of {tile}": all(
                size % tile == 0 for size in (self.d_model, self.d_ff, self.features)
            ),
            f"head_dim={self.head_dim}, the kernel needs a multiple of {tile}": (
                self.head_dim % tile == 0
            ),
        }
        for reason, fits in reasons.items():
            if not fits:
                raise Unsupported(f"decode_layer: {reason}; use implementation='xla'")


def padded_rows(m: int) -> int:
    """Columns of feature-major arrays of `m` requests: the next multiple of 8.

    Example:
        >>> padded_rows(2), padded_rows(32)
        (8, 32)
    """
    return -(-m // 8) * 8


def quotient(number: Any, by: int) -> Any:
    """The quotient of an `int`, or of an int32 of the device, that is not negative."""
    if isinstance(number, int):
        return number // by
    return lax.div(number, jnp.int32(by))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A product with a weight ``[k, n]``, cut into shares, and what follows it.

    The tiles of the weight, ``tile_k`` by 128, lie in one line, column of tiles after
    column. Every share is an equal part of that line, so that all multiprocessors read
    as much whatever the shape. A column of tiles (an output tile) may be divided among
    several shares; their sums are its *parts*, which are added in the order of the
    shares.

    A *unit* is what a warpgroup does when all parts of some groups of 64 features are
    there: one group, or two of which one needs the other, `half` groups apart.
    """

    weight: str
    """Name of the weight."""
    source: str
    """Name of the activations that it multiplies, [M,k]."""
    k: int
    n: int
    epilogue: Epilogue
    norm: int | None = None
    """Number of the norm whose factors of each row multiply the sums."""
    half: int = 0
    """Groups between the two of a unit; 0 where units have one group."""
    tile_k: int = 128
    workers: int = 1
    """Blocks, of which each has a share."""

    @property
    def depth(self) -> int:
        """Tiles of a column."""
        return self.k // self.tile_k

    @property
    def tiles(self) -> int:
        """Tiles of the weight."""
        return self.depth * (self.n // (GROUP * WARPGROUPS))

    @property
    def shares(self) -> int:
        """At most one per tile: an empty share would be waited for."""
        return min(self.workers, self.tiles)

    @property
    def groups(self) -> int:
        """Groups of 64 features."""
        return self.n // GROUP

    @property
    def units(self) -> int:
        """Units, which are dealt to all warpgroups that multiply."""
        return self.groups // 2 if self.half else self.groups

    def share_of(self, tile: Any) -> Any:
        """The share that has a tile: the first one that ends behind it."""
        return quotient((tile + 1) * self.shares - 1, self.tiles)

    def first_tile(self, share: Any) -> Any:
        """The first tile of a share; that of the next share ends it."""
        return quotient(share * self.tiles, self.shares)

    def parts(self, column: Any) -> tuple[Any, Any]:
        """The first share of an output tile, and how many it has."""
        first = self.share_of(column * self.depth)
        return first, self.share_of((column + 1) * self.depth - 1) - first + 1

    @property
    def most_parts(self) -> int:
        """The most parts that an output tile has."""
        columns = range(self.n // (GROUP * WARPGROUPS))
        return max(self.parts(column)[1] for column in columns)

    def groups_of(self, unit: Any) -> tuple[Any, ...]:
        """The groups of 64 features of a unit.

        Example:
            >>> heads = Stage(weight="qkv", source="x", k=128, n=512, half=1,
            ...               epilogue="rotate")
            >>> [heads.groups_of(unit) for unit in range(heads.units)]
            [(0, 1), (2, 3), (4, 5), (6, 7)]
        """
        if not self.half:
            return (unit,)
        first = unit + quotient(unit, self.half) * self.half
        return first, first + self.half


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A problem cut by a config for a device."""

    problem: Problem
    config: DecodeLayerConfig
    device: DeviceSpec

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The table: a stage begins when the units of the one before are done."""
        p = self.problem
        cut: Any = {"tile_k": self.config.tile_k, "workers": self.workers}
        heads = p.heads + 2 * p.kv_heads
        found = [
            Stage(
                weight="out",
                source="attended",
                k=p.features,
                n=p.d_model,
                epilogue="add",
                **cut,
            ),
            Stage(
                weight="gate_up",
                source="normed_0",
                k=p.d_model,
                n=2 * p.d_ff,
                epilogue="swiglu",
                norm=0,
                half=p.d_ff // GROUP,
                **cut,
            ),
            Stage(
                weight="down",
                source="hidden",
                k=p.d_ff,
                n=p.d_model,
                epilogue="add",
                **cut,
            ),
        ]
        if p.projects:
            qkv = Stage(
                weight="qkv",
                source="normed_1",
                k=p.d_model,
                n=heads * p.head_dim,
                epilogue="rotate",
                norm=1,
                half=p.head_dim // (2 * GROUP),
                **cut,
            )
            found.append(qkv)
        return tuple(found)

    @property
    def workers(self) -> int:
        """Blocks, all of which run at once: they wait for each other."""
        return self.device.num_sms

    @property
    def parts_shape(self) -> tuple[int, int, int, int]:
        """Sums of shares, by group and part: [groups, parts, 64, M]."""
        groups = max(stage.groups for stage in self.stages)
        parts = max(stage.most_parts for stage in self.stages)
        return groups, parts, GROUP, self.problem.rows

    @property
    def activation_slots(self) -> int:
        """Tiles of activations in flight."""
        default = 6 if self.problem.rows <= 32 else 3
        return self.config.activation_slots or default

    @property
    def fixed_bytes(self) -> int:
        """Shared memory besides the ring of weights."""
        rows = self.problem.rows
        turned = smem_bytes((WARPGROUPS, rows, GROUP), jnp.bfloat16)
        slot = smem_bytes((rows, self.config.tile_k), jnp.bfloat16)
        return turned + self.activation_slots * slot + 4096

    @property
    def slot_bytes(self) -> int:
        """Shared memory of a tile of weights."""
        return smem_bytes((WARPGROUPS, self.config.tile_k, GROUP), jnp.bfloat16)

    @property
    def weight_slots(self) -> int:
        """Tiles of weights in flight."""
        room = (self.device.smem_bytes - self.fixed_bytes) // self.slot_bytes
        return self.config.weight_slots or max(2, room)
