"""Text generation with continuous batching, serving, and encoding of texts."""

from jaxscale.inference.encoder.encode_plan import EncodePlan
from jaxscale.inference.encoder.encoder import Encoder
from jaxscale.inference.engine.async_engine import AsyncEngine
from jaxscale.inference.engine.config import EngineConfig
from jaxscale.inference.engine.engine import Engine
from jaxscale.inference.engine.hosts import HostLost
from jaxscale.inference.engine.kv_scales import measure_kv_scales
from jaxscale.inference.engine.make import follow, make_engine
from jaxscale.inference.llm import GREEDY, LLM, Generation, generate
from jaxscale.inference.output import Output, TokenLogprobs
from jaxscale.inference.request import (
    Draining,
    EngineDead,
    Guide,
    InvalidRequest,
    Overloaded,
    Request,
    SamplingParams,
)
from jaxscale.public import listing


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
    "HostLost",
    "InvalidRequest",
    "Output",
    "Overloaded",
    "Request",
    "SamplingParams",
    "TokenLogprobs",
    "follow",
    "generate",
    "make_engine",
    "measure_kv_scales",
]

__dir__ = listing(__all__)
