"""Attention without sequence packing: cuDNN's kernels, ours, or XLA."""

from pallas_kernels.attention.api import attention


__all__ = ["attention"]
