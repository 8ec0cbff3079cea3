"""Attention without packing as a problem, and which kernel should be faster."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.varlen_attention.segments import Window


_TOKENS: Mapping[tuple[str, int], tuple[range, range]] = {
    ("fwd", 64): (range(512, sys.maxsize), range(2048, sys.maxsize)),
    ("fwd", 128): (range(4096, sys.maxsize), range(2048, sys.maxsize)),
    ("fwd", 256): (range(4096, 4097), range(2048, 4097)),
    ("fwd_bwd", 64): (range(1024, sys.maxsize), range(1024, sys.maxsize)),
    ("fwd_bwd", 128): (range(1024, sys.maxsize), range(1024, sys.maxsize)),
}
"""Sequence lengths with which our kernel is used, without and with a causal mask, by
pass and head dim.

From benchmarks/results/nvidia_h200/varlen_attention.json, the pattern ``constant``
against cudnn_padded: the chosen cases take 0.81 to 1.01 of cuDNN's time. Shorter
sequences take up to 1.13; with head dim 256 gradients take from 0.96 to 1.10 in no
order, and longer rows were measured of the kernel before alone. Many of these
measurements include kernels that made a table of the sequences, a few microseconds
each, which unpacked calls no longer have. Other head dims are padded to the next of
these; with a window nothing was measured, and the rule is the same."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Attention of a batch of unpacked sequences."""

    batch: int
    """Batch size."""
    queries: int
    """Queries per sequence."""
    keys: int
    """Keys per sequence."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Features of a head."""
    dtype: jnp.dtype
    """Type of all operands."""
    causal: bool
    """Causal mask."""
    window: Window
    """Keys that a query attends to on each side."""
    softcap: float | None
    """Bound on the scores."""
    sinks: bool
    """Attention sinks: one more key per head, whose value is zero."""
    alibi: bool
    """ALiBi: a penalty on distance."""
    gradient: bool
    """The gradient is computed too."""

    @classmethod
    def of(cls, q: Any, k: Any, **variant: Any) -> "Problem":
        """The problem of queries [B,T,N,H] and keys [B,S,K,H], or of their shapes."""
        batch, queries, heads, head_dim = q.shape
        return cls(
            batch=batch,
            queries=queries,
            keys=k.shape[1],
            heads=heads,
            kv_heads=k.shape[2],
            head_dim=head_dim,
            dtype=jnp.dtype(q.dtype),
            **variant,
        )

    @property
    def key(self) -> str:
        """Key in the tables of tuned configs, which have no such entries so far."""
        return (
            f"b={self.batch} t={self.queries} s={self.keys} n={self.heads}"
            f" k={self.kv_heads} h={self.head_dim} {self.dtype.name}"
            + " causal" * self.causal
            + " gradient" * self.gradient
        )

    def declines(self, device: DeviceSpec) -> str | None:
        """Say why cuDNN is expected to be faster than the Hopper kernel, or None."""
        del device
        measured = "fwd_bwd" if self.gradient else "fwd", self.head_dim
        if measured not in _TOKENS:
            return (
                f"cuDNN is faster with heads of {self.head_dim}, the kernel with those"
                f" of {sorted({dim for name, dim in _TOKENS if name == measured[0]})}"
            )
        tokens = _TOKENS[measured][self.causal]
        if self.queries not in tokens:
            until = "on" if tokens.stop == sys.maxsize else f"to {tokens.stop - 1}"
            return (
                f"cuDNN is faster with rows of {self.queries} tokens, the kernel from"
                f" {tokens.start} {until}"
            )
        return None
