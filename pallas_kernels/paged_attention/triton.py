"""Paged attention in Triton, for NVIDIA GPUs from Ampere on: the launches.

XLA writes the new tokens into the pages; `triton_kernels` reads them. On Hopper the
Mosaic GPU kernel comes first.

Axes: B sequences, R new tokens each, N query heads, K key/value heads, H head dim, L
layers, P pages, G tokens of a page, W pages of a row's table, Z splits of a row, M rows
of a tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Unsupported, no_config
from pallas_kernels.mosaic import DeviceSpec, keep_mark
from pallas_kernels.paged_attention.config import PagedAttentionConfig
from pallas_kernels.paged_attention.inputs import Inputs, Scores, one_batch
from pallas_kernels.paged_attention.xla import append
from pallas_kernels.partition import check_local
from pallas_kernels.triton_call import check_triton, triton_call


SPLIT = 512
"""Tokens of a split, the same for every batch.

Large batches would be 3 to 5% faster with 1,024, and lose as much or more with 256;
one sequence has programs for half of an H200.
"""
_BLOCK = 64  # tokens of a step
_MOST_LINES = 64  # queries of a key/value head: registers hold their sums
_WIDEST = 256  # head dim


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
    device = check_triton(device, "paged_attention")
    no_config("paged_attention", config, "Triton")
    check_local("paged_attention", *x)
    _check(x, device)
    x = one_batch(x)
    results = _attend(x._replace(pages=append(x)), scores)
    return keep_mark(results, *(a for a in x if a is not None))


def _check(x: Inputs, device: DeviceSpec) -> None:
    _, queries, heads, head_dim = x.q.shape
    lines = queries * heads // x.pages.shape[3]
    narrow = x.kv_scales is not None
    reasons = {
        f"types {x.q.dtype.name} and {x.pages.dtype.name} of q and pages, the Triton"
        " kernel takes bfloat16 or float16 for both, or fp8 for pages": (
            x.q.dtype in (jnp.bfloat16, jnp.float16)
            and (narrow or x.pages.dtype == x.q.dtype)
        ),
        f"fp8 pages on {device.name}, the Triton kernel reads them from compute"
        " capability 8.9 on": not narrow or device.compute_capability >= (8, 9),
        f"head dim {head_dim}, the Triton kernel takes at most {_WIDEST}": (
            head_dim <= _WIDEST
        ),
        f"{lines} queries a key/value head, the Triton kernel takes at most"
        f" {_MOST_LINES}": lines <= _MOST_LINES,
    }
    for reason, fits in reasons.items():
        if not fits:
            raise Unsupported(f"paged_attention: {reason}; use implementation='xla'")


def constants(x: Inputs, scores: Scores) -> tuple[dict[str, Any], dict[str, Any]]:
    """The constants of both kernels, and those of the first alone."""
    _, queries, heads, head_dim = x.q.shape
    _, num_pages, _, kv_heads, page, _ = x.pages.shape
    common = {
        "queries": queries,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "page": page,
        "width": x.table.shape[1],
        "split": SPLIT,
        "splits": -(-x.capacity // SPLIT),
        "block_m": max(16, _power_of_two(queries * heads // kv_heads)),
        "block_h": max(16, _power_of_two(head_dim)),
    }
    first = {
        "num_pages": num_pages,
        "block": _BLOCK,
        "scale": scores.scale,
        "softcap": scores.softcap or 0.0,
        "window": scores.window or 0,
        "has_scales": x.kv_scales is not None,
    }
    return common, first


def _attend(x: Inputs, scores: Scores) -> tuple[Array, Array]:
    rows, kv_heads, head_dim = x.q.shape[0], x.pages.shape[3], x.q.shape[3]
    common, first = constants(x, scores)
    lines = (rows, kv_heads, common["splits"], common["block_m"])
    fp32 = jnp.float32
    partial = triton_call(
        "paged_attention.attend_split",
        (
            x.q,
            x.pages,
            jnp.reshape(x.layer, (1,)),
            x.table,
            x.lengths,
            x.num_new,
            jnp.zeros((1,), fp32) if x.kv_scales is None else x.kv_scales,
        ),
        [jax.ShapeDtypeStruct(s, fp32) for s in ((*lines, head_dim), lines, lines)],
        grid=(rows, kv_heads, common["splits"]),
        num_warps=4,
        num_stages=3 if head_dim <= 128 else 2,
        constants=common | first,
    )
    (out,) = triton_call(
        "paged_attention.join_splits",
        (*partial, x.lengths, x.num_new),
        [jax.ShapeDtypeStruct(x.q.shape, x.q.dtype)],
        grid=(rows, kv_heads),
        num_warps=4,
        num_stages=2,
        constants=common,
    )
    return out, x.pages


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
