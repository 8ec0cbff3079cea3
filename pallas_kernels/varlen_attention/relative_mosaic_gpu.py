"""Relative-position bias in a Hopper kernel.

The scores of a tile lie in registers; the terms that they read lie on diagonals of two
boxes that the copy engine brings to shared memory: rows of the tile's queries and of
its keys, and of each row the entries that distances of the tile take, a contiguous
range (`relative`). Each lane reads, for each of its scores, the entry of the distance
from a table and then one number of each box.

Lines of a box are an odd multiple of 16 bytes, so the 8 rows and 4 pairs of columns
that a warp reads at a time lie in different banks.

Axes: R rows of the batch, T packed queries, S packed keys, N query heads, P entries.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.varlen_attention.relative import RelativeBuckets


TABLE_COLUMNS = 256
"""Columns of the table of entries: the widest box that the copy engine takes."""

_ALIGNMENT = 8
"""Entries of 16 bytes, of which the copy engine moves whole ones."""


@dataclasses.dataclass(frozen=True)
class TileTerms:
    """The terms of a block of `parts` times `rows` queries and `keys` keys."""

    buckets: RelativeBuckets
    """Entry for each distance."""
    by_query: bool
    """True where there are query terms."""
    by_key: bool
    """True where there are key terms."""
    rows: int
    """Queries of a warpgroup."""
    parts: int
    """Warpgroups, which share the keys."""
    keys: int
    """Keys of a step."""

    @property
    def num_entries(self) -> int:
        """P, padded to whole lines."""
        return -(-self.buckets.num_entries // _ALIGNMENT) * _ALIGNMENT

    @classmethod
    def of(
        cls,
        bias: tuple[RelativeBuckets, bool, bool] | None,
        rows: int,
        parts: int,
        keys: int,
    ) -> "TileTerms | None":
        """The terms of a bias with these buckets, by query or not, by key or not."""
        return None if bias is None else cls(*bias, rows, parts, keys)

    @property
    def query_width(self) -> int:
        """Entries of a box of query terms."""
        return self._width(self.rows)

    @property
    def key_width(self) -> int:
        """Entries of a box of key terms, which all warpgroups read."""
        return self._width(self.rows * self.parts)

    def _width(self, queries: int) -> int:
        distances = queries + self.keys - 1
        # An odd number of 16 bytes, for the banks; one of them for `first_entry`.
        width = -(-distances // (2 * _ALIGNMENT)) * 2 * _ALIGNMENT + _ALIGNMENT
        return min(width, self.num_entries)

    @property
    def reach(self) -> int:
        """The largest distance in the table."""
        return self._limit + self.rows * self.parts + self.keys

    @property
    def _limit(self) -> int:
        """The distance from which on all take the last entry."""
        return len(self.buckets.table()) // 2

    def table(self) -> np.ndarray:
        """Entries of the distances ``-reach, -reach + 1, ...``, in lines."""
        size = 2 * self.reach + 1
        lines = -(-size // TABLE_COLUMNS)
        distances = np.arange(lines * TABLE_COLUMNS) - self.reach
        return self.buckets.entry(distances).reshape(lines, TABLE_COLUMNS)

    def base(self, first_query: Scalar, first_key: Scalar) -> Any:
        """Distance of the first query and key of a block, no farther than it matters.

        Beyond the reach of the table all distances of the block take the last entry.
        """
        low, high = -(self._limit + self.rows * self.parts), self._limit + self.keys
        return jnp.clip(first_query - first_key, low, high)

    def first_entry(self, table: Ref, base: Scalar, width: int) -> Any:
        """The first entry of the box whose smallest distance is ``base - keys + 1``.

        A box starts at whole lines of 16 bytes too; it is wide enough for that.

        Args:
            table: the table in global memory.
            base: distance of the first query and key that read the box.
            width: of the box.
        """
        index = base - (self.keys - 1) + self.reach
        line, column = lax.div(index, TABLE_COLUMNS), lax.rem(index, TABLE_COLUMNS)
        first = jnp.minimum(table[line, column], self.num_entries - width)
        return first - lax.rem(first, _ALIGNMENT)

    # --- shared memory ----------------------------------------------------------------

    def smem(self, stages: int, itemsize: int) -> int:
        """Bytes of shared memory that `scratch` takes."""
        queries = self.by_query * self.parts * self.rows * self.query_width
        keys = self.by_key * self.keys * self.key_width
        return stages * (queries + keys) * itemsize + self.table().nbytes

    def scratch(self, stages: int, dtype: Any) -> dict[str, Any]:
        """Buffers and barriers of a kernel: the table, and the boxes of some steps."""
        boxes = {}
        if self.by_query:
            shape = (stages, self.parts, self.rows, self.query_width)
            boxes["query_terms_smem"] = plgpu.SMEM(shape, dtype)
        if self.by_key:
            boxes["key_terms_smem"] = plgpu.SMEM(
                (stages, self.keys, self.key_width), dtype
            )
        copies = self.parts * self.by_query + self.by_key
        return boxes | {
            "entries_smem": plgpu.SMEM(self.table().shape, jnp.int32),
            "entries_full": plgpu.Barrier(num_arrivals=1),
            "terms_full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            "terms_empty": plgpu.Barrier(num_arrivals=self.parts, num_barriers=stages),
        }

    def load(
        self,
        scratch: dict[str, Ref],
        stage: Scalar,
        arrays: tuple[Ref, ...],
        place: tuple[Scalar, Scalar],
        first_query: Scalar,
        first_key: Scalar,
    ) -> None:
        """Copies the boxes of a step, once the stage is empty.

        Args:
            scratch: what `scratch` made.
            stage: of the ring.
            arrays: the table, [R, T, N, P] and [R, S, N, P] if present, in global
                memory.
            place: (row of the batch, query head).
            first_query: of the block.
            first_key: of the step.
        """
        row, head = place
        table, remaining = arrays[0], iter(arrays[1:])
        base = self.base(first_query, first_key)
        full = scratch["terms_full"].at[stage]
        plgpu.barrier_wait(scratch["terms_empty"].at[stage])
        if self.by_query:
            terms = next(remaining)
            for part in range(self.parts):
                first = self.first_entry(
                    table, base + part * self.rows, self.query_width
                )
                rows = pl.ds(first_query + part * self.rows, self.rows)
                box = terms.at[row, rows, head, pl.ds(first, self.query_width)]
                plgpu.copy_gmem_to_smem(
                    box, scratch["query_terms_smem"].at[stage, part], full
                )
        if self.by_key:
            first = self.first_entry(table, base, self.key_width)
            rows, columns = pl.ds(first_key, self.keys), pl.ds(first, self.key_width)
            box = next(remaining).at[row, rows, head, columns]
            plgpu.copy_gmem_to_smem(box, scratch["key_terms_smem"].at[stage], full)

    def add_step(
        self,
        products: jax.Array,
        scratch: dict[str, Ref],
        stage: Scalar,
        part: Scalar,
        first_query: Scalar,
        first_key: Scalar,
    ) -> jax.Array:
        """`add` of a step, once its boxes are there; then hands them back."""
        plgpu.barrier_wait(scratch["terms_full"].at[stage])
        query_box = key_box = None
        if self.by_query:
            query_box = scratch["query_terms_smem"].at[stage, part]
        if self.by_key:
            key_box = scratch["key_terms_smem"].at[stage]
        base = self.base(first_query, first_key)
        sums = self.add(
            products, base, part, scratch["entries_smem"], query_box, key_box
        )
        plgpu.commit_smem()  # reads come before the copies that overwrite the boxes
        plgpu.barrier_arrive(scratch["terms_empty"].at[stage])
        return sums

    def add(
        self,
        products: jax.Array,
        base: Scalar,
        part: Scalar,
        table: Ref,
        query_box: Any,
        key_box: Any,
    ) -> jax.Array:
        """Adds to each score of a warpgroup the terms that it reads.

        Args:
            products: [rows, keys], fp32, in the layout of wgmma accumulators.
            base: `base` of the block.
            part: which warpgroup of the block.
            table: the table in shared memory.
            query_box: [rows, query_width] of shared memory, if `by_query`.
            key_box: [keys, key_width] of shared memory, if `by_key`.
        """
        layout, scalar = plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT(())
        boxes = tuple(box for box in (query_box, key_box) if box is not None)
        reference = plgpu.RefType()
        terms = self

        @plgpu.inline_mgpu(
            arg_types=(
                layout,
                scalar,
                scalar,
                reference,
                tuple(reference for _ in boxes),
            ),
            return_type=plgpu.ShapeDtypeStruct(
                products.shape, jnp.float32, layout=layout
            ),
        )
        def add_diagonals(
            ctx: Any,
            products: Any,
            base: Scalar,
            part: Scalar,
            table: Ref,
            boxes: Any,
        ) -> Any:
            del ctx
            base, part = base.registers.item(), part.registers.item()
            return _add_diagonals(terms, products, base, part, table, boxes)

        return add_diagonals(  # without the context, which pallas adds
            products,
            jnp.int32(base),
            jnp.int32(part),
            table,
            boxes,  # pyright: ignore[reportCallIssue]
        )


def _add_diagonals(
    terms: TileTerms,
    products: Any,
    base: ir.Value,
    part: ir.Value,
    table: ir.Value,
    boxes: tuple[ir.Value, ...],
) -> Any:
    """Emits the reads and additions of one lane."""
    i32, index, f32 = (
        ir.IntegerType.get_signless(32),
        ir.IndexType.get(),
        ir.F32Type.get(),
    )

    def constant(value: int) -> ir.Value:
        return arith.constant(i32, value)

    def entry(place: ir.Value) -> ir.Value:
        """The table at a place, counted along its lines."""
        line = arith.shrui(place, constant(TABLE_COLUMNS.bit_length() - 1))
        column = arith.andi(place, constant(TABLE_COLUMNS - 1))
        return memref.load(table, [arith.index_cast(index, x) for x in (line, column)])

    # Place in the table of the distance of the block's first query and first key, and
    # of this warpgroup's.
    block = arith.addi(base, constant(terms.reach))
    mine = arith.addi(block, arith.muli(part, constant(terms.rows)))
    # (box, its axis of rows, its first entry)
    reads = []
    remaining = iter(boxes)
    for present, axis, first, width in (
        (terms.by_query, 0, mine, terms.query_width),
        (terms.by_key, 1, block, terms.key_width),
    ):
        if present:
            smallest = entry(arith.subi(first, constant(terms.keys - 1)))
            limit = constant(terms.num_entries - width)
            first = arith.andi(arith.minsi(smallest, limit), constant(-_ALIGNMENT))
            reads.append((next(remaining), axis, first))

    def add(value: ir.Value, place: tuple[ir.Value, ...]) -> ir.Value:
        row, column = (arith.index_cast(i32, x) for x in place)
        at = entry(arith.addi(mine, arith.subi(row, column)))
        for box, axis, first in reads:
            within = arith.index_cast(index, arith.subi(at, first))
            term = memref.load(box, [place[axis], within])
            value = arith.addf(value, arith.extf(f32, term))
        return value

    return products.foreach(add, create_array=True, is_signed=None)
