"""Layout and tiling of a matmul: the problem, the config, and its choice.

Axis letters: M rows, K contraction, N columns.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cost_model import (
    LEAST_BUSY,
    TENSOR_CORE,
    TILE_OVERHEAD,
    busy_share,
    step_cycles,
    waves,
)
from pallas_kernels.mosaic import DeviceSpec


CONSUMERS = 2
"""Consumer warpgroups, which multiply; one more, the producer, loads their operands."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    """Tiling of a matmul in the kernel."""

    tile_m: int = 128
    """Rows of an output tile; a multiple of 64."""
    tile_n: int = 256
    """Columns of an output tile; a multiple of 64, at most 320."""
    tile_k: int = 64
    """Depth of one pipeline stage; a multiple of 64."""
    stages: int = 4
    """Stages of the ring between producer and consumers."""
    split: Literal["m", "n"] = "m"
    """Dimension along which the two consumers split an output tile."""
    cluster: Literal["none", "m", "n"] = "none"
    """Two neighboring blocks along this dimension form a cluster: they load their
    common operand once and multicast it (inside one GPU)."""
    minor: Literal["m", "n"] = "m"
    """Dimension cut into bands by the order of the tiles, see `snake_order`."""
    group: int = 8
    """Tiles (pairs, in a cluster) across one band."""
    store_slots: int = 2
    """Buffers through which a consumer stores its part of the output, 128 bytes
    wide."""

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "tile_k", "stages", "group", "store_slots"):
            if not isinstance(value := getattr(self, name), int):
                raise ValueError(f"{name} {value!r}, expected an integer")
        for name in ("tile_m", "tile_n", "tile_k"):
            value = getattr(self, name)
            if value < 64 or value % 64:
                raise ValueError(f"{name} {value}, expected a positive multiple of 64")
        if self.tile_n > 320:
            raise ValueError(
                f"tile_n {self.tile_n}, expected at most 320; use a larger tile_m"
            )
        for name, least in (("stages", 2), ("group", 1), ("store_slots", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} {value}, expected at least {least}")
        for name, known in (
            ("split", ("m", "n")),
            ("cluster", ("none", "m", "n")),
            ("minor", ("m", "n")),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} {value!r}, expected one of {known}")
        whole = getattr(self, f"tile_{self.split}")
        if whole % (64 * CONSUMERS):
            raise ValueError(
                f"tile_{self.split} {whole}, expected a multiple of {64 * CONSUMERS}"
                f" with split={self.split!r}; split along the other dimension"
            )
        if math.prod(self.block) > 64 * 320:
            raise ValueError(
                f"tile_m {self.tile_m} x tile_n {self.tile_n}, expected at most"
                f" {CONSUMERS} x 64 x 320: the sums of a consumer stay in registers"
            )

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of one consumer's part of an output tile."""
        if self.split == "m":
            return self.tile_m // CONSUMERS, self.tile_n
        return self.tile_m, self.tile_n // CONSUMERS

    @property
    def product_columns(self) -> list[slice]:
        """Columns of a consumer's part, split for instructions of at most 256."""
        columns = self.block[1]
        parts = -(-columns // 256)
        width = -(-columns // (64 * parts)) * 64
        return [slice(i, min(i + width, columns)) for i in range(0, columns, width)]

    @property
    def cluster_tiles(self) -> tuple[int, int]:
        """Output tiles of a cluster along m and n."""
        return 1 + (self.cluster == "m"), 1 + (self.cluster == "n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One matmul ``[M,K] x [K,N] -> [M,N]`` and how its operands are stored."""

    m: int
    """Rows of the output; any number."""
    n: int
    """Columns of the output."""
    k: int
    """Contracted dimension."""
    dtype: jnp.dtype
    """Type of both operands, bfloat16 or float16; of the left one only, if `rhs_dtype`
    is given."""
    out_dtype: jnp.dtype
    """Type of the output: that of the operands or float32."""
    rhs_dtype: jnp.dtype | None = None
    """Type of the right operand, if it differs: 8 bits, like the left."""
    lhs_transposed: bool = False
    """The left operand is stored as [K,M]."""
    rhs_transposed: bool = False
    """The right operand is stored as [N,K]."""

    @classmethod
    def of[P: "Problem"](
        cls: type[P],
        x: Any,
        w: Any,
        out_dtype: DTypeLike,
        lhs_transposed: bool = False,
        rhs_transposed: bool = False,
    ) -> P:
        """The problem of two arrays (or shapes with types)."""
        k, m = x.shape if lhs_transposed else x.shape[::-1]
        return cls(
            m=m,
            n=w.shape[0 if rhs_transposed else 1],
            k=k,
            dtype=jnp.dtype(x.dtype),
            out_dtype=jnp.dtype(out_dtype),
            rhs_dtype=None if w.dtype == x.dtype else jnp.dtype(w.dtype),
            lhs_transposed=lhs_transposed,
            rhs_transposed=rhs_transposed,
        )

    @property
    def key(self) -> str:
        """Key in the tables of tuned configs, as in ``m=4096 n=8192 k=4096 bf16``."""
        short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
        short |= {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
        dtype, out = (short.get(d.name, d.name) for d in (self.dtype, self.out_dtype))
        parts = [f"m={self.m} n={self.n} k={self.k} {dtype}"]
        if self.rhs_dtype is not None:
            parts.append(f"rhs={short.get(self.rhs_dtype.name, self.rhs_dtype.name)}")
        if self.out_dtype != self.dtype:
            parts.append(f"out={out}")
        if self.lhs_transposed:
            parts.append("lhs_transposed")
        if self.rhs_transposed:
            parts.append("rhs_transposed")
        return " ".join(parts)

    def cut(self, device: DeviceSpec) -> MatmulConfig:
        """The config of an untuned problem."""
        return heuristic(self, device)

    def declines(self, device: DeviceSpec) -> str | None:
        """Say why XLA is expected to be faster if nothing was measured, or None."""
        if 0 in (self.m, self.n, self.k):
            return "the product is empty"
        if self.m % 8:
            return f"m={self.m} is no multiple of 8, so its rows would be copied"
        best = self.cut(device)
        tiles = math.prod(_counts(self, best))
        area = best.tile_m * best.tile_n
        busy = busy_share(self.m * self.n, tiles, area, device)
        if busy < LEAST_BUSY:
            return (
                f"the best cut of m={self.m} n={self.n} keeps {busy:.0%} of the GPU"
                " busy, less than splitting sums"
            )
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseProblem:
    """Linear layers of the same input, computed by one kernel."""

    m: int
    """Rows of the input."""
    n: tuple[int, ...]
    """Output features of each layer."""

    @property
    def key(self) -> str:
        """Key in the tables of tuned configs, which have no such entries so far."""
        return f"m={self.m} n={'+'.join(map(str, self.n))}"

    def declines(self, device: DeviceSpec) -> str | None:
        """Say why XLA is expected to be faster if nothing was measured, or None."""
        # XLA launches a kernel or two per layer, each of 3 us or more. So one kernel
        # for all may leave much of the GPU idle, but not the rows of its tiles.
        if 4 * (self.m // 128) * (sum(self.n) // 64) < device.num_sms:
            return (
                f"{self.key} gives less than a quarter of the GPU a tile, and XLA"
                " splits the sums of small products"
            )
        return None


# Tiles worth considering, the largest first. A consumer's fp32 sums fill the registers
# at 128 x 320; smaller tiles need more traffic per multiplication but leave fewer
# multiprocessors idle when the output is small.
_TILES = (
    MatmulConfig(tile_m=128, tile_n=320, stages=3, store_slots=3),
    MatmulConfig(tile_m=128, tile_n=256, stages=4, store_slots=2),
    MatmulConfig(tile_m=128, tile_n=192, stages=4, store_slots=3),
    MatmulConfig(tile_m=128, tile_n=128, stages=6, store_slots=2),
    MatmulConfig(tile_m=64, tile_n=256, stages=4, store_slots=2, split="n"),
    MatmulConfig(tile_m=128, tile_n=64, stages=8, store_slots=1),
    MatmulConfig(tile_m=64, tile_n=128, stages=8, store_slots=1, split="n"),
)

_SECOND_PRODUCT = 1.05
"""Relative time if a stage takes two matmuls, and the ring is short (H200,
measured)."""


def _counts(problem: Problem, config: MatmulConfig) -> tuple[int, int]:
    return -(-problem.m // config.tile_m), -(-problem.n // config.tile_n)


def _cost(problem: Problem, config: MatmulConfig, device: DeviceSpec) -> float:
    """Estimated cycles: waves of tiles, each bound by tensor cores or L2 traffic."""
    itemsize = problem.dtype.itemsize
    edges = (config.tile_m + config.tile_n) * itemsize
    rate = 2 * TENSOR_CORE // itemsize
    per_k = step_cycles(config.tile_m, config.tile_n, edges, rate)
    slower = _SECOND_PRODUCT if len(config.product_columns) > 1 else 1.0
    tiles = math.prod(_counts(problem, config))
    return waves(tiles, device) * (problem.k * per_k * slower + TILE_OVERHEAD)


def _clustered[C: MatmulConfig](problem: Problem, config: C) -> C:
    """Pairs blocks along a dimension with an even number of tiles, rows first."""
    for dimension, count in zip(("m", "n"), _counts(problem, config), strict=True):
        if count % 2 == 0:
            return dataclasses.replace(config, cluster=dimension)
    return config


def heuristic[C: MatmulConfig](
    problem: Problem, device: DeviceSpec, tiles: Sequence[C] = _TILES
) -> C:
    """The config of a problem that was never tuned.

    Returns:
        The tile of least estimated time, in clusters of two where the tiles pair up.

    Example:
        >>> from pallas_kernels.mosaic import H200
        >>> bf16 = jnp.dtype(jnp.bfloat16)
        >>> big = Problem(m=8192, n=8192, k=8192, dtype=bf16, out_dtype=bf16)
        >>> config = heuristic(big, H200)
        >>> config.tile_m, config.tile_n, config.cluster
        (128, 256, 'm')
    """
    best = min(tiles, key=lambda config: _cost(problem, config, device))
    return _clustered(problem, best) if device.num_sms > 1 else best


def candidates[C: MatmulConfig](
    problem: Problem, device: DeviceSpec, tiles: Sequence[C] = _TILES
) -> tuple[C, ...]:
    """Configs for the tuner: near the estimate, in several orders and clusters."""
    estimates = {c: _cost(problem, c, device) for c in tiles}
    limit = 1.3 * min(estimates.values())
    near = [c for c in tiles if estimates[c] <= limit]
    near = sorted(near, key=estimates.__getitem__)[:3]
    best = _clustered(problem, near[0])
    found = [_clustered(problem, c) for c in near]
    found += [dataclasses.replace(near[0], cluster=c) for c in ("none", "m", "n")]
    if math.prod(_counts(problem, best)) > 2 * device.num_sms:
        found += [
            dataclasses.replace(best, minor=minor, group=group)
            for minor, group in (("m", 4), ("m", 16), ("n", 4), ("n", 8))
        ]
        if best.tile_k == 64 and best.stages % 2 == 0:
            # Half as many barriers, for rings as deep in bytes.
            deep = dataclasses.replace(best, tile_k=128, stages=best.stages // 2)
            found.append(deep)
    return tuple(dict.fromkeys(found))
