"""Collective matmuls: the call, the problem, the tiling, and its choice.

Axis letters: B leading axes, M rows of all devices, m rows of one, K contraction,
N columns; D devices.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from pallas_kernels.cost_model import (
    TENSOR_CORE,
    TILE_OVERHEAD,
    step_cycles,
    waves,
)
from pallas_kernels.matmul.config import MatmulConfig
from pallas_kernels.mosaic import DeviceSpec, varying


Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveConfig(MatmulConfig):
    """Tiling of the matmul in the kernel, and of its copies from peers."""

    store_slots: int = 1
    buffers: int = 2
    """Copy buffers of a block; all but one are in flight."""
    buffer_bytes: int = 8192
    """Largest size of a buffer; a power of two."""
    piece_chunks: int = 4
    """All-gather: buffers copied before other blocks are notified."""
    gather_order: Literal["rows", "k"] = "rows"
    """All-gather: what arrives first. "rows": row blocks of the peers one by one, each
    in its whole depth. "k": the first columns of all their rows, then the next ones, so
    that all tiles advance with the links: for matmuls of about one wave of tiles. A
    buffer then holds a part of a row, and its size says how large the steps are."""
    transfer: Literal["pull", "push"] = "pull"
    """Reduce-scatter: "pull": devices read their partial sums from peers; "push": they
    write partial sums to peers, for link-bound reductions or few rows."""
    one_shot: bool = False
    """All-reduce: exchange whole sums once, after a matmul by XLA. Faster for few
    rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (
            ("buffers", 2),
            ("buffer_bytes", 1024),
            ("piece_chunks", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{name} {value!r}, expected an integer of at least {least}"
                )
        if self.buffer_bytes & (self.buffer_bytes - 1):
            raise ValueError(
                f"buffer_bytes {self.buffer_bytes}, expected a power of two"
            )
        if self.gather_order not in ("rows", "k"):
            raise ValueError(
                f"gather_order {self.gather_order!r}, expected 'rows' or 'k'"
            )
        if self.transfer not in ("pull", "push"):
            raise ValueError(f"transfer {self.transfer!r}, expected 'pull' or 'push'")
        if self.minor != "m":
            raise ValueError(
                f"minor {self.minor!r}, expected 'm': rows are served as they arrive"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of a call of an op, apart from its operands."""

    axis_name: str
    """Mesh axis to communicate over."""
    size: int
    """D, devices of that axis."""
    rhs_transposed: bool = False
    """Weights are stored as [N,K]."""
    out_dtype: jnp.dtype
    """Type of the results."""
    implementation: str | tuple[str, ...] | None = None
    """Implementations that the caller named."""
    config: CollectiveConfig | None = None
    """Config that the caller gave; gradients look theirs up."""
    device: DeviceSpec | None = None
    """The GPU that kernels are built for."""
    tracked: bool = False
    """Types say over which mesh axes arrays vary: `check_vma` of `jax.shard_map`."""
    return_gathered: bool = False
    """The gathered operand is an output; if not, its own rows need not be copied."""
    deterministic: bool = True
    """Sums are bitwise equal between runs."""

    @classmethod
    def over(cls, axis_name: str, **arguments: Any) -> "Call":
        """The call of a function inside `jax.shard_map`.

        Raises:
            ValueError: `axis_name` is no axis of an enclosing one.
        """
        try:
            size = lax.axis_size(axis_name)
        except NameError:
            raise ValueError(
                f"axis_name {axis_name!r} is no axis of an enclosing jax.shard_map;"
                " call the op inside one, over a mesh with that axis"
            ) from None
        tracked = bool(varying(lax.axis_index(axis_name)))
        return cls(axis_name=axis_name, size=size, tracked=tracked, **arguments)

    def transposed(self, out_dtype: jnp.dtype, **changes: Any) -> "Call":
        """The call that multiplies by the transposed weights."""
        return dataclasses.replace(
            self,
            rhs_transposed=not self.rhs_transposed,
            out_dtype=out_dtype,
            config=None,
            **changes,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveProblem:
    """One collective matmul as each of D devices sees it."""

    kind: Kind
    """The collective."""
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

    @classmethod
    def of(
        cls, kind: Kind, x: Any, ws: Sequence[Any], call: Call
    ) -> "CollectiveProblem":
        """The problem of a call."""
        gathers = kind == "all_gather"
        xs = (x,) if gathers else x
        batch, rows, _ = xs[0].shape
        columns = tuple(w.shape[0 if call.rhs_transposed else 1] for w in ws)
        return cls(
            kind=kind,
            batch=batch,
            m=rows * call.size if gathers else -(-rows // call.size) * call.size,
            n=columns if gathers else columns[:1],
            k=tuple(x.shape[-1] for x in xs),
            devices=call.size,
            dtype=xs[0].dtype,
            rhs_transposed=call.rhs_transposed,
        )

    @property
    def rows(self) -> int:
        """Rows of one device within one leading index."""
        return self.m // self.devices

    @property
    def key(self) -> str:
        """Key in the tables of tuned configs."""
        short = {"bfloat16": "bf16", "float16": "f16"}
        short |= {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
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

    def declines(self, device: DeviceSpec) -> str | None:
        """Say why XLA is expected to be faster if nothing was measured, or None."""
        rows, least = self.batch * self.m, _LEAST_ROWS * self.devices
        if self.kind == "all_reduce":
            least = _LEAST_ROWS_REDUCED // self.devices
        if self.dtype.itemsize == 1:
            if (device.name, self.devices) not in _LEAST_ROWS_OF_8_BITS:
                return f"{self.key} was never measured on {device.name}"
            least = _LEAST_ROWS_OF_8_BITS[device.name, self.devices]
        if any(features % 64 for features in self.n + self.k):
            least = max(least, _LEAST_ROWS_PADDED * self.devices)
        if rows < least:
            return f"{rows} rows are too few to gain, expected {least}"
        return None

    def counts(self, config: MatmulConfig) -> tuple[int, int]:
        """Output tiles of one device's rows, and along the columns of all weights."""
        return (
            self.batch * -(-self.rows // config.tile_m),
            sum(-(-n // config.tile_n) for n in self.n),
        )


_TILES = (
    CollectiveConfig(tile_m=128, tile_n=320, stages=3, store_slots=2),
    CollectiveConfig(tile_m=128, tile_n=256, stages=4),
    CollectiveConfig(tile_m=128, tile_n=192, stages=4),
    CollectiveConfig(tile_m=128, tile_n=128, stages=6),
    CollectiveConfig(tile_m=128, tile_n=64, stages=8),
)
_LEAST_ROWS = 256
"""Rows per device from which an untuned problem is expected to be faster than XLA."""
_LEAST_ROWS_PADDED = 1024
"""The same if features are no multiples of 64, and operands are copied."""
_LEAST_ROWS_REDUCED = 8192
"""The same for an all-reduce, rows of all devices times devices: with fewer devices
there is less communication to hide."""
_LEAST_ROWS_OF_8_BITS = {("nvidia_h100_80gb_hbm3", 4): 2048}
"""By GPU and number of devices, the fewest rows of all devices with which fp8 matmuls
were measured: 1.13 to 1.84 times as fast as XLA's."""
# Time at 320 columns: less power goes to moving operands, but rings are shorter, which
# tells where sums of peers pass through them.
_WIDEST = {"all_gather": 0.98, "reduce_scatter": 1.01}
_LINK_BYTES = 170  # bytes a cycle from all peers to one device
_LINK_LATENCY = 15000  # until the first of them are there, barriers included
_BESIDE = 1.1  # slowdown of a matmul that overlaps reads from peers
_ONE_SHOT_ROWS = 128
_FEW_ROWS = 2048  # of all devices, up to which gathers gain in the order of K
_ROOMY_BYTES = 176 << 10  # rings that leave room for more buffers


def _cost(
    problem: CollectiveProblem, config: MatmulConfig, device: DeviceSpec
) -> float:
    """Estimated cycles of the matmul alone, as for `pallas_kernels.matmul`."""
    rows, columns = problem.counts(config)
    tiles = rows * problem.devices * columns
    return waves(tiles, device) * _tile_cost(problem, config)


def _tile_cost(problem: CollectiveProblem, config: MatmulConfig) -> float:
    """Estimated cycles of one tile."""
    itemsize = problem.dtype.itemsize
    edges = (config.tile_m + config.tile_n) * itemsize
    rate = 2 * TENSOR_CORE // itemsize
    per_k = step_cycles(config.tile_m, config.tile_n, edges, rate)
    if config.tile_n > 256:
        per_k *= _WIDEST[problem.kind]
    return sum(problem.k) * per_k + TILE_OVERHEAD


def _estimate(
    problem: CollectiveProblem, config: MatmulConfig, device: DeviceSpec
) -> float:
    """Estimated cycles of the kernel: the last rows gathered still need their tiles."""
    product = _cost(problem, config, device)
    if problem.kind != "all_gather":
        return product
    return max(_BESIDE * product, _waiting(problem) + _tile_cost(problem, config))


def _tiles(problem: CollectiveProblem) -> list[CollectiveConfig]:
    """Tilings that fit the columns."""
    columns = max(64, min(problem.n))
    narrowest = min(columns, 128)
    # Sums of an all-reduce are handed on in boxes, of which that is the largest.
    widest = min(columns, 256) if problem.kind == "all_reduce" else columns
    found = [c for c in _TILES if narrowest // 2 < c.tile_n <= widest]
    if problem.dtype.itemsize > 1:
        return found
    # Stages of as many bytes. The sums of wider tiles are promoted in two parts: with
    # them gathers take 3 to 13 % longer, reductions from 9 % longer to 6 % less (four
    # H100s, trials).
    return [dataclasses.replace(c, tile_k=128) for c in found if c.tile_n <= 192]


def _waiting(problem: CollectiveProblem) -> float:
    """Estimated cycles of the transfers that a device waits for."""
    columns = problem.k if problem.kind == "all_gather" else problem.n
    rows = problem.batch * problem.rows * (problem.devices - 1)
    # Partial sums have at least 16 bits.
    least = 1 if problem.kind == "all_gather" else 2
    nbytes = rows * sum(columns[:1]) * max(problem.dtype.itemsize, least)
    return _LINK_LATENCY + nbytes / _LINK_BYTES


def _pairs(problem: CollectiveProblem, config: CollectiveConfig) -> CollectiveConfig:
    """Pairs blocks along the rows where tiles pair up.

    A pair loads less but waits for the slower of two: with the same tiles it gains or
    costs up to 2 % (H200, measured). Pairs along the columns lose.
    """
    # Row blocks of an all-gather pair up across devices; those of one owner must.
    even = problem.kind == "all_gather" or problem.counts(config)[0] % 2 == 0
    return dataclasses.replace(config, cluster="m" if even else "none")


def heuristic(problem: CollectiveProblem, device: DeviceSpec) -> CollectiveConfig:
    """The config of a problem that was never tuned.

    Returns:
        The tile of least estimated time, in clusters of two where that gains; writes to
        peers for a reduce-scatter that waits for the links; one shot for an all-reduce
        of few rows. A gather of few, in 16 bits, comes in the order of K, which is 3 %
        faster with 1,024 and 7 % with 2,048, in the mean of five layers over four
        H100s; in 8 bits it is not faster.

    Example:
        >>> from pallas_kernels.mosaic import H200
        >>> up = CollectiveProblem(kind="all_gather", m=8192, n=(14336,), k=(8192,),
        ...                        devices=4, dtype=jnp.dtype(jnp.bfloat16))
        >>> config = heuristic(up, H200)
        >>> config.tile_m, config.tile_n, config.cluster
        (128, 320, 'm')
    """
    few = problem.kind == "all_gather" and problem.batch * problem.m <= _FEW_ROWS
    if few and problem.dtype.itemsize > 1:
        return in_order_of_k(problem, device)[0]
    return _best_cut(problem, device)


def _best_cut(problem: CollectiveProblem, device: DeviceSpec) -> CollectiveConfig:
    best = min(_tiles(problem), key=lambda config: _estimate(problem, config, device))
    exposed = _waiting(problem) / _cost(problem, best, device)
    # Where the links are nearly the bound, pairs cost some 8 % (H200, measured).
    if exposed < 0.75 and device.num_sms > 1:
        best = _pairs(problem, best)
    # Where they are, writes are 3 to 11 % faster, else up to 5 % slower (four H100s,
    # trials: five layers with 1,024 to 16,384 rows).
    if problem.kind == "reduce_scatter" and exposed > 1.15:
        best = dataclasses.replace(best, transfer="push")
    few = problem.kind == "all_reduce" and problem.batch * problem.m <= _ONE_SHOT_ROWS
    return dataclasses.replace(best, one_shot=few)


def in_order_of_k(
    problem: CollectiveProblem, device: DeviceSpec
) -> list[CollectiveConfig]:
    """Configs that gather in the order of K: the two best tilings of the matmul alone.

    All tiles then wait for the links alike, so small ones have no advantage. The 14 KiB
    in flight to a block cover the latency of a link.

    Returns:
        Steps of 2,048 and of 1,024 columns for each tiling, the best first; none if
        nothing is gathered.
    """
    if problem.kind != "all_gather":
        return []
    cuts = sorted(_tiles(problem), key=lambda cut: _cost(problem, cut, device))
    return [
        dataclasses.replace(
            cut,
            gather_order="k",
            store_slots=1,
            buffers=buffers,
            buffer_bytes=nbytes,
        )
        for cut in cuts[:2]
        for buffers, nbytes in ((4, 4096), (8, 2048))
    ]


def candidates(
    problem: CollectiveProblem, device: DeviceSpec
) -> tuple[CollectiveConfig, ...]:
    """Configs for the tuner: near the estimate, with other pairs and buffers."""
    best = _best_cut(problem, device)
    chosen = dataclasses.replace(best, transfer="pull")
    if chosen.one_shot:
        return (chosen, dataclasses.replace(chosen, one_shot=False))
    tiles = _tiles(problem)
    estimates = {c: _estimate(problem, c, device) for c in tiles}
    limit = 1.3 * min(estimates.values())
    near = sorted(
        (c for c in tiles if estimates[c] <= limit), key=estimates.__getitem__
    )
    found = [chosen]
    for config in near[:2]:
        found += [_pairs(problem, config), config]
    found += [_pairs(problem, config) for config in near[2:3]]
    stage = (chosen.tile_m + chosen.tile_n) * chosen.tile_k * problem.dtype.itemsize
    roomy = chosen.stages * stage <= _ROOMY_BYTES
    for buffers, nbytes in ((3, 8192), (2, 16384)) if roomy else ((3, 4096),):
        more = dataclasses.replace(chosen, buffers=buffers, buffer_bytes=nbytes)
        found.append(dataclasses.replace(more, store_slots=1))
    if _waiting(problem) > 0.4 * _cost(problem, chosen, device) and not roomy:
        # Link-bound: a short ring leaves room for more copies in flight.
        short = dataclasses.replace(chosen, stages=3, buffers=4)
        found += [short, dataclasses.replace(short, buffer_bytes=16384)]
    if _waiting(problem) > 0.8 * _cost(problem, chosen, device):
        # Links are idle until the first tile is there, and after a peer's last.
        small = [c for c in tiles if c.tile_n == 128]
        found += small + [_pairs(problem, config) for config in small]
    few = problem.batch * problem.m <= 2 * _FEW_ROWS
    if few or _waiting(problem) > 0.4 * _cost(problem, chosen, device):
        found += in_order_of_k(problem, device)
    if problem.kind == "reduce_scatter":
        found += [dataclasses.replace(config, transfer="push") for config in found]
    return tuple(dict.fromkeys(found))
