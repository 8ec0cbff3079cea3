"""Layer normalization of a sum: ``norm(x + residual)``, read once and written once."""

from pallas_kernels.layer_norm.api import layer_norm
from pallas_kernels.layer_norm.config import LayerNormConfig


__all__ = ["LayerNormConfig", "layer_norm"]
