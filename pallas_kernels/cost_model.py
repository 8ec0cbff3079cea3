"""The cost model of all ops: throughput of a Hopper GPU per clock cycle.

Heuristics and the choice between a kernel and XLA (`tuned_configs.declines`) count in
clock cycles of one multiprocessor. Constants of a single op are in its ``config.py``;
shared ones are here. All numbers were measured on an H200, to a few percent.
"""

from pallas_kernels.mosaic import DeviceSpec


TENSOR_CORE = 2048
"""Multiply-adds of 16-bit operands per cycle."""
L2_BANDWIDTH = 48
"""Bytes per cycle from the L2 cache to one multiprocessor."""
HBM_BANDWIDTH = 2300
"""Bytes per cycle from memory to all multiprocessors."""
TILE_OVERHEAD = 2000
"""Cycles to fill the ring of a matmul once and to store a tile."""
LEAST_BUSY = 0.83
"""Fraction of the GPU that whole tiles must keep busy; below, cuBLAS wins, which also
has split-K."""
NOISE = 0.02
"""Noise of measured times between runs."""


def waves(tiles: int, device: DeviceSpec) -> int:
    """Number of waves: rounds in which all multiprocessors take a tile."""
    return -(-tiles // device.num_sms)


def step_cycles(
    rows: float, columns: float, nbytes: float, tensor_core: float = TENSOR_CORE
) -> float:
    """Cycles per contracted index of a tile: bound by tensor cores or the L2.

    Args:
        rows: rows of the tile.
        columns: columns of the tile.
        nbytes: bytes read per index.
        tensor_core: multiply-adds per cycle.

    Example:
        >>> step_cycles(128, 256, 2 * (128 + 256))
        16.0
    """
    return max(rows * columns / tensor_core, nbytes / L2_BANDWIDTH)


def busy_share(results: int, tiles: int, tile_area: int, device: DeviceSpec) -> float:
    """Fraction of the GPU with useful work, in whole waves of tiles."""
    return results / (waves(tiles, device) * device.num_sms * tile_area)
