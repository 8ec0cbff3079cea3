"""Text generation (sampling, batched decoding), serving, and encoding of texts."""

from jaxscale.inference.async_engine import AsyncEngine
from jaxscale.inference.clients import EngineDead
from jaxscale.inference.encode_plan import EncodePlan
from jaxscale.inference.encoder import Encoder
from jaxscale.inference.engine import Engine
from jaxscale.inference.generate import GREEDY, generate
from jaxscale.inference.llm import LLM, Generation, make_engine
from jaxscale.inference.memory import EngineConfig
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
    "LLM",
    "AsyncEngine",
    "Draining",
    "EncodePlan",
    "Encoder",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "Generation",
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
    "make_engine",
    "sample",
]
