"""Variable-length attention over packed sequences."""

from pallas_kernels.varlen_attention.api import (
    varlen_attention,
    varlen_attention_segment_ids,
)
from pallas_kernels.varlen_attention.config import (
    BackwardBlocks,
    ForwardBlocks,
    MosaicGpuConfig,
)
from pallas_kernels.varlen_attention.paged import paged_varlen_attention
from pallas_kernels.varlen_attention.quantize import quantize_heads
from pallas_kernels.varlen_attention.reference import varlen_attention_reference
from pallas_kernels.varlen_attention.relative import (
    RelativeBias,
    RelativeBuckets,
    position_terms,
)
from pallas_kernels.varlen_attention.segments import (
    cu_seqlens_from_segment_ids,
    positions_from_cu_seqlens,
    segment_ids_from_cu_seqlens,
)
from pallas_kernels.varlen_attention.xla import XlaConfig


__all__ = [
    "BackwardBlocks",
    "ForwardBlocks",
    "MosaicGpuConfig",
    "RelativeBias",
    "RelativeBuckets",
    "XlaConfig",
    "cu_seqlens_from_segment_ids",
    "paged_varlen_attention",
    "position_terms",
    "positions_from_cu_seqlens",
    "quantize_heads",
    "segment_ids_from_cu_seqlens",
    "varlen_attention",
    "varlen_attention_reference",
    "varlen_attention_segment_ids",
]
