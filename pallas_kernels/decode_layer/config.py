"""The schedule of a decoder layer in one launch: its stages and how they are cut.

Axis letters: M requests, D model, F hidden, N query heads, K key/value heads, H head
dim.
"""

import dataclasses
import itertools
import math
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec, largest_divisor, smem_bytes


GROUP = 64
"""Features whose sums a warpgroup has: the rows of a tensor-core instruction."""

WARPGROUPS = 2
"""Warpgroups of a block that multiply, and groups of an output tile."""

MOST_ROWS = 64
"""Requests that the kernel takes: more are better off with kernels for matmuls."""

MOST_PARTS = 20
"""Parts of an output tile up to which a stage is divided into waves."""

type Epilogue = Literal["add", "swiglu", "rotate"]
"""What becomes of the sums of a stage; see `mosaic_gpu`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeLayerConfig:
    """How the kernel cuts a layer."""

    tile_k: int = 64
    """Input features of a tile of a weight: 64 or 128."""
    groups: int = 2
    """Groups of 64 output features of a warpgroup in a tile: 1 or 2. A tile of more has
    longer lines, and activations are read less often. 1 where sizes do not divide."""
    waves: int = 4
    """Most waves of a stage that another follows."""
    weight_slots: int | None = None
    """Tiles of weights in flight; None is as many as fit in shared memory."""
    activation_slots: int | None = None
    """Tiles of activations in flight; None is 8, or 5 for more than 32 requests."""

    def __post_init__(self) -> None:
        if self.tile_k not in (64, 128):
            raise ValueError(f"tile_k {self.tile_k!r}, expected 64 or 128")
        if self.groups not in (1, 2):
            raise ValueError(f"groups {self.groups!r}, expected 1 or 2")
        if self.waves < 1:
            raise ValueError(f"waves {self.waves!r}, expected at least 1")
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


def remainder(number: Any, by: int) -> Any:
    """The remainder to `quotient`."""
    return number - quotient(number, by) * by


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A matmul with a weight ``[k, n]``, cut into waves, shares, parts and units.

    Columns of tiles (output tiles) are dealt to *waves*, which follow one another. In a
    wave all blocks work on the same columns: the tiles lie in one line, column after
    column, and every *share* is an equal part of that line, so that all multiprocessors
    read as much whatever the shape. A column may be divided among several shares; their
    sums are its *parts*, which are added in the order of the shares.

    The features of a wave are done long before those of the last. So that the next
    stage can begin with them, the tiles of a share lie `stride` apart in their column:
    each part has early and late input features, and comes to the late ones last.

    A *unit* is what a warpgroup does when all parts of some groups of 64 features are
    there, for some of the rows: one group, or two of which one needs the other, `half`
    groups apart.
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
    tile_groups: int = 2
    """Groups of a tile."""
    most_waves: int = 1
    workers: int = 1
    """Blocks, of which each has a share."""
    rows: int = 8

    @property
    def depth(self) -> int:
        """Tiles of a column."""
        return self.k // self.tile_k

    @property
    def groups(self) -> int:
        """Groups of 64 features."""
        return self.n // GROUP

    @property
    def columns(self) -> int:
        """Columns of tiles."""
        return self.groups // self.tile_groups

    @property
    def features(self) -> int:
        """Output features of the epilogue, in groups of 64."""
        return self.groups // 2 if self.half else self.groups

    @property
    def interleaved(self) -> bool:
        """Whether the two halves of the weight take turns: units have one of each."""
        return 2 * self.half == self.groups

    @property
    def waves(self) -> int:
        """Waves of as many columns each, with no more parts than `MOST_PARTS`."""
        pairs = self.columns // 2 if self.interleaved else self.columns
        most = min(self.most_waves, self.columns * MOST_PARTS // self.workers)
        return largest_divisor(pairs, most)

    @property
    def span(self) -> int:
        """Columns of a wave."""
        return self.columns // self.waves

    @property
    def tiles(self) -> int:
        """Tiles of a wave."""
        return self.depth * self.span

    @property
    def shares(self) -> int:
        """At most one per tile: an empty share would be waited for."""
        return min(self.workers, self.tiles)

    @property
    def stride(self) -> int:
        """Tiles of a column between two that follow each other in a share.

        Nearly as many as a column has parts, and without a common divisor with its
        tiles, so that every tile has its turn.
        """
        wanted = max(1, round(self.shares / self.span))
        candidates = sorted(range(1, self.depth + 1), key=lambda n: abs(n - wanted))
        return next(n for n in candidates if math.gcd(n, self.depth) == 1)

    def k_of(self, position: Any) -> Any:
        """The tile of a column at a position of the line."""
        return remainder(position * self.stride, self.depth)

    def column_of(self, position: Any) -> Any:
        """The column of the weight at a position of the line of all waves."""
        if not self.interleaved:
            return position
        first = quotient(position, 2)
        return first + (position - 2 * first) * (self.columns // 2)

    def position_of(self, column: Any) -> Any:
        """The position in the line of all waves, the inverse of `column_of`."""
        if not self.interleaved:
            return column
        second = quotient(column, self.columns // 2)
        return 2 * (column - second * (self.columns // 2)) + second

    def first_tile(self, share: Any) -> Any:
        """The first tile of a share in a wave; that of the next share ends it."""
        return quotient(share * self.tiles, self.shares)

    def share_of(self, tile: Any) -> Any:
        """The share that has a tile: the first one that ends behind it."""
        return quotient((tile + 1) * self.shares - 1, self.tiles)

    def parts(self, column: Any) -> Any:
        """How many parts a column of the weight has."""
        start = remainder(self.position_of(column), self.span) * self.depth
        return self.share_of(start + self.depth - 1) - self.share_of(start) + 1

    @property
    def most_parts(self) -> int:
        """The most parts that an output tile has."""
        return max(self.parts(column) for column in range(self.columns))

    # --- Units ------------------------------------------------------------------------

    @property
    def unit_rows(self) -> int:
        """Rows of a unit: few enough that all warpgroups have one."""
        rows = self.rows
        units = WARPGROUPS * self.workers
        while rows % 16 == 0 and self.features * (2 * self.rows // rows) <= units:
            rows //= 2
        return rows

    @property
    def wave_units(self) -> int:
        """Units of a wave."""
        return self.features // self.waves * (self.rows // self.unit_rows)

    def unit(self, index: Any) -> tuple[tuple[Any, ...], Any]:
        """The groups of a unit, and its first row.

        Example:
            >>> heads = Stage(weight="qkv", source="x", k=128, n=512, half=1,
            ...               epilogue="rotate", rows=16, workers=4)
            >>> [heads.unit(i) for i in range(3)]
            [((0, 1), 0), ((0, 1), 8), ((2, 3), 0)]
        """
        pieces = self.rows // self.unit_rows
        feature = quotient(index, pieces)
        row = (index - feature * pieces) * self.unit_rows
        if not self.half:
            return (feature,), row
        first = feature + quotient(feature, self.half) * self.half
        return (first, first + self.half), row

    def wave_of(self, last_feature: Any) -> Any:
        """The wave after which an output feature is there."""
        return quotient(last_feature, self.features // self.waves * GROUP)


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
        cut: Any = {
            "tile_k": self.config.tile_k,
            "tile_groups": self.tile_groups,
            "workers": self.workers,
            "rows": p.rows,
        }
        waves = {"most_waves": self.config.waves}
        heads = p.heads + 2 * p.kv_heads
        found = [
            Stage(
                weight="out",
                source="attended",
                k=p.features,
                n=p.d_model,
                epilogue="add",
                **cut,
                **waves,
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
                **waves,
            ),
            Stage(
                weight="down",
                source="hidden",
                k=p.d_ff,
                n=p.d_model,
                epilogue="add",
                **cut,
                **waves,
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
    def tile_groups(self) -> int:
        """Groups of a tile: as the config says, if all sizes divide."""
        p = self.problem
        sizes = p.d_model, p.d_ff, (p.heads + 2 * p.kv_heads) * p.head_dim
        wanted = WARPGROUPS * self.config.groups
        fits = all(size % (wanted * GROUP) == 0 for size in sizes)
        return wanted if fits else WARPGROUPS

    @property
    def first_parts(self) -> list[int]:
        """Where the parts of each stage begin, and where they end."""
        sizes = (stage.groups * stage.most_parts for stage in self.stages)
        return list(itertools.accumulate(sizes, initial=0))

    @property
    def activation_slots(self) -> int:
        """Tiles of activations in flight."""
        default = 8 if self.problem.rows <= 32 else 5
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
        return smem_bytes((self.tile_groups, self.config.tile_k, GROUP), jnp.bfloat16)

    @property
    def weight_slots(self) -> int:
        """Tiles of weights in flight."""
        room = (self.device.smem_bytes - self.fixed_bytes) // self.slot_bytes
        return self.config.weight_slots or max(2, room)
