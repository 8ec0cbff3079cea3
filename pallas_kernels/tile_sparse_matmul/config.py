"""Tiling of a tile-sparse matmul: the problem, the config, and its choice.

Axes: M tokens, K input features, N packed output features, P row capacity of a tile, G
columns of a tile.
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cost_model import HBM_BANDWIDTH, TENSOR_CORE, step_cycles
from pallas_kernels.matmul.config import CONSUMERS, MatmulConfig
from pallas_kernels.matmul.config import Problem as MatmulProblem
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.tile_sparse_matmul.format import STEP, TileSparse
from pallas_kernels.tile_sparse_matmul.format_24 import TileSparse24


FEW_TOKENS = 64
"""Tokens that fit into the smallest block: decode."""
TILES = (64, 128, 256)
"""Tile sizes that the kernel takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileSparseConfig:
    """The tiling of a tile-sparse matmul on Hopper."""

    block_tokens: int = 256
    """Tokens of an output block: 64, 128 or 256; its features are those of a tile."""
    stages: int = 4
    """Stages of the ring between producer and consumers."""
    lag: int = 2
    """Steps that a gather may be in flight; at most ``stages - 2``."""
    ahead: int = 1
    """Steps whose indices are prefetched at a time; fewer if that does not divide the
    steps of equal blocks. Long steps hide the latency of memory with one, short ones
    need several."""
    cluster: Literal[1, 2] = 1
    """Neighboring blocks along the tokens that load the weight once and share it."""
    group: int = 4
    """Clusters along the tokens in a band: all tiles of a band run before the next."""
    splits: int = 1
    """Split-K: parts of the rows of a tile, which XLA adds up."""
    store_slots: int = 2
    """Buffers through which a consumer stores its part of the output."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not isinstance(value := getattr(self, field.name), int) or value < 1:
                raise ValueError(
                    f"{field.name} {value!r}, expected an integer of at least 1"
                )
        if self.block_tokens not in (64, 128, 256):
            raise ValueError(
                f"block_tokens {self.block_tokens}, expected 64, 128 or 256"
            )
        if self.cluster > 2:
            raise ValueError(f"cluster {self.cluster}, expected 1 or 2")
        if self.stages < self.lag + 2:
            raise ValueError(
                f"stages {self.stages} with lag {self.lag}: expected at least"
                f" {self.lag + 2}, or producer and consumers wait for each other"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradConfig:
    """The tiling of the gradient of the values on Hopper."""

    block_rows: int = 128
    """Kept rows of an output block: 64, 128 or 256; its features are those of a
    tile."""
    stages: int = 6
    """Stages of the ring between producers and consumers."""
    lag: int = 3
    """Steps that a gather may be in flight; at most ``stages - 2``."""
    cluster: int = 1
    """Neighboring blocks along the rows that load the gradient of the output once and
    share it: 1 or 2."""

    def __post_init__(self) -> None:
        if self.block_rows not in (64, 128, 256):
            raise ValueError(f"block_rows {self.block_rows}, expected 64, 128 or 256")
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster {self.cluster}, expected 1 or 2")
        if self.lag < 1 or self.stages < self.lag + 2:
            raise ValueError(
                f"stages {self.stages} with lag {self.lag}: expected a lag of at least"
                f" 1 and at least {self.lag + 2} stages"
            )

    @classmethod
    def of(cls, problem: "Problem") -> "GradConfig":
        """The largest block whose sums leave registers for two producers."""
        rows = 64 if problem.tile == 256 else 128
        stages = min(196_608 // (128 * (rows + problem.tile)), 8)
        return cls(block_rows=rows, stages=stages, lag=min(stages - 2, 3))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One tile-sparse matmul and how its operands are stored."""

    m: int
    """Tokens."""
    n: int
    """Packed output features."""
    k: int
    """Input features."""
    room: int
    """Row capacity of a tile; for full tiles, the rows that a tile multiplies."""
    tile: int
    """Columns of a tile."""
    granularity: int
    """Rows are kept in aligned groups of this size."""
    dtype: jnp.dtype
    """Type of all operands: bfloat16 or float16."""
    x_major: bool
    """The input is stored feature by feature."""
    y_major: bool
    """The output is stored feature by feature."""
    steps: int | None = None
    """Steps of 64 rows that all tiles together take; None if unknown."""
    two_of_four: bool = False
    """The weight is a `TileSparse24`."""

    @classmethod
    def of(
        cls,
        x: Any,
        w: TileSparse | TileSparse24,
        feature_major: tuple[bool, bool],
    ) -> "Problem":
        """The problem of activations (or their shape) and a weight."""
        x_major, y_major = feature_major
        two_of_four = isinstance(w, TileSparse24)
        if isinstance(w, TileSparse24):
            w = w.abstract
        return cls(
            m=x.shape[1 if x_major else 0],
            n=w.packed_columns,
            k=w.shape[0],
            room=w.room,
            steps=w.steps,
            tile=w.tile,
            granularity=w.granularity,
            dtype=jnp.dtype(x.dtype),
            x_major=x_major,
            y_major=y_major,
            two_of_four=two_of_four,
        )

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return -(-self.n // self.tile)

    @property
    def mean_rows(self) -> float:
        """Mean rows per tile; the capacity if unknown."""
        return self.room if self.steps is None else STEP * self.steps / self.tiles

    @property
    def stored_share(self) -> float:
        """Bytes of the weights in a row, over two of each column; with metadata."""
        return 9 / 16 if self.two_of_four else 1

    @property
    def gathers(self) -> bool:
        """True if single rows are gathered; otherwise TMA copies whole groups."""
        return self.granularity < STEP or (self.x_major and self.m % STEP > 0)

    @property
    def key(self) -> str:
        """Key in the tables of tuned configs."""
        short = {"bfloat16": "bf16", "float16": "f16"}
        majors = "".join(
            "f" if major else "t" for major in (self.x_major, self.y_major)
        )
        return (
            f"m={self.m} n={self.n} k={self.k} room={self.room} tile={self.tile}"
            f" granularity={self.granularity}"
            f" {short.get(self.dtype.name, self.dtype.name)} {majors}"
            + (" 2:4" if self.two_of_four else "")
        )

    def declines(self, device: DeviceSpec) -> str | None:
        """Say why a dense matmul of the unpacked weight should be faster, or None.

        Unpacking costs reading the packed weight and writing the dense one, so this is
        rare. A layer that is known to stay this full should be kept dense.

        Example:
            >>> from pallas_kernels.mosaic import H200
            >>> full = Problem(m=8192, n=4096, k=4096, room=4096, tile=128,
            ...                granularity=1, dtype=jnp.dtype("bfloat16"),
            ...                x_major=True, y_major=True)
            >>> full.declines(H200) is None
            False
            >>> dataclasses.replace(full, room=2048).declines(H200) is None
            True

            Uneven tiles that take half of the steps, the fullest with all rows:

            >>> dataclasses.replace(full, steps=32 * 32).declines(H200) is None
            True
        """
        if 0 in (self.m, self.n, self.k):
            return "the product is empty"
        dense = max(
            self.m * self.n * self.k / (TENSOR_CORE * device.num_sms),
            2 * self.k * self.n / HBM_BANDWIDTH,
        )
        dense += 2 * self.n * (self.room + 2 * self.k) / HBM_BANDWIDTH + _SPLIT_OVERHEAD
        sparse = _cost(self, heuristic(self, device), device)
        if dense >= sparse:
            return None
        kept = f"with {self.mean_rows / self.k:.0%} of the rows kept"
        return f"a dense product takes {dense / sparse:.2f} of the time, {kept}"

    def matmul(
        self, config: TileSparseConfig, out_dtype: DTypeLike
    ) -> tuple[MatmulProblem, MatmulConfig]:
        """The tiling as that of a matmul, whose building blocks the kernel uses.

        A feature-major output is the matmul of the transposed weight and x, a
        token-major one that of x and the weight.
        """
        x_is_k_major = self.gathers or self.x_major
        shared: dict[str, Any] = {
            "k": self.room,
            "dtype": self.dtype,
            "out_dtype": jnp.dtype(out_dtype),
        }
        clustered = config.cluster > 1
        if self.y_major:
            problem = MatmulProblem(
                m=config.splits * self.tiles * self.tile,
                n=self.m,
                lhs_transposed=not self.two_of_four,
                rhs_transposed=not x_is_k_major,
                **shared,
            )
            tile_m, tile_n, cluster = self.tile, config.block_tokens, "n"
        else:
            problem = MatmulProblem(
                m=self.m,
                n=config.splits * self.tiles * self.tile,
                lhs_transposed=x_is_k_major,
                rhs_transposed=False,
                **shared,
            )
            tile_m, tile_n, cluster = config.block_tokens, self.tile, "m"
        return problem, MatmulConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=STEP,
            stages=config.stages,
            split="m" if tile_m >= 64 * CONSUMERS else "n",
            cluster=cluster if clustered else "none",
            store_slots=config.store_slots,
        )


def _fits(problem: Problem, block_tokens: int) -> bool:
    """Return whether two consumers can share the block and its sums."""
    area = block_tokens * problem.tile
    return 64 * 128 <= area <= CONSUMERS * 64 * 256


def heuristic(problem: Problem, device: DeviceSpec) -> TileSparseConfig:
    """The config of a problem that was never tuned.

    Returns:
        The largest block that keeps the multiprocessors busy; for few tokens, the rows
        of a tile are split over multiprocessors. No clusters: in first trials on an
        H200 synchronizing the blocks cost more than sharing the weights saved.

    Example:
        >>> from pallas_kernels.mosaic import H200
        >>> big = Problem(m=4096, n=4096, k=4096, room=1024, tile=128, granularity=1,
        ...               dtype=jnp.dtype("bfloat16"), x_major=True, y_major=True)
        >>> heuristic(big, H200).block_tokens
        256
    """
    alone = [c for c in _configs(problem, device) if c.cluster == 1]
    return min(alone, key=lambda config: _cost(problem, config, device))


# Clock cycles of a multiprocessor; from times at 4096 x 4096 x 4096 with 50% and 75%
# pruned in first trials on an H200: steps run at the rate of a dense matmul, the
# overhead per block is fixed.
_EFFICIENCY = 0.98  # of the tensor cores, relative to a dense matmul
_BLOCK_OVERHEAD = 4500  # filling the ring, storing the block
# From times of 1 and 32 tokens.
_SPLIT_OVERHEAD = 2000  # another kernel, which adds the parts
# From a trial of 2:4 alone, where all rows are kept and none is gathered.
_GAIN_24 = 1.4
_SATURATING = 0.5  # of the multiprocessors read as fast as all


def _cost(problem: Problem, config: TileSparseConfig, device: DeviceSpec) -> float:
    """Estimated cycles: waves of blocks, each bound by tensor cores or L2 traffic."""
    p, c = problem, config
    blocks = -(-p.m // (c.block_tokens * c.cluster)) * p.tiles * c.splits
    waves = -(-blocks // (device.num_sms // c.cluster))
    stored = p.tile * p.stored_share
    bytes_moved = 2 * (min(c.block_tokens, -(-p.m // 8) * 8) + stored / c.cluster)
    rate = _EFFICIENCY * TENSOR_CORE * (_GAIN_24 if p.two_of_four else 1)
    step = step_cycles(c.block_tokens, p.tile, bytes_moved, rate)
    # The fullest tile alone takes as long as all its rows do.
    rows = max(waves * p.mean_rows, p.room)
    cycles = rows / c.splits * step + waves * _BLOCK_OVERHEAD
    weight = 2 * p.tiles * stored * p.mean_rows / HBM_BANDWIDTH
    busy = min(1.0, blocks * c.cluster / (_SATURATING * device.num_sms))
    return max(cycles, weight / busy) + _SPLIT_OVERHEAD * (c.splits > 1)


def _configs(problem: Problem, device: DeviceSpec) -> list[TileSparseConfig]:
    found = []
    for tokens in (256, 128, 64):
        if not _fits(problem, tokens):
            continue
        half = tokens // 2
        if half >= max(problem.m, 64) and _fits(problem, half):
            continue
        split_features = problem.y_major and problem.tile >= 128
        rows = problem.tile // 2 if split_features else tokens
        slots = 2 if problem.y_major and rows == 64 and tokens > 64 else 1
        # What fits into shared memory beside 32 KB of store buffers.
        space = 196_608
        if problem.two_of_four:  # short steps: more stages instead of store buffers
            rows = max(problem.tile // 2, 64)
            slots, space = 1, 228_352 - 256 * rows
        columns = tokens + problem.tile * problem.stored_share
        stages = min(space // int(128 * columns), 8)
        lag = min(stages - 2, {256: 2, 128: 4, 64: 6}[tokens])
        ahead = 1 if tokens > 64 else 8
        if problem.two_of_four:  # a step is over before memory answers
            ahead = max(ahead, 4)
        for cluster in (1, 2):
            if cluster * tokens >= 2 * problem.m and cluster > 1:
                continue
            base = TileSparseConfig(
                block_tokens=tokens,
                stages=stages,
                lag=lag,
                ahead=ahead,
                cluster=cluster,
                store_slots=slots,
            )
            found.append(base)
            if problem.m <= 128 and cluster == 1:
                steps = problem.room // STEP
                found += [
                    dataclasses.replace(base, splits=splits)
                    for splits in (2, 4, 8)
                    if splits <= steps // 2
                    and splits * problem.tiles <= 2 * device.num_sms
                ]
    return found


def candidates(problem: Problem, device: DeviceSpec) -> tuple[TileSparseConfig, ...]:
    """Configs for the tuner."""
    found = _configs(problem, device)
    best = heuristic(problem, device)
    if problem.m > 2 * best.block_tokens:
        found += [dataclasses.replace(best, group=group) for group in (2, 8)]
    if best.lag > 1:
        found.append(dataclasses.replace(best, lag=best.lag - 1))
    found += [dataclasses.replace(best, ahead=n) for n in (1, 4, 8)]
    return tuple(dict.fromkeys(found))
