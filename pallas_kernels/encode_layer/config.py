"""An encoder layer from one attention to the next: its sizes, and how they are cut.

Axis letters: M tokens, K contraction, N columns.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cost_model import (
    L2_BANDWIDTH,
    TENSOR_CORE,
    TILE_OVERHEAD,
    step_cycles,
    waves,
)
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.layer_norm.mosaic_gpu import WARPS
from pallas_kernels.matmul.config import CONSUMERS, MatmulConfig
from pallas_kernels.matmul.config import Problem as Matmul
from pallas_kernels.matmul.mosaic_gpu import TILE_ROWS, Columns, Tiles
from pallas_kernels.matmul.mosaic_gpu_dense import MOST_COLUMNS as MOST_BIASES
from pallas_kernels.matmul.mosaic_gpu_norm import LINE, MOST_COLUMNS
from pallas_kernels.mosaic import DeviceSpec, smem_bytes


MOST_TOKENS = 1024
"""With more a layer is long enough for a launch each."""

CHUNK = 64
"""Columns that are stored at a time."""

_TIMED = 768, jnp.dtype(jnp.bfloat16)
"""Features and type of BERT base, with which whole calls are faster on an H200."""

_FASTEST_TOKENS = 512
"""In a call of BERT base on an H200 one launch takes 4.5 us a layer less with 256, with
688 tokens 2.2 us more."""

_TILE_COLUMNS = (192, 128, 64)

_NORMED = ("out", "down")
"""Weights whose product is normalized."""

_MOST_STAGES = 4

_MOST_SLOTS = 8
"""Of the ring: more hide no more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The sizes of a layer."""

    m: int
    """Tokens; a multiple of 8."""
    attended: int
    """Features of the output of attention."""
    d_model: int
    d_ff: int
    heads: tuple[int, ...] = ()
    """Features of queries, keys and values of the next layer, if there is one."""
    dtype: jnp.dtype
    """Of activations and weights: bfloat16 or float16."""

    def check(self) -> None:
        """Checks that the kernel can serve these sizes.

        Raises:
            Unsupported: it cannot.
        """
        if self.dtype not in (jnp.bfloat16, jnp.float16):
            raise Unsupported(
                f"encode_layer: arrays of type {self.dtype.name}, the kernel takes"
                " bfloat16 or float16; use implementation='dense'"
            )
        if not 0 < self.m <= MOST_TOKENS or self.m % TILE_ROWS:
            raise Unsupported(
                f"encode_layer: {self.m} tokens, the kernel takes multiples of"
                f" {TILE_ROWS} up to {MOST_TOKENS}; use implementation='dense'"
            )
        if self.d_model % LINE or not LINE < self.d_model <= MOST_COLUMNS:
            raise Unsupported(
                f"encode_layer: {self.d_model} features, the kernel takes multiples of"
                f" {LINE} from {2 * LINE} to {MOST_COLUMNS}; use"
                " implementation='dense'"
            )
        others = self.attended, self.d_ff, *self.heads
        if any(n % CHUNK or not 0 < n <= MOST_BIASES for n in others):
            raise Unsupported(
                f"encode_layer: {others} features of attention, hidden layer, queries,"
                f" keys and values, the kernel takes multiples of {CHUNK} up to"
                f" {MOST_BIASES}; use implementation='dense'"
            )

    @property
    def declines(self) -> str | None:
        """Say why four launches may be faster, or None."""
        if self.m > _FASTEST_TOKENS:
            return f"more than {_FASTEST_TOKENS} tokens take longer in one launch"
        if (self.d_model, self.dtype) == _TIMED:
            return None
        features, dtype = _TIMED
        return (
            f"{self.d_model} features of {self.dtype.name} have not been timed on a"
            f" GPU, as {features} of {dtype.name} have"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A matmul of all tokens, and what follows it."""

    weights: tuple[str, ...]
    """Names of the weights; columns of one follow those of another."""
    source: str
    """Name of the input."""
    targets: tuple[str, ...]
    """Names of the outputs, one for each weight."""
    columns: Columns
    """Tiles of each weight."""
    parts: int = 1
    """Parts of the contraction, each of another tile."""
    residual: str | None = None
    """Name of what is added before a norm; None: there is no norm."""
    first_line: int = 0
    """The first line of its biases in shared memory, if there is no norm."""

    @property
    def tiles(self) -> Tiles:
        """Those of the first weight, which differ from others in their number."""
        return self.columns.tiles[0]

    @property
    def config(self) -> MatmulConfig:
        """How a matmul is cut."""
        return self.tiles.config

    @property
    def steps(self) -> int:
        """Stages of the ring that a tile consumes."""
        return self.tiles.k_tiles // self.parts

    @property
    def across(self) -> int:
        """Tiles of the same rows."""
        return self.columns.count * self.parts

    @property
    def count(self) -> int:
        """All tiles."""
        return self.tiles.counts[0] * self.across

    @property
    def signals(self) -> int:
        """How often it is said, of a tile's rows, that a part of them is there."""
        if self.residual is None:
            return CONSUMERS * self.across
        return self.config.tile_m // WARPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the kernel computes a layer."""

    problem: Problem
    device: DeviceSpec

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The matmuls, in their order."""
        p = self.problem
        found = [
            self._stage(("out",), "attended", ("between",), residual="residual"),
            self._stage(("up",), "between", ("hidden",)),
            self._stage(("down",), "hidden", ("y",), residual="between"),
        ]
        if p.heads:
            names, targets = ("query", "key", "value"), ("q", "k", "v")
            found.append(self._stage(names, "y", targets, p.d_ff // CHUNK))
        return tuple(found)

    def _stage(
        self,
        weights: tuple[str, ...],
        source: str,
        targets: tuple[str, ...],
        first_line: int = 0,
        residual: str | None = None,
    ) -> Stage:
        p, dtype = self.problem, self.problem.dtype
        k, widths = self._sizes[weights[0]]
        config = self.ring.config
        matmuls = [
            Matmul(m=p.m, n=n, k=k, dtype=dtype, out_dtype=dtype) for n in widths
        ]
        return Stage(
            weights=weights,
            source=source,
            targets=targets,
            columns=Columns(tiles=[Tiles(problem=x, config=config) for x in matmuls]),
            parts=self._cut[1][weights[0]],
            residual=residual,
            first_line=first_line,
        )

    @property
    def _sizes(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Contraction and columns of each stage, by its first weight."""
        p = self.problem
        found = {
            "out": (p.attended, (p.d_model,)),
            "up": (p.d_model, (p.d_ff,)),
            "down": (p.d_ff, (p.d_model,)),
        }
        return found | ({"query": (p.d_model, p.heads)} if p.heads else {})

    @functools.cached_property
    def _cut(self) -> tuple[Tiles, dict[str, int]]:
        """The ring, and parts of the contraction of each stage: what takes least."""
        widths = [n for _, columns in self._sizes.values() for n in columns]
        common, found = math.gcd(*widths), []
        for tile_n in _TILE_COLUMNS:
            if common % tile_n == 0:
                ring, total, parts = self._ring(tile_n), 0.0, {}
                for name, (k, columns) in self._sizes.items():
                    steps, size = k // CHUNK, sum(columns)
                    most = steps if name in _NORMED else 1
                    cost, parts[name] = min(
                        (self._cost(ring.config, size, k, n, name in _NORMED), n)
                        for n in range(1, most + 1)
                        if steps % n == 0
                    )
                    total += cost
                found.append((total, ring, parts))
        _, ring, parts = min(found, key=lambda x: x[0])
        return ring, parts

    def _cost(
        self, config: MatmulConfig, n: int, k: int, parts: int, normed: bool
    ) -> float:
        """Cycles of the slowest block, once the activations are there.

        The first weights are in the ring then.
        """
        tile_m, tile_n, steps = config.tile_m, config.tile_n, k // parts // CHUNK
        rounds = waves(self.row_tiles * (n // tile_n) * parts, self.device)
        later = max(0, steps - config.stages)
        first = max(
            steps * tile_m * tile_n / TENSOR_CORE,
            2 * (steps * tile_m + later * tile_n) / L2_BANDWIDTH,
        )
        others = steps * step_cycles(tile_m, tile_n, 2 * (tile_m + tile_n))
        cost = CHUNK * (first + (rounds - 1) * others) + rounds * TILE_OVERHEAD
        if not normed:
            return cost
        rows = self.row_tiles * tile_m
        mine = WARPS * pl.cdiv(rows // WARPS, self.device.num_sms)
        sums = 4 * (rounds * tile_m * tile_n + mine * parts * n)
        return cost + sums / L2_BANDWIDTH

    def _ring(self, tile_n: int) -> Tiles:
        """A ring of tiles of so many columns, as deep as there is memory."""
        p = self.problem
        slots = min(2, tile_n // CHUNK)
        config = MatmulConfig(tile_n=tile_n, store_slots=slots, stages=2)
        one = Matmul(m=p.m, n=tile_n, k=CHUNK, dtype=p.dtype, out_dtype=p.dtype)
        two = Tiles(problem=one, config=config)
        slot = smem_bytes((config.tile_m + tile_n, config.tile_k), p.dtype)
        more = (self.device.smem_bytes - two.smem_bytes - self._bias_bytes) // slot
        config = dataclasses.replace(config, stages=min(_MOST_SLOTS, 2 + max(0, more)))
        return dataclasses.replace(two, config=config)

    @property
    def ring(self) -> Tiles:
        """One tile: what the ring and the buffers of outputs hold."""
        return self._cut[0]

    @property
    def row_tiles(self) -> int:
        """Tiles along the tokens."""
        return pl.cdiv(self.problem.m, MatmulConfig().tile_m)

    @property
    def parts(self) -> int:
        """Parts of sums that are in memory at a time."""
        return max(stage.parts for stage in self.stages if stage.residual)

    @property
    def counters(self) -> int:
        """For each stage and tile of rows: what is there, and what of its sums is.

        As many for the last layer of a model, so that one launch clears all.
        """
        return 2 * _MOST_STAGES * self.row_tiles

    @property
    def bias_lines(self) -> int:
        """Chunks of biases that are in shared memory."""
        return (self.problem.d_ff + sum(self.problem.heads)) // CHUNK

    @property
    def _bias_bytes(self) -> int:
        return smem_bytes((self.bias_lines, CHUNK), self.problem.dtype)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block."""
        return self.ring.smem_bytes + self._bias_bytes

    def scratch_types(self) -> dict[str, Any]:
        """Scratch of a block."""
        biases = sum(len(s.weights) for s in self.stages if s.residual is None)
        return self.ring.scratch_types() | {
            "bias_smem": plgpu.SMEM((self.bias_lines, CHUNK), self.problem.dtype),
            "bias_full": plgpu.Barrier(num_arrivals=biases),
        }
