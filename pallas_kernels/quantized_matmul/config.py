"""Tiling of a matmul with a quantized weight: the problem, the config, its choice.

Axis letters: M tokens, K input features, N output features.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.mosaic import DeviceSpec, smem_bytes


ROWS = 64
"""Output features per warpgroup: the rows of one tensor-core instruction."""

REGISTERS = {1: (40, 232), 2: (40, 232), 3: (40, 152), 4: (48, 104)}
"""Registers of a copying and of a multiplying thread, by the number of multiplying
warpgroups. A block is launched with as many registers per thread as fit; if the
warpgroups together asked for more, one would wait for them forever."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedMatmulConfig:
    """Tiling of a matmul with a quantized weight in the kernel."""

    tile_tokens: int = 8
    """Tokens of an output tile: 8, 16, 32, 64, 128 or 256."""
    warpgroups: int = 4
    """Consumer warpgroups, 1 to 4, each for 64 output features of a tile."""
    depth: int = 1
    """Number of these that share 64 output features, each with its own input features
    in every stage. A stage then has longer pieces of fewer rows of the weight, which
    memory delivers faster."""
    tile_k: int = 128
    """Input features of a warpgroup per stage of the ring: 64 or a multiple of 128."""
    stages: int | None = None
    """Stages of the ring; None is as many as fit in shared memory."""
    splits: int = 1
    """Split-K: parts of the contraction in separate blocks, added in order."""

    def __post_init__(self) -> None:
        allowed = {
            "tile_tokens": (8, 16, 32, 64, 128, 256),
            "warpgroups": tuple(REGISTERS),
        }
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name} {value!r}, expected one of {values}")
        if self.depth < 1 or self.warpgroups % self.depth:
            raise ValueError(
                f"depth {self.depth!r}, expected a divisor of warpgroups"
                f" {self.warpgroups}"
            )
        if self.tile_k != 64 and (self.tile_k < 128 or self.tile_k % 128):
            raise ValueError(
                f"tile_k {self.tile_k!r}, expected 64 or a positive multiple of 128"
            )
        if self.stages is not None and self.stages < 2:
            raise ValueError(f"stages {self.stages!r}, expected None or at least 2")
        if self.splits < 1:
            raise ValueError(f"splits {self.splits!r}, expected at least 1")
        # Sums and two forms of the weight stay in registers.
        held = self.tile_tokens // 2 + 3 * self.tile_k // 8
        _, registers = REGISTERS[self.warpgroups]
        if held > registers - 16:
            raise ValueError(
                f"tile_tokens {self.tile_tokens} and tile_k {self.tile_k} with"
                f" warpgroups {self.warpgroups} need {held} registers a thread of"
                f" {registers - 16}; lower one of them"
            )

    @property
    def tile_n(self) -> int:
        """Output features of a tile."""
        return ROWS * self.groups

    @property
    def groups(self) -> int:
        """Groups of warpgroups that share output features."""
        return self.warpgroups // self.depth


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A matmul ``[M,K] x [N,K]^T -> [M,N]`` and the types of its operands."""

    m: int
    """Tokens."""
    n: int
    """Output features."""
    k: int
    """Input features."""
    dtype: jnp.dtype
    """Type of the activations."""
    weight_dtype: jnp.dtype
    """Type of the weight: int8 or float8_e4m3fn."""
    out_dtype: jnp.dtype
    """Type of the output."""

    @classmethod
    def of(cls, x: Any, w: Any, out_dtype: DTypeLike) -> "Problem":
        """The problem of two arrays (or shapes with types)."""
        return cls(
            m=x.shape[0],
            n=w.shape[0],
            k=w.shape[1],
            dtype=jnp.dtype(x.dtype),
            weight_dtype=jnp.dtype(w.dtype),
            out_dtype=jnp.dtype(out_dtype),
        )

    @property
    def key(self) -> str:
        """Key in the tables of tuned configs, as in ``m=8 n=4096 k=4096 int8 bf16``."""
        short = {"bfloat16": "bf16", "float32": "f32", "float8_e4m3fn": "fp8"}
        types = (self.weight_dtype, self.dtype, self.out_dtype)
        weight, x, out = (short.get(dtype.name, dtype.name) for dtype in types)
        key = f"m={self.m} n={self.n} k={self.k} {weight} {x}"
        return key if out == x else f"{key} out={out}"

    def stage_bytes(self, config: QuantizedMatmulConfig) -> int:
        """Shared memory of one stage of the ring."""
        rows, tokens = ROWS * config.warpgroups, config.depth * config.tile_tokens
        return smem_bytes((rows, config.tile_k), self.weight_dtype) + (
            smem_bytes((tokens, config.tile_k), self.dtype)
        )


def heuristic(problem: Problem, device: DeviceSpec) -> QuantizedMatmulConfig:
    """The config of a problem that was never tuned.

    The fewer tokens, the more warpgroups convert weights. With few tokens they share
    features: activations, which each tile of features reads again, are small. The
    contraction is split (split-K) if tiles leave multiprocessors idle; partial sums are
    written and read once more.

    Example:
        >>> from pallas_kernels.mosaic import H200
        >>> x, w = (jnp.zeros(s, jnp.int8) for s in ((8, 4096), (4096, 4096)))
        >>> config = heuristic(Problem.of(x, w, jnp.float32), H200)
        >>> config.depth, config.splits
        (4, 2)
    """
    tokens = next((t for t in (8, 16, 32, 64, 128) if t >= problem.m), 256)
    config = QuantizedMatmulConfig(
        tile_tokens=tokens,
        warpgroups=4 if tokens <= 64 else 2,
        depth={8: 4, 16: 4, 32: 2}.get(tokens, 1),
        tile_k=128 if tokens <= 128 else 64,
    )
    steps = -(-problem.k // (config.depth * config.tile_k))
    tiles = -(-problem.n // config.tile_n) * -(-problem.m // tokens)

    def cost(splits: int) -> float:
        """Bytes that the busiest multiprocessor moves, with some overhead per tile."""
        waves = -(-tiles * splits // device.num_sms)
        stages = waves * (-(-steps // splits) + (1 if config.depth == 1 else 0.25))
        read = stages * problem.stage_bytes(config)
        parts = 8 * splits * problem.m * problem.n if splits > 1 else 0
        return read + parts / device.num_sms

    splits = min(range(1, min(steps, 16) + 1), key=cost)
    return dataclasses.replace(config, splits=splits)


def candidates(
    problem: Problem, device: DeviceSpec
) -> tuple[QuantizedMatmulConfig, ...]:
    """Configs for the tuner: other splits, warpgroups, depths and tiles of tokens."""
    best = heuristic(problem, device)
    found = [best]
    tiles = -(-problem.n // best.tile_n) * -(-problem.m // best.tile_tokens)
    # Splits that fill whole waves.
    full = (max(1, waves * device.num_sms // tiles) for waves in range(1, 7))
    for options in (
        *({"splits": n} for n in (1, 2, 4, 6, 8, 12, 16, *full)),
        *({"depth": n, "splits": s} for n in (1, 2, 4) for s in (1, 2, 4, 8)),
        *(
            {"warpgroups": n, "depth": 1, "splits": s}
            for n in (1, 2, 3)
            for s in (1, 2, 4, 8)
        ),
        *({"tile_k": n} for n in (64, 256)),
        *({"tile_tokens": n, "tile_k": 64, "depth": 1} for n in (64, 128)),
    ):
        try:
            found.append(dataclasses.replace(best, **options))
        except ValueError:
            continue  # too much for the registers
    return tuple(dict.fromkeys(found))
