"""The schedule of a decoder layer in one launch: its stages and how they are cut.

Axis letters: M requests, D model, F hidden, N query heads, K key/value heads, H head
dim.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec, smem_bytes
from pallas_kernels.paged_attention.problem import Cut


GROUP = 64
"""Features whose sums a warpgroup has: the rows of a tensor-core instruction."""

WARPGROUPS = 2
"""Warpgroups of a block that multiply."""

UNIT = 2
"""Groups of a warpgroup in a tile: its unit."""

TILE_GROUPS = WARPGROUPS * UNIT
"""Groups of a tile of a weight."""

MOST_ROWS = 64
"""Requests that the kernel takes: more are better off with kernels for matmuls."""

type Epilogue = Literal["add", "swiglu", "rotate"]
"""What becomes of the sums of a stage; see `mosaic_gpu`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeLayerConfig:
    """How the kernel cuts a layer."""

    tile_k: int | None = None
    """Input features of a tile of a weight: 64 or 128; None is 64, or 128 of 8 bits:
    32 KiB of a tile of either."""
    weight_slots: int | None = None
    """Tiles of weights in flight; None is as many as fit in shared memory."""
    activation_slots: int | None = None
    """Tiles of activations in flight; None is 8, with more requests fewer."""
    requested: int | None = 2
    """Tiles of weights that are asked for at a time; None is as many as have room.

    Memory that answers after 1 us at 4.4 TB/s has 4.4 MB on their way; two tiles of 32
    KiB for each of 132 blocks are 8.7 MB, so that it is never idle. All six slots are
    26 MB: these wait in its queues for 6 us, and what blocks tell each other between
    two stages waits behind them.
    """

    def __post_init__(self) -> None:
        if self.tile_k not in (None, 64, 128):
            raise ValueError(f"tile_k {self.tile_k!r}, expected None, 64 or 128")
        least = {"weight_slots": 2, "activation_slots": 2, "requested": 1}
        for name, size in least.items():
            value = getattr(self, name)
            if value is not None and value < size:
                raise ValueError(f"{name} {value!r}, expected None or at least {size}")


@dataclasses.dataclass(frozen=True)
class Kept:
    """Sizes of a part of a tile-sparse weight: some of its output features."""

    tiles: int
    room: int
    """The most rows that a tile may keep: a multiple of 64."""
    dense: bool = False
    """All rows are kept, and lie as in a dense weight."""


COLUMNS = 8
"""Columns of a tensor-core instruction, for the queries of a key/value head."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cached:
    """Attention over pages, of this layer and the next."""

    heads: int
    """N, query heads."""
    kv_heads: int
    head_dim: int
    page: int
    """G, tokens of a page."""
    width: int
    """W, pages of a row."""
    num_pages: int
    """Of a layer."""
    cut: Cut
    """How rows are cut into splits."""
    scale: float
    softcap: float | None = None

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.heads // self.kv_heads


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
    weights: str = "bfloat16"
    """Type of the weights: that, or int8 or float8_e4m3fn with scales."""
    devices: int = 1
    """Devices that have a part of the layer each; the sizes are those of a part."""
    kept: tuple[tuple[Kept, ...], ...] = ()
    """The parts of tile-sparse weights: `out`, `gate_up`, `down` and, if any, `qkv`."""
    cached: Cached | None = None
    """Attention, if it is in the launch."""

    @property
    def weight_dtype(self) -> jnp.dtype:
        """Type of the weights."""
        return jnp.dtype(self.weights)

    @property
    def narrow(self) -> bool:
        """Whether weights have 8 bits, and lie as [features, inputs]."""
        return self.weight_dtype.itemsize == 1

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
        pair, tile = UNIT * GROUP, TILE_GROUPS * GROUP
        columns = (self.heads + 2 * self.kv_heads) * self.head_dim
        reasons = {
            f"m={self.m}, the kernel takes 1 to {MOST_ROWS} requests, up to 8 or a"
            " multiple of 8": 0 < self.m <= MOST_ROWS
            and (self.m < 8 or self.m % 8 == 0),
            f"d_model={self.d_model} and {columns} features of queries, keys and"
            f" values, the kernel needs multiples of {tile}": (
                self.d_model % tile == columns % tile == 0
            ),
            f"d_ff={self.d_ff}, features={self.features} and head_dim="
            f"{self.head_dim}, the kernel needs multiples of {pair}": all(
                size % pair == 0 for size in (self.d_ff, self.features, self.head_dim)
            ),
        }
        if self.kept:
            rooms = [part.room for kept in self.kept for part in kept]
            reasons[f"tiles of at most {rooms} rows, expected multiples of {GROUP}"] = (
                all(room > 0 and room % GROUP == 0 for room in rooms)
            )
            reason = f"tile-sparse weights over {self.devices} devices, expected one"
            reasons[reason] = self.devices == 1
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


def part_names(weight: str, parts: Sequence[Any]) -> list[str]:
    """The operands that hold the values of a weight's parts.

    Example:
        >>> part_names("qkv", "abc"), part_names("out", ())
        (['qkv', 'qkv_1', 'qkv_2'], ['out'])
    """
    return [weight, *(f"{weight}_{i}" for i in range(1, len(parts)))]


def quotient(number: Any, by: int) -> Any:
    """The quotient of an `int`, or of an int32 of the device, that is not negative."""
    if isinstance(number, int):
        return number // by
    return lax.div(number, jnp.int32(by))


def remainder(number: Any, by: int) -> Any:
    """The remainder to `quotient`."""
    return number - quotient(number, by) * by


@dataclasses.dataclass(frozen=True)
class Piece:
    """The tiles of a block in one column, `step` apart."""

    column: Any
    """Which column of tiles."""
    part: Any
    """Which part of its sums."""
    first: Any
    step: Any
    count: Any

    def k(self, index: Any) -> Any:
        """The tile of the column that is multiplied as number `index`."""
        return self.first + index * self.step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A matmul with a weight ``[k, n]``, cut into pieces that blocks have.

    A tile is `tile_k` input features and 4 groups of 64 output features, and tiles of
    the same output features are a *column*. As long as there are columns for all
    blocks, each block has one as a whole. Of the columns that are left, fewer than
    blocks, `split` blocks share each: they take its tiles in turn, so that all blocks
    read the same rows of the weight at a time. Blocks that are left over then have
    nothing to do: what is left read memory as fast as all.

    A *unit* is what a warpgroup has of a column: two groups. Which two depends on the
    epilogue: those `half` groups apart where one needs the other. A block that is the
    only one of a column finishes its units from registers; sums of the others are
    *parts* in memory, and are added in their order.
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
    """Groups between the two of a unit; 0 where they are neighbours."""
    over_devices: int | None = None
    """Which sum over devices the sums are parts of, 0 or 1; None: they are whole."""
    kept: tuple[Kept, ...] = ()
    """The parts of a tile-sparse weight, which blocks share as `shares` says: `k` is
    the most rows that a tile keeps, and the sums of all blocks go through memory."""
    tile_k: int = 64
    workers: int = 1
    """Blocks."""
    rows: int = 8

    @property
    def depth(self) -> int:
        """Tiles of a column."""
        return self.k // self.tile_k

    @property
    def sparse_tiles(self) -> int:
        """Tiles of a tile-sparse weight."""
        return sum(part.tiles for part in self.kept)

    @property
    def columns(self) -> int:
        """Columns of tiles."""
        return self.n // (TILE_GROUPS * GROUP)

    @property
    def whole(self) -> int:
        """Columns of which every block has as many, as a whole."""
        return 0 if self.kept else self.columns // self.workers

    @property
    def shared(self) -> int:
        """Columns that are left."""
        return self.columns - self.whole * self.workers

    @property
    def split(self) -> int:
        """Blocks that share a column of these."""
        return min(self.workers // self.shared, self.depth) if self.shared else 0

    def pieces(self, worker: Any) -> Any:
        """How many pieces a block has."""
        shares = worker < self.shared * self.split
        if isinstance(worker, int):
            return self.whole + int(shares)
        return self.whole + shares.astype(jnp.int32)

    def piece(self, worker: Any, index: Any) -> Piece:
        """A piece of a block.

        Example:
            >>> stage = Stage(weight="w", source="x", k=640, n=1792, epilogue="add",
            ...               workers=16)  # 7 columns of 10 tiles
            >>> stage.split, [stage.pieces(worker) for worker in (0, 13, 14)]
            (2, [1, 1, 0])
            >>> stage.piece(8, 0)
            Piece(column=1, part=1, first=1, step=2, count=5)
        """
        where = _where if isinstance(worker, int) else jnp.where
        shared, split = max(1, self.shared), max(1, self.split)
        part = quotient(worker, shared)
        whole = Piece(index * self.workers + worker, 0, 0, 1, self.depth)
        in_turn = Piece(
            self.whole * self.workers + remainder(worker, shared),
            part,
            part,
            split,
            quotient(self.depth - part + split - 1, split),
        )
        numbers = zip(*(vars(x).values() for x in (whole, in_turn)), strict=True)
        return Piece(*(where(index < self.whole, a, b) for a, b in numbers))

    def is_alone(self, piece: Piece) -> Any:
        """Whether its block finishes its units from registers."""
        return self.direct | (piece.column < self.whole * self.workers)

    # --- Units ------------------------------------------------------------------------

    @property
    def units(self) -> int:
        """Units of all columns: 2 of each."""
        return self.columns * WARPGROUPS

    @property
    def shared_units(self) -> int:
        """Units of shared columns, the last ones."""
        return self.shared * WARPGROUPS

    def groups(self, unit: Any) -> tuple[Any, Any]:
        """The groups of a unit.

        Example:
            >>> heads = Stage(weight="qkv", source="x", k=128, n=512, half=2,
            ...               epilogue="rotate", workers=4)
            >>> [heads.groups(unit) for unit in range(4)]
            [(0, 2), (1, 3), (4, 6), (5, 7)]
        """
        if not self.half:
            return 2 * unit, 2 * unit + 1
        first = unit + quotient(unit, self.half) * self.half
        return first, first + self.half

    @property
    def direct(self) -> bool:
        """Whether all units are finished from registers."""
        return self.split <= 1 and not self.kept

    @property
    def parts(self) -> int:
        """Sums in memory of a unit of a shared column."""
        return 0 if self.direct else self.split

    # --- Units whose sums are in memory -----------------------------------------------

    @property
    def pairs(self) -> bool:
        """Whether such a unit is finished as a whole, since its groups need each other.

        If not, more warpgroups have something to finish.
        """
        return self.half > 0

    @property
    def item_rows(self) -> int:
        """Rows that are finished at a time: few, so that all warpgroups have some."""
        rows, items = self.rows, self.shared_units * (1 if self.pairs else UNIT)
        while rows % 16 == 0 and items * (2 * self.rows // rows) <= (
            WARPGROUPS * self.workers
        ):
            rows //= 2
        return rows

    @property
    def items(self) -> int:
        """Pieces of work in which units of shared columns are finished."""
        if self.direct:
            return 0
        each = 1 if self.pairs else UNIT
        return self.shared_units * each * (self.rows // self.item_rows)

    def item(self, index: Any) -> tuple[Any, Any, Any]:
        """Which shared unit an item finishes, from which group of it, and which row.

        Example:
            >>> stage = Stage(weight="out", source="x", k=128, n=256, epilogue="add",
            ...               rows=16, workers=4)
            >>> stage.items, stage.item_rows, stage.item(5)
            (8, 8, (1, 0, 8))
        """
        row_pieces = self.rows // self.item_rows
        group = quotient(index, row_pieces)
        row = (index - group * row_pieces) * self.item_rows
        if self.pairs:
            return group, 0, row
        unit = quotient(group, UNIT)
        return unit, group - unit * UNIT, row

    @property
    def finished(self) -> int:
        """How often a stage is signalled until all its features are there."""
        alone = self.units if self.direct else self.units - self.shared_units
        return alone + self.items


def _where(condition: bool, a: Any, b: Any) -> Any:
    return a if condition else b


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A problem cut by a config for a device."""

    problem: Problem
    config: DecodeLayerConfig
    device: DeviceSpec

    @property
    def tile_k(self) -> int:
        """Input features of a tile of a weight."""
        return self.config.tile_k or (128 if self.problem.narrow else 64)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The table: a stage multiplies what the units of the one before made."""
        p = self.problem
        cut: Any = {
            "tile_k": self.tile_k,
            "workers": self.workers,
            "rows": p.rows,
        }
        heads = p.heads + 2 * p.kv_heads

        def depth(number: int, k: int) -> dict[str, Any]:
            if not p.kept:
                return {"k": k}
            kept = p.kept[number]
            return {"k": max(part.room for part in kept), "kept": kept}

        found = [
            Stage(
                weight="out",
                source="attended",
                n=p.d_model,
                epilogue="add",
                over_devices=0 if p.devices > 1 else None,
                **depth(0, p.features),
                **cut,
            ),
            Stage(
                weight="gate_up",
                source="normed_0",
                n=2 * p.d_ff,
                epilogue="swiglu",
                norm=0,
                half=p.d_ff // GROUP,
                **depth(1, p.d_model),
                **cut,
            ),
            Stage(
                weight="down",
                source="hidden",
                n=p.d_model,
                epilogue="add",
                over_devices=1 if p.devices > 1 else None,
                **depth(2, p.d_ff),
                **cut,
            ),
        ]
        if p.projects:
            qkv = Stage(
                weight="qkv",
                source="normed_1",
                n=heads * p.head_dim,
                epilogue="rotate",
                norm=1,
                half=p.head_dim // (2 * GROUP),
                **depth(3, p.d_model),
                **cut,
            )
            found.append(qkv)
        return tuple(found)

    @property
    def workers(self) -> int:
        """Blocks, all of which run at once: they wait for each other."""
        return self.device.num_sms

    @property
    def first_units(self) -> list[int]:
        """Which of all shared units is the first of each stage; their number."""
        units = (stage.shared_units for stage in self.stages)
        return list(itertools.accumulate(units, initial=0))

    @property
    def of_splits(self) -> int:
        """The first counter of attention, after one for each shared unit, each stage
        and each of two norms.
        """
        return self.first_units[-1] + len(self.stages) + 2

    @property
    def counters(self) -> int:
        """How many there are; of attention one for each half of each row and head, and
        one for all.
        """
        c, halves = self.problem.cached, 0
        if c is not None:
            halves = 1 + WARPGROUPS * self.problem.m * c.kv_heads
        return self.of_splits + halves

    @property
    def most_parts(self) -> int:
        """Parts of the stage that has most of them: stages share their memory.

        Who stores a part multiplies what all have made of the parts before.
        """
        if self.problem.kept:  # places for a pair of tiles
            tiles = max(stage.sparse_tiles for stage in self.stages)
            return WARPGROUPS * (-(-tiles // 2) + self.workers)
        return max(stage.shared_units * stage.parts for stage in self.stages)

    @property
    def activation_slots(self) -> int:
        """Tiles of activations in flight."""
        rows = self.problem.rows
        # So many that six tiles of weights have room beside them, up to 32 requests.
        if self.problem.kept:  # two tiles of each
            default = max(2, min(8, 96 // rows))
        elif self.problem.narrow:  # whose tiles are larger
            default = 4 if rows <= 24 else 3
        elif self.problem.cached and 24 < rows <= 32:
            default = 5
        else:
            default = 8 if rows <= 24 else 7 if rows <= 32 else 5
        return self.config.activation_slots or default

    @property
    def fixed_bytes(self) -> int:
        """Shared memory besides the ring of weights."""
        rows = self.problem.rows
        tiles = 2 if self.problem.kept else 1
        slot = smem_bytes((tiles, rows, self.tile_k), jnp.bfloat16)
        attention = 0 if self.problem.cached is None else 7168
        return self.activation_slots * slot + 4096 + attention

    @property
    def slot_bytes(self) -> int:
        """Shared memory of a tile of weights."""
        return smem_bytes((TILE_GROUPS, self.tile_k, GROUP), self.problem.weight_dtype)

    @property
    def weight_slots(self) -> int:
        """Tiles of weights in flight."""
        room = (self.device.smem_bytes - self.fixed_bytes) // self.slot_bytes
        return self.config.weight_slots or max(2, room)
