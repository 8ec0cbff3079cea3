"""How a collective matrix product is cut: the problem, the config, and its choice.

Axis letters: B leading axes, M rows of all devices, m rows of one, K contraction,
N columns; D devices.
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.matmul.config import MatmulConfig
from pallas_kernels.mosaic import DeviceSpec


__all__ = ["CollectiveConfig", "CollectiveProblem", "Kind", "candidates", "heuristic"]

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveConfig(MatmulConfig):
    """How the kernel cuts a matrix product, and who sends."""

    store_slots: int = 1
    senders: int = 132
    """Blocks that also send; more than there are means all. What a multiprocessor sends
    stands in the way of what it loads: few leave the others undisturbed."""
    communicators: int = 1
    """Warps that send, in each of those blocks; at most 3."""
    buffers: int = 2
    """Buffers of 8 KiB for each of those warps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least, most in (
            ("senders", 1, math.inf),
            ("communicators", 1, 3),
            ("buffers", 2, math.inf),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise ValueError(
                    f"{name} {value!r}, expected an integer from {least} to {most}"
                )
        if self.minor != "m":
            raise ValueError(
                f"minor {self.minor!r}, expected 'm': rows are served as they arrive"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveProblem:
    """One collective product as each of D devices sees it."""

    kind: Kind
    """Which collective."""
    batch: int = 1
    """Leading axes, merged."""
    m: int
    """Rows of all devices within one leading index: those gathered or reduced."""
    n: tuple[int, ...]
    """Columns of each weight on this device (one number but for an all-gather)."""
    k: tuple[int, ...]
    """Contractions on this device (one number for an all-gather)."""
    devices: int
    """D, the size of the mesh axis."""
    dtype: jnp.dtype
    """Type of operands and results: bfloat16 or float16."""
    rhs_transposed: bool = False
    """Weights are stored as [N,K]."""

    @property
    def rows(self) -> int:
        """Rows of one device within one leading index."""
        return self.m // self.devices

    @property
    def key(self) -> str:
        """Key in the tables of tuned configs."""
        short = {"bfloat16": "bf16", "float16": "f16"}
        m = f"{self.batch}x{self.m}" if self.batch > 1 else f"{self.m}"
        parts = [
            self.kind,
            f"tp={self.devices}",
            f"m={m}",
            f"n={'+'.join(map(str, self.n))}",
            f"k={'+'.join(map(str, self.k))}",
            short.get(self.dtype.name, self.dtype.name),
        ]
        return " ".join(parts + ["rhs_transposed"] * self.rhs_transposed)

    def counts(self, config: MatmulConfig) -> tuple[int, int]:
        """Output tiles along the rows of one device, and along the columns of all
        weights."""
        return (
            self.batch * -(-self.rows // config.tile_m),
            sum(-(-n // config.tile_n) for n in self.n),
        )


_TILES = (
    CollectiveConfig(tile_m=128, tile_n=256, stages=4),
    CollectiveConfig(tile_m=128, tile_n=192, stages=4),
    CollectiveConfig(tile_m=128, tile_n=128, stages=6),
    CollectiveConfig(tile_m=128, tile_n=64, stages=8),
)
_TENSOR_CORE = 2048  # multiply-adds a cycle, 16-bit operands
_L2_BYTES = 48  # bytes a cycle from the L2 cache to one multiprocessor
_TILE_OVERHEAD = 2000  # filling the ring once, storing the tile


def _cost(
    problem: CollectiveProblem, config: MatmulConfig, device: DeviceSpec
) -> float:
    rows, columns = problem.counts(config)
    waves = -(-rows * problem.devices * columns // device.num_sms)
    area = config.tile_m * config.tile_n
    edges = (config.tile_m + config.tile_n) * problem.dtype.itemsize
    per_k = max(area / _TENSOR_CORE, edges / _L2_BYTES)
    return waves * (sum(problem.k) * per_k + _TILE_OVERHEAD)


def _clustered(
    problem: CollectiveProblem, config: CollectiveConfig
) -> CollectiveConfig:
    """Pairs blocks along a dimension with an even number of tiles, rows first."""
    rows, columns = problem.counts(config)
    for dimension, count in (("m", rows), ("n", columns)):
        if count % 2 == 0:
            return dataclasses.replace(config, cluster=dimension)
    return config


def heuristic(problem: CollectiveProblem, device: DeviceSpec) -> CollectiveConfig:
    """The config of a problem that was never tuned.

    Args:
        problem: what to compute.
        device: number of multiprocessors.
    """
    best = min(_TILES, key=lambda config: _cost(problem, config, device))
    return _clustered(problem, best)


def candidates(
    problem: CollectiveProblem, device: DeviceSpec
) -> tuple[CollectiveConfig, ...]:
    """Configs for the tuner."""
    estimates = {c: _cost(problem, c, device) for c in _TILES}
    limit = 1.3 * min(estimates.values())
    near = sorted(
        (c for c in _TILES if estimates[c] <= limit), key=estimates.__getitem__
    )
    found = [_clustered(problem, c) for c in near]
    found += [dataclasses.replace(near[0], cluster=c) for c in ("none", "m", "n")]
    if problem.kind == "all_gather":
        found += [dataclasses.replace(found[0], senders=s) for s in (16, 32, 64)]
    if math.prod(problem.counts(found[0])) * problem.devices > 2 * device.num_sms:
        found += [dataclasses.replace(found[0], group=group) for group in (4, 16)]
    return tuple(dict.fromkeys(found))
