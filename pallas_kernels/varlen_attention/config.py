"""Tiling of the Hopper kernels of variable-length attention."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic.copies import CHUNK, smem_bytes
from pallas_kernels.mosaic.device import DeviceSpec


ROWS = 64
"""Rows of a tile per warpgroup."""

BACKWARD_CONSUMERS = 2
"""Consumer warpgroups of the backward kernel."""

BACKWARD_TILES = {64: (128, 128), 128: (64, 128), 256: (64, 64)}
"""Queries per step and keys per tile of the backward kernel, by head dim."""

MOST_SHORT_SEQUENCES = 1023
"""Maximum number of sequences per row for which each block searches its own."""

_SHORT_BLOCKS, _SHORT_BACKWARD_BLOCKS = 4, 3
"""One-warpgroup blocks per multiprocessor, by pass."""

_SHORT_KEYS = 1024
"""Average number of keys up to which a single warpgroup is fast; in the backward pass
also queries of all heads of a group."""

_SHORT, _SHORT_BACKWARD = 384, 256
"""Largest average lengths for blocks of one warpgroup, by pass: for longer sequences,
seven matmuls instead of five cost the backward pass more than they save."""

_NARROW = 128
"""Widest window, its two sides together, for tiles of 64 tokens, which see the fewest
keys: 192 where tiles of 192 tokens see 320. One warpgroup with such a tile took 0.7 of
the time, four that share keys 0.66. In the backward pass one warpgroup with 64 rows
multiplies 192 queries by each key seven times, where tiles of 128 keys multiply 256 to
384 five times: 0.52 to 0.57 of the time. With wider windows these numbers come closer
to each other; none was timed."""

_FP8_LONG = 2048
"""Average number of keys from which 192 keys a step of 8 bits pay off without a mask:
up to 191 of them are not there in the last step."""

_LONG = 768
"""Average length from which one block per query head pays off."""

_BLOCKS_OF_KEYS = (64, 128, 192, 256)

HEAD_DIMS = (64, 128, 256)
"""Head dims that the kernels are built for; others are padded to the next."""

FORWARD_DIMS = (64, 96, 128, 256)
"""The same of the forward kernel."""

LATENT_DIMS = (192, 128)
"""Head dims of queries and keys and of values in multi-head latent attention, which has
a forward kernel of its own size."""

LATENT_GRADIENT_DIMS = (256, 128)
"""What these are padded to in the backward pass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardBlocks:
    """Tiling of the forward kernel."""

    consumers: int = 2
    """Consumer warpgroups, each with 64 queries. 1 is a separate kernel for short
    sequences: a block is one warpgroup with one tile, and four share a
    multiprocessor."""
    block_k: int = 128
    """Keys per step."""
    stages: int = 2
    """Pipeline stages: steps of keys and values in shared memory."""
    overlap: bool = True
    """Start the scores (Q K) of the next step before the P V matmul of this one."""
    ping_pong: bool = False
    """Ping-pong scheduling: one warpgroup computes exponentials while the other
    multiplies."""
    held: int = 0
    """Chunks of 64 columns of the queries that a warpgroup holds in registers, where
    the tensor cores read them without shared memory traffic."""
    heads: int = 1
    """Query heads of a tile, which read one key/value head: 1, or one a consumer. Then
    a tile has 64 tokens, which under a window see fewer keys than more of them would.
    """

    def __post_init__(self) -> None:
        _check(self, consumers=(1, 2, 3, 4), block_k=_BLOCKS_OF_KEYS, held=range(5))
        _check(self, heads=(1, self.consumers))
        _check_least(self, stages=2)
        if self.ping_pong and self.consumers != 2:
            raise ValueError(
                f"ping_pong with consumers={self.consumers}, expected 2 of them"
            )

    @property
    def block_q(self) -> int:
        """Tokens of the queries of a tile."""
        return ROWS * self.consumers // self.heads

    def first_token(self, warpgroup: Any) -> Any:
        """The first token of a consumer in a tile."""
        return 0 if self.heads > 1 else warpgroup * ROWS

    def head(self, of_tile: Any, warpgroup: Any) -> Any:
        """The query head of a consumer; a tile has one, or one a consumer."""
        return of_tile if self.heads == 1 else of_tile * self.heads + warpgroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardBlocks:
    """Tiling of the backward kernel."""

    consumers: int = BACKWARD_CONSUMERS
    """Consumer warpgroups. 1 is a separate kernel for short sequences and head dim 64,
    without ALiBi: a block is one warpgroup with 64 queries or 64 keys."""
    block_q: int = 64
    """Queries per step."""
    block_k: int = 128
    """Keys per tile, 64 for each warpgroup; or 64, which both share."""
    splits: int = 1
    """Blocks over which the query heads of a key/value head are split, a divisor of
    their number: each writes its own dk and dv, which are summed afterwards. Blocks of
    one head go over the queries together, so that the dq they accumulate stays in the
    L2 cache."""
    held: int = 0
    """Chunks of 64 columns of the keys that each of two warpgroups holds in registers,
    as in the forward pass."""

    def __post_init__(self) -> None:
        _check(
            self, consumers=(1, 2), block_q=(64, 128), block_k=(64, 128), held=range(5)
        )
        _check_least(self, splits=1)
        if self.held and self.consumers != BACKWARD_CONSUMERS:
            raise ValueError(
                f"held {self.held} with consumers={self.consumers}, expected 2 of them"
            )

    @property
    def shared(self) -> bool:
        """True if both warpgroups work on the same keys."""
        return self.block_k == ROWS

    @property
    def stages(self) -> int:
        """Pipeline stages of queries in shared memory."""
        return 2 if self.block_k == ROWS else 3

    @property
    def gradient_stages(self) -> int:
        """Pipeline stages of output gradients in shared memory."""
        return self.stages - 1


def _check(blocks: object, **allowed: tuple[int, ...] | range) -> None:
    for name, values in allowed.items():
        value = getattr(blocks, name)
        if value not in values:
            raise ValueError(f"{name} {value!r}, expected one of {list(values)}")


def _check_least(blocks: object, **limits: int) -> None:
    for name, least in limits.items():
        value = getattr(blocks, name)
        if not isinstance(value, int):
            raise ValueError(f"{name} {value!r}, expected an integer")
        if value < least:
            raise ValueError(f"{name} {value}, expected at least {least}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicGpuConfig:
    """Block sizes of the Hopper kernels."""

    forward: ForwardBlocks | None = None
    """The forward pass; None takes the heuristic's choice."""
    backward: BackwardBlocks | None = None
    """The backward pass; None takes the heuristic's choice."""

    def __post_init__(self) -> None:
        for name, kind in (("forward", ForwardBlocks), ("backward", BackwardBlocks)):
            value = getattr(self, name)
            if not isinstance(value, kind | None):
                raise TypeError(f"{name} {value!r}, expected {kind.__name__} or None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The static shape of a call, after padding.

    Axes: R packed rows of the batch, T packed queries and S packed keys per row, N
        query heads, K key/value heads, H head dim.
    """

    rows: int
    """R, packed rows."""
    queries: int
    """T, packed queries per row."""
    keys: int
    """S, packed keys per row."""
    max_seqs: int
    """B, maximum number of sequences per row."""
    heads: int
    """N."""
    kv_heads: int
    """K."""
    head_dim: int
    """H, one of `FORWARD_DIMS`, or the first of `LATENT_DIMS`. Arrays may have fewer
    columns, from head dim 96 on: the others are zero in shared memory."""
    dtype: jnp.dtype
    """bfloat16 or float16; in the forward pass also float8_e4m3fn."""
    value_dim: int | None = None
    """Hv; None: the same."""
    page: int | None = None
    """G, tokens of a page, where keys and values lie in pages."""
    num_pages: int = 0
    """P, pages of a layer."""

    @property
    def groups(self) -> int:
        """Query heads that read one key/value head."""
        return self.heads // self.kv_heads

    @property
    def fp8(self) -> bool:
        """Whether the tensor cores multiply 8-bit numbers."""
        return self.dtype.itemsize == 1

    @property
    def width(self) -> int:
        """Columns of a chunk of a head: a swizzled line of up to 128 bytes."""
        return math.gcd(self.head_dim, 128 // self.dtype.itemsize)

    @property
    def chunks(self) -> int:
        """Chunks of a head."""
        return self.head_dim // self.width

    @property
    def score_chunks(self) -> int:
        """Those of queries and keys that hold more than padding."""
        latent = (self.head_dim, self.value_size) == LATENT_GRADIENT_DIMS
        return LATENT_DIMS[0] // CHUNK if latent else self.chunks

    @property
    def value_size(self) -> int:
        """Columns of a head of the values."""
        return self.value_dim or self.head_dim

    @property
    def value_chunks(self) -> int:
        """Chunks of a head of the values."""
        return self.value_size // self.width

    def value_tiles(self, block_k: int) -> tuple[int, int, int]:
        """Chunks of the values of a step, their rows and columns.

        8-bit values lie transposed, tokens side by side: the tensor cores read 8-bit
        operands along the sum alone.
        """
        if self.fp8:
            width = math.gcd(block_k, 128)
            return block_k // width, self.value_size, width
        return self.value_chunks, block_k, self.width


def query_buffers(problem: Problem) -> int:
    """Query tiles in shared memory: also the next one's, if it fits."""
    return 2 if problem.head_dim <= 128 else 1


def forward_smem(problem: Problem, blocks: ForwardBlocks) -> int:
    """Shared memory of a block of the forward kernel, barriers included."""
    rows = ROWS * blocks.consumers
    queries = smem_bytes((rows, problem.head_dim), problem.dtype)
    keys = smem_bytes((blocks.block_k, problem.head_dim), problem.dtype)
    values = smem_bytes((blocks.block_k, problem.value_size), problem.dtype)
    buffers = 1 if blocks.consumers == 1 else query_buffers(problem)
    return buffers * queries + blocks.stages * (keys + values) + 2048


def backward_smem(problem: Problem, blocks: BackwardBlocks) -> int:
    """Shared memory of a block of the backward kernel, barriers included."""
    if blocks.consumers == 1:
        tiles = 4 + 2 * blocks.stages  # two of its own, two a step, weights and ds
        return tiles * smem_bytes((ROWS, problem.head_dim), problem.dtype) + 2048
    queries, gradients = (
        smem_bytes((blocks.block_q, columns), problem.dtype)
        for columns in (problem.head_dim, problem.value_size)
    )
    columns = problem.head_dim + problem.value_size
    keys = smem_bytes((blocks.block_k, columns), problem.dtype)
    # Ds twice, or weights and ds.
    scores = 2 * smem_bytes((blocks.block_q, blocks.block_k), problem.dtype)
    sums = smem_bytes((BACKWARD_CONSUMERS * ROWS, CHUNK), jnp.float32)
    stats = smem_bytes((blocks.stages, 2, blocks.block_q), jnp.float32)
    steps = blocks.stages * queries + blocks.gradient_stages * gradients
    return keys + steps + scores + sums + stats + 2048


def forward_blocks(
    problem: Problem,
    device: DeviceSpec,
    alibi: bool = False,
    window: tuple[int | None, int | None] = (None, None),
) -> ForwardBlocks:
    """The forward blocks of a problem that was never tuned.

    Returns:
        Tiles of 128 queries, with head dim 64 of 192 without ALiBi; of 64, if the
        sequences are so short on average (token budget over maximum number of
        sequences) that larger tiles would be half empty, if all such tiles fit on the
        GPU at once, or if a window is narrow (`is_narrow`), and there are not so many
        sequences that blocks search long for theirs. Under a narrow window four query
        heads that read the same keys share them. With head dims 128 and 256 half of
        the columns of the queries are held in registers: all of them were 5% slower
        with head dim 128, two of three 0.6% slower than none with 192 (trials), and
        with 256 they do not fit. With 8-bit
        operands steps are half as long and take half of the room: more of them are
        under way, or they have more keys where all steps but the last are whole.
    """
    queries = math.ceil(problem.queries / problem.max_seqs)
    keys = math.ceil(problem.keys / problem.max_seqs)
    if problem.fp8:
        whole = window == (None, None) and keys >= _FP8_LONG
        if problem.head_dim == 128 and whole:
            return ForwardBlocks(block_k=192, stages=3)
        return ForwardBlocks(block_k=128 if problem.head_dim <= 128 else 64, stages=4)
    if problem.head_dim == 64:
        tiles = problem.rows * problem.heads * math.ceil(problem.queries / ROWS)
        few = tiles <= _SHORT_BLOCKS * device.num_sms and keys <= _SHORT_KEYS
        short, narrow = queries <= _SHORT or few, is_narrow(window)
        if narrow and not short and problem.groups % 4 == 0 and not alibi:
            return ForwardBlocks(consumers=4, heads=4, block_k=64, stages=4)
        if (short or narrow) and problem.max_seqs <= MOST_SHORT_SEQUENCES:
            return ForwardBlocks(consumers=1, block_k=64, overlap=False)
        return ForwardBlocks(consumers=3 if queries > 512 and not alibi else 2)
    if problem.head_dim in (96, 128, LATENT_DIMS[0]):
        latent = problem.head_dim == LATENT_DIMS[0]
        return ForwardBlocks(held=0 if alibi or latent else 1)
    return ForwardBlocks(block_k=64, overlap=False, ping_pong=True, held=2)


def is_narrow(window: tuple[int | None, int | None]) -> bool:
    """Whether a query sees so few keys that tiles of 64 tokens multiply far fewer."""
    left, right = window
    return left is not None and right is not None and left + right <= _NARROW


def backward_blocks(
    problem: Problem,
    device: DeviceSpec,
    alibi: bool = False,
    relative: bool = False,
    window: tuple[int | None, int | None] = (None, None),
) -> BackwardBlocks:
    """The backward blocks of a problem that was never tuned.

    Returns:
        The tiles for the head dim, with a block per query head for long sequences. For
        short ones, narrow windows, or if all tiles fit on the GPU at once, the kernel
        for short sequences, except with ALiBi.
    """
    if relative or (_is_short_backward(problem, device, window) and not alibi):
        return BackwardBlocks(consumers=1, block_q=ROWS, block_k=ROWS)
    is_long = problem.queries >= _LONG * problem.max_seqs
    block_q, block_k = BACKWARD_TILES[problem.head_dim]
    return BackwardBlocks(
        block_q=block_q,
        block_k=block_k,
        splits=problem.groups if is_long else 1,
        held=1 if problem.head_dim == 256 and not alibi else 0,
    )


def _is_short_backward(
    problem: Problem, device: DeviceSpec, window: tuple[int | None, int | None]
) -> bool:
    """True if blocks of one warpgroup are faster."""
    if problem.head_dim != 64 or problem.max_seqs > MOST_SHORT_SEQUENCES:
        return False
    queries = math.ceil(problem.queries / problem.max_seqs)
    keys = math.ceil(problem.keys / problem.max_seqs)
    tiles = problem.heads * math.ceil(problem.queries / ROWS)
    tiles += problem.kv_heads * math.ceil(problem.keys / ROWS)
    few = problem.rows * tiles <= _SHORT_BACKWARD_BLOCKS * device.num_sms
    few = few and max(keys, queries * problem.groups) <= _SHORT_KEYS
    return max(queries, keys) <= _SHORT_BACKWARD or few or is_narrow(window)
