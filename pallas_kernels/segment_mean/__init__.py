"""The mean of each packed sequence."""

from pallas_kernels.segment_mean.api import segment_mean


__all__ = ["segment_mean"]
