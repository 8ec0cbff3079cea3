"""An encoder layer of few tokens, from one attention to the next, in one launch."""

from pallas_kernels.encode_layer.api import EncodeLayerWeights, encode_layer


__all__ = ["EncodeLayerWeights", "encode_layer"]
