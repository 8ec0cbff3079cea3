"""Paged attention: attention of a decode step over a paged KV cache."""

from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.config import PagedAttentionConfig


__all__ = ["PagedAttentionConfig", "paged_attention"]
