"""Text generation (sampling, batched decoding) and encoding of texts."""

from jaxscale.inference.encoder import EncodePlan, Encoder
from jaxscale.inference.generate import GREEDY, generate
from jaxscale.inference.sampling import SamplingConfig, filter_logits, sample


__all__ = [
    "GREEDY",
    "EncodePlan",
    "Encoder",
    "SamplingConfig",
    "filter_logits",
    "generate",
    "sample",
]
