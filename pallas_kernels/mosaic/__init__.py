"""Parts that the Mosaic GPU kernels share.

`device` is the device that a kernel is built for, `tile_scheduler` which tile a block
computes, `copies` shared memory and what fills it, `chunked_matmul` matmuls of what
lies there in chunks, `lanes` what lanes do with registers (masks, rows, columns,
votes), `pipeline` the roles of warpgroups and the ring between them, `manual_axes` the
marks of `jax.shard_map`, `aliases` names for what Pallas gives no type to,
`layout_order` makes JAX's layout inference faster, `kept_modules` keeps what JAX makes
of a kernel for the next program, and `kernels_ahead` compiles kernels in threads.
"""

from pallas_kernels.mosaic import layout_order
from pallas_kernels.mosaic.copies import smem_bytes, smem_transforms
from pallas_kernels.mosaic.device import (
    H200,
    DeviceSpec,
    check_hopper,
    check_smem,
    resident_clusters,
    use_device,
)
from pallas_kernels.mosaic.kept_modules import keep_modules
from pallas_kernels.mosaic.kernels_ahead import compile_ahead
from pallas_kernels.mosaic.manual_axes import (
    as_varying,
    keep_mark,
    unmarked,
    vary_alike,
    varying,
)
from pallas_kernels.mosaic.tile_scheduler import largest_divisor, snake_order


layout_order.install()

__all__ = [
    "H200",
    "DeviceSpec",
    "as_varying",
    "check_hopper",
    "check_smem",
    "compile_ahead",
    "keep_mark",
    "keep_modules",
    "largest_divisor",
    "resident_clusters",
    "smem_bytes",
    "smem_transforms",
    "snake_order",
    "unmarked",
    "use_device",
    "vary_alike",
    "varying",
]
