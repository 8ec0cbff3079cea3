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
from pallas_kernels.decode_layer.shares import SharedTileSparse, share


__all__ = [
    "DecodeLayerConfig",
    "LayerWeights",
    "NextProjection",
    "SharedTileSparse",
    "as_residual",
    "declines",
    "decode_layer",
    "from_residual",
    "rotation",
    "share",
    "tensor_parallel_decode_layer",
]
