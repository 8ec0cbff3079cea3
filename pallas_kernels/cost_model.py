"""The cost model of all ops: what a Hopper GPU does in a clock cycle.

Heuristics and the choice between a kernel and XLA (`tuned_configs.declines`) count in
clock cycles of one multiprocessor. What is particular to one op stands in its
``config.py``; what ops share stands here once. All numbers were measured on an H200, to
a few percent.
"""

from pallas_kernels.mosaic import DeviceSpec


__all__ = [
    "HBM_BANDWIDTH",
    "L2_BANDWIDTH",
    "LEAST_BUSY",
    "NOISE",
    "TENSOR_CORE",
    "TILE_OVERHEAD",
    "busy_share",
    "step_cycles",
    "waves",
]

TENSOR_CORE = 2048
"""Multiply-adds of 16-bit operands a cycle."""
L2_BANDWIDTH = 48
"""Bytes a cycle from the L2 cache to one multiprocessor."""
HBM_BANDWIDTH = 2300
"""Bytes a cycle from memory to all multiprocessors."""
TILE_OVERHEAD = 2000
"""Cycles to fill the ring of a matrix product once and to store a tile."""
LEAST_BUSY = 0.83
"""Share of the GPU that whole tiles must keep busy; below, cuBLAS wins, which also
splits the sums."""
NOISE = 0.02
"""Measured times differ by as much from run to run."""


def waves(tiles: int, device: DeviceSpec) -> int:
    """Number of waves: rounds in which all multiprocessors take a tile."""
    return -(-tiles // device.num_sms)


def step_cycles(
    rows: float, columns: float, nbytes: float, tensor_core: float = TENSOR_CORE
) -> float:
    """Cycles of one index of the sums of a tile: tensor cores or the L2 are the bound.

    Args:
        rows: of the tile.
        columns: of the tile.
        nbytes: what is read for it.
        tensor_core: multiply-adds a cycle.

    Example:
        >>> step_cycles(128, 256, 2 * (128 + 256))
        16.0
    """
    return max(rows * columns / tensor_core, nbytes / L2_BANDWIDTH)


def busy_share(results: int, tiles: int, tile_area: int, device: DeviceSpec) -> float:
    """Share of the GPU that has results to compute, in whole waves of tiles."""
    return results / (waves(tiles, device) * device.num_sms * tile_area)
