"""Text generation (sampling, batched decoding), serving, and encoding of texts."""

from jaxscale.inference.encode_plan import EncodePlan
from jaxscale.inference.encoder import Encoder
from jaxscale.inference.generate import GREEDY, generate
from jaxscale.inference.request import (
    Draining,
    Guide,
    InvalidRequest,
    Output,
    Overloaded,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from jaxscale.inference.sampling import SamplingConfig, filter_logits, sample


__all__ = [
    "GREEDY",
    "Draining",
    "EncodePlan",
    "Encoder",
    "Guide",
    "InvalidRequest",
    "Output",
    "Overloaded",
    "Request",
    "SamplingConfig",
    "SamplingParams",
    "TokenLogprobs",
    "filter_logits",
    "generate",
    "sample",
]
