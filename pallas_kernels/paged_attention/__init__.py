"""Attention of a decoding step over a paged cache of keys and values."""

from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.config import PagedAttentionConfig


__all__ = ["PagedAttentionConfig", "paged_attention"]
