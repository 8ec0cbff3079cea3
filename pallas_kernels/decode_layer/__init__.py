"""A decoder layer of few requests, from one attention to the next, in one launch."""

from pallas_kernels.decode_layer.api import (
    LayerWeights,
    NextProjection,
    PagedCache,
    as_residual,
    attending_decode_layer,
    declines,
    decode_layer,
    from_residual,
    padded_queries,
    places_of_new_tokens,
    rotation,
    tensor_parallel_decode_layer,
)
from pallas_kernels.decode_layer.config import DecodeLayerConfig
from pallas_kernels.decode_layer.shares import SharedTileSparse, share


__all__ = [
    "DecodeLayerConfig",
    "LayerWeights",
    "NextProjection",
    "PagedCache",
    "SharedTileSparse",
    "as_residual",
    "attending_decode_layer",
    "declines",
    "decode_layer",
    "from_residual",
    "padded_queries",
    "places_of_new_tokens",
    "rotation",
    "share",
    "tensor_parallel_decode_layer",
]
