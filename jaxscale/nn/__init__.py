"""Neural network modules, and the packing of sequences that they run on."""

from jaxscale.nn.packing import (
    PackedBatch,
    assign_rows,
    pack,
    pack_sequences,
    positions,
    unpack,
)


__all__ = [
    "PackedBatch",
    "assign_rows",
    "pack",
    "pack_sequences",
    "positions",
    "unpack",
]
