"""Text generation: sampling and batched decoding."""

from jaxscale.inference.generate import GREEDY, generate
from jaxscale.inference.sampling import SamplingConfig, filter_logits, sample


__all__ = ["GREEDY", "SamplingConfig", "filter_logits", "generate", "sample"]
