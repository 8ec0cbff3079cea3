"""Tiling of an fp8 matmul: the problem, the config, and its choice.

Axis letters: M rows, K contraction, N columns.
"""

import dataclasses

from pallas_kernels.matmul import config as matmul_config
from pallas_kernels.matmul.config import MatmulConfig, Problem
from pallas_kernels.mosaic import DeviceSpec


DEPTH = 128
"""Products that the tensor cores accumulate before the sum is promoted to fp32
registers: one line of shared memory, and a stage of the ring."""

REGISTERS = 192
"""Registers of a consumer thread, for sums and the output of the tensor cores."""


def promoted_columns(block: tuple[int, int]) -> list[slice] | None:
    """Split the columns of a consumer's part into those that are promoted together.

    Args:
        block: rows and columns of the part.

    Returns:
        The fewest parts of equal width such that the sums of all columns and the tensor
        cores' sums of one part fit in registers; None if not even 64 columns do.

    Example:
        >>> [len(promoted_columns((64, columns))) for columns in (128, 192, 256)]
        [1, 1, 2]
    """
    rows, columns = block
    for parts in range(1, columns // 64 + 1):
        width = columns // parts
        registers = rows * (columns + width) // 128
        if columns % parts == 0 and width % 64 == 0 and registers <= REGISTERS:
            return [slice(i, i + width) for i in range(0, columns, width)]
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledMatmulConfig(MatmulConfig):
    """Tiling of an fp8 matmul in the kernel."""

    tile_k: int = DEPTH
    """Depth of one pipeline stage: 128."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile_k != DEPTH:
            raise ValueError(f"tile_k {self.tile_k}, expected {DEPTH}")
        if promoted_columns(self.block) is None:
            raise ValueError(
                f"tile_m {self.tile_m} x tile_n {self.tile_n}, expected smaller ones:"
                " sums of a consumer and of the tensor cores do not fit in the"
                f" {REGISTERS} registers of a thread"
            )

    @property
    def product_columns(self) -> list[slice]:
        """Columns of a consumer's part, in parts that are promoted together."""
        return promoted_columns(self.block) or []

    @property
    def scales_blocks(self) -> bool:
        """Scales of blocks fit in registers: of 64 x 128 at most, in one square.

        Beside 64 registers for sums there are 64 for those of a stage, and 64 for those
        of the next one or 34 for each of two stages' scales. Wider ones spill.
        """
        rows, columns = self.block
        return rows * columns <= 64 * DEPTH and columns <= DEPTH


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledProblem(Problem):
    """An fp8 matmul ``[M,K] x [N,K]^T -> [M,N]``."""

    rhs_transposed: bool = True
    blocks: bool = False
    """Operands have scales of blocks of `DEPTH` numbers of a row."""

    @property
    def key(self) -> str:
        """Key in the tables of tuned configs, see `Problem.key`."""
        return super().key + (" blocks" if self.blocks else "")

    def cut(self, device: DeviceSpec) -> ScaledMatmulConfig:
        """The config of an untuned problem."""
        return heuristic(self, device)


# As for 16 bits, but for the widest: beside the sums there are those of the tensor
# cores. A line of shared memory holds twice as many numbers.
_TILES = (
    ScaledMatmulConfig(tile_m=128, tile_n=256, stages=4, store_slots=2),
    ScaledMatmulConfig(tile_m=128, tile_n=192, stages=4, store_slots=3),
    ScaledMatmulConfig(tile_m=128, tile_n=128, stages=6, store_slots=2),
    ScaledMatmulConfig(tile_m=64, tile_n=256, stages=4, store_slots=2, split="n"),
    ScaledMatmulConfig(tile_m=128, tile_n=64, stages=8, store_slots=1),
    ScaledMatmulConfig(tile_m=64, tile_n=128, stages=8, store_slots=1, split="n"),
)


def _tiles(problem: ScaledProblem) -> list[ScaledMatmulConfig]:
    return [tile for tile in _TILES if not problem.blocks or tile.scales_blocks]


def heuristic(problem: ScaledProblem, device: DeviceSpec) -> ScaledMatmulConfig:
    """The config of a problem that was never tuned."""
    return matmul_config.heuristic(problem, device, _tiles(problem))


def candidates(
    problem: ScaledProblem, device: DeviceSpec
) -> tuple[ScaledMatmulConfig, ...]:
    """Configs for the tuner."""
    return matmul_config.candidates(problem, device, _tiles(problem))
