"""A decoder layer of few requests, from one attention to the next, in one launch."""

from pallas_kernels.decode_layer.api import (
    LayerWeights,
    NextProjection,
    as_residual,
    declines,
    decode_layer,
    from_residual,
    rotation,
    tensor_parallel_decode_layer,
)
from pallas_kernels.decode_layer.config import DecodeLayerConfig


__all__ = [
    "DecodeLayerConfig",
    "LayerWeights",
    "NextProjection",
    "as_residual",
    "declines",
    "decode_layer",
    "from_residual",
    "rotation",
    "tensor_parallel_decode_layer",
]
