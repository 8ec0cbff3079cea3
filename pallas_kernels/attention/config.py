"""Attention of whole rows as a problem, and which kernel is expected to be faster."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.varlen_attention.segments import Window


__all__ = ["Problem"]

_HEAD_DIMS = (64, 128)
_LEAST_TOKENS = 2048
# benchmarks/results/nvidia_h200/varlen_attention.json, rows of equal length beside
# cudnn_padded, forward and with the gradient: from 2,048 tokens on, heads of 64 and of
# 128 take 0.81 to 1.01 of cuDNN's time. Shorter rows take up to 1.16, heads of 256 up
# to 1.10. Heads of other sizes are padded to the next of these.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Attention of a batch of rows that are one sequence each."""

    batch: int
    """Rows."""
    queries: int
    """Queries of a row."""
    keys: int
    """Keys of a row."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Features of a head."""
    dtype: jnp.dtype
    """Type of all operands."""
    causal: bool
    """A query sees no later key."""
    window: Window
    """Keys that a query sees on each side."""
    softcap: float | None
    """Bound on the scores."""

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
        """Key in the tables of tuned configs, which have none of it so far."""
        return (
            f"b={self.batch} t={self.queries} s={self.keys} n={self.heads}"
            f" k={self.kv_heads} h={self.head_dim} {self.dtype.name}"
            + " causal"
            * self.causal
        )

    def declines(self, device: DeviceSpec) -> str | None:
        """Say why cuDNN is expected to be faster than the Hopper kernel, or None."""
        del device
        if self.head_dim not in _HEAD_DIMS:
            return (
                f"cuDNN is faster with heads of {self.head_dim}, the kernel with those"
                f" of {_HEAD_DIMS}"
            )
        if self.queries < _LEAST_TOKENS:
            return (
                f"cuDNN is faster with rows of {self.queries} tokens, the kernel from"
                f" {_LEAST_TOKENS} on"
            )
        return None
