"""Attention of rows that are one sequence each: cuDNN's kernels, ours, or XLA."""

from pallas_kernels.attention.api import attention


__all__ = ["attention"]
