"""Hopper implementation of paged attention: what surrounds the kernel.

Axes: B sequences, R new tokens each, N query heads, K key/value heads, H head dim, L
layers, P pages, G tokens of a page, W pages of a row's table.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import (
    DeviceSpec,
    check_hopper,
    check_smem,
    keep_mark,
    smem_bytes,
    unmarked,
)
from pallas_kernels.mosaic.counters import zeros_like_no_others
from pallas_kernels.paged_attention import mosaic_gpu_kernel
from pallas_kernels.paged_attention.config import (
    BLOCK,
    PagedAttentionConfig,
    default_split,
)
from pallas_kernels.paged_attention.inputs import Inputs, Scores, one_batch
from pallas_kernels.paged_attention.operands import in_order_of_keys
from pallas_kernels.paged_attention.problem import ROWS, WARPS, Problem
from pallas_kernels.partition import check_local


HEAD_DIMS = (64, 128, 256)
PAGES = (8, 16, 32, 64, 128, 256)
MOST_ROWS = 1024
"""Rows that the search for a split can tell apart."""
MOST_SLOTS = 8
"""Slots of a team by default: with more on its way, each request waits the longer."""
MOST_QUERIES = 16
"""New tokens of a row: the code that stores them has no loop."""


def paged_attention(
    x: Inputs,
    scores: Scores,
    *,
    config: PagedAttentionConfig | None,
    device: DeviceSpec | None,
) -> tuple[Float[Array, "B R N H"], Float[Array, "L P 2 K G H"]]:
    """See `pallas_kernels.paged_attention.paged_attention`; the arguments are checked.

    Raises:
        Unsupported: the device, types or shapes do not fit.
    """
    device = check_hopper(device, "paged_attention")
    check_local("paged_attention", *x)
    problem = make_problem(x, config or PagedAttentionConfig(), device)
    results = _jitted(problem, scores, device, x)
    return keep_mark(results, *(a for a in x if a is not None))


def make_problem(
    x: Inputs, config: PagedAttentionConfig, device: DeviceSpec
) -> Problem:
    """The shapes of a call as the kernel sees them.

    Raises:
        Unsupported: the kernel does not take them.
    """
    rows, queries, heads, head_dim = x.q.shape
    _, num_pages, _, kv_heads, page, _ = x.pages.shape
    group = heads // kv_heads
    split = config.split or default_split(rows, kv_heads, page, device.num_sms)
    _check(x, group, config.teams, split)
    problem = Problem(
        rows=rows,
        queries=queries,
        group=group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page=page,
        width=x.table.shape[1],
        num_pages=num_pages,
        dtype=x.q.dtype,
        page_dtype=x.pages.dtype,
        split=split,
        teams=config.teams or (1 if head_dim == HEAD_DIMS[-1] else 2),
        slots=0,
    )
    teams = problem.teams
    tile = smem_bytes((BLOCK, head_dim), x.pages.dtype)
    small = (
        2 * smem_bytes((teams, queries, 2, head_dim), x.q.dtype)
        + smem_bytes((teams, 2, problem.split_pages), jnp.int32)
        + 4096  # barriers, tickets and what lies between
    )
    rows = problem.query_rows
    small += 2 * smem_bytes((teams, rows, head_dim), x.q.dtype)
    small += smem_bytes((teams, rows, BLOCK), x.q.dtype)
    small += smem_bytes((teams, 2, WARPS, rows), jnp.float32)
    most = (device.smem_bytes - small) // (teams * tile)
    slots = config.slots or min(max(2, most), MOST_SLOTS)
    check_smem(small + teams * slots * tile, device, "paged_attention")
    return dataclasses.replace(problem, slots=slots)


def _check(x: Inputs, group: int, teams: int | None, split: int) -> None:
    rows, queries, _, head_dim = x.q.shape
    layers, num_pages, _, kv_heads, page, _ = x.pages.shape
    dtype = x.pages.dtype
    lines = layers * num_pages * 2 * kv_heads
    narrow = x.kv_scales is not None
    reasons = {
        f"types {x.q.dtype.name}, {x.kv.dtype.name} and {dtype.name} of q, kv and"
        " pages, the kernel takes bfloat16 or float16 for all, or fp8 for pages": (
            x.q.dtype in (jnp.bfloat16, jnp.float16)
            and x.kv.dtype == x.q.dtype
            and (narrow or dtype == x.q.dtype)
        ),
        f"fp8 pages of {page} tokens and head dim {head_dim}, the kernel takes"
        f" multiples of {BLOCK} and head dims from 128": (
            not narrow or (page % BLOCK == 0 and head_dim >= 128)
        ),
        f"teams=3 with {dtype.name} pages, head dim {head_dim} and {queries * group} "
        "queries a key/value head, the kernel takes float8_e4m3fn, 128 and 8": (
            teams != 3 or (narrow and head_dim == 128 and queries * group <= 8)
        ),
        f"head dim {head_dim}, the kernel takes {HEAD_DIMS}": head_dim in HEAD_DIMS,
        f"pages of {page} tokens, the kernel takes {PAGES}": page in PAGES,
        f"{queries} new tokens of {group} query heads a key/value head, the kernel"
        f" takes {ROWS} together and {MOST_QUERIES} tokens": (
            queries * group <= ROWS and queries <= MOST_QUERIES
        ),
        f"{rows} rows, the kernel takes {MOST_ROWS}": rows <= MOST_ROWS,
        f"splits of {split} tokens and pages of {page}, one must be a multiple"
        " of the other and 85 pages the most": (
            split // page <= 85 and 0 in (split % page, page % split)
        ),
        f"{lines} lines of pages, the kernel counts to 2**31": lines < 2**31,
        f"a table of {rows} x {x.table.shape[1]} pages of {page}": (
            math.prod(x.table.shape) * page < 2**31
        ),
    }
    for reason, fits in reasons.items():
        if not fits:
            raise Unsupported(f"paged_attention: {reason}; use implementation='xla'")


# The layers of a model are traced and lowered once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _jitted(
    problem: Problem, scores: Scores, device: DeviceSpec, x: Inputs
) -> tuple[Array, Array]:
    x = one_batch(x)
    given, structure = jax.tree.flatten(x)

    def run(counters: Array, *given: Array) -> tuple[Array, Array]:
        return _run(problem, scores, device, structure.unflatten(given), counters)

    size = 1 + problem.rows * problem.kv_heads
    counters = zeros_like_no_others(size, x.num_new[0], x.layer.reshape(()))
    return unmarked(run)(counters, *given)


def _as_fp16(q: Array) -> Array:
    """Queries in the type of the products; bfloat16 may be out of its range."""
    limit = float(jnp.finfo(jnp.float16).max)
    return jnp.clip(q.astype(jnp.float32), -limit, limit).astype(jnp.float16)


def _run(
    problem: Problem, scores: Scores, device: DeviceSpec, x: Inputs, counters: Array
) -> tuple[Array, Array]:
    p = problem
    q = x.q.reshape(p.rows, p.queries, p.kv_heads, p.group, p.head_dim)
    q = q.swapaxes(1, 2).reshape(-1, p.head_dim)  # [B K rows, H]
    if p.narrow:
        q = _as_fp16(q[:, in_order_of_keys(p.head_dim)])
    pages = jax.new_ref(x.pages.reshape(-1, p.page, p.head_dim))
    out = mosaic_gpu_kernel.run(
        p,
        scores,
        device,
        q,
        x.kv,
        x.table.reshape(-1),
        x.lengths,
        x.num_new,
        x.layer.reshape(1),
        None if x.kv_scales is None else x.kv_scales.reshape(-1),
        pages,
        jax.new_ref(counters),
    )
    out = out.reshape(p.rows, p.kv_heads, p.queries, p.group, p.head_dim)
    out = out.swapaxes(1, 2).reshape(x.q.shape)
    return out, jax.freeze(pages).reshape(x.pages.shape)
