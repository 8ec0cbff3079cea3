"""Attention without packing as a problem, and which kernel should be faster."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.varlen_attention.segments import Window


_LEAST_TOKENS: Mapping[tuple[str, int], tuple[int, int]] = {
    ("fwd", 64): (1024, 2048),
    ("fwd", 128): (8192, 2048),
    ("fwd_bwd", 64): (1024, 1024),
    ("fwd_bwd", 128): (1024, 1024),
}
"""Sequence length from which our kernel is used, without and with a causal mask, by
pass and head dim.

From benchmarks/results/nvidia_h200/varlen_attention.json, the pattern ``constant``
against cudnn_padded: the chosen cases take 0.81 to 1.01 of cuDNN's time. Shorter
sequences take up to 1.13 (4,096 without a mask and head dim 128: 1.00; 512 with head
dim 64, forward: 0.97), head dim 256 from 0.93 to 1.10, where longer rows than 4,096 are
of the kernel before. Most of these measurements include kernels that made a
table of the sequences, a few microseconds each, which unpacked calls no longer have.
Other head dims are padded to the next of these; with a window nothing was measured, and
the rule is the same."""


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
        if measured not in _LEAST_TOKENS:
            return (
                f"cuDNN is faster with heads of {self.head_dim}, the kernel with those"
                f" of {sorted({head_dim for _, head_dim in _LEAST_TOKENS})}"
            )
        least = _LEAST_TOKENS[measured][self.causal]
        if self.queries < least:
            return (
                f"cuDNN is faster with rows of {self.queries} tokens, the kernel from"
                f" {least} on"
            )
        return None
