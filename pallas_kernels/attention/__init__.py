"""Attention of rows that are one sequence each: cuDNN's kernels, ours, or XLA."""

from pallas_kernels.attention.api import attention
from pallas_kernels.attention.xla import attention_mask, masked_attention


__all__ = ["attention", "attention_mask", "masked_attention"]
