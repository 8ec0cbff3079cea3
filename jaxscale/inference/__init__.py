"""Text generation (sampling, batched decoding), serving, and encoding of texts."""

from jaxscale.inference.async_engine import AsyncEngine
from jaxscale.inference.clients import EngineDead
from jaxscale.inference.encode_plan import EncodePlan
from jaxscale.inference.encoder import Encoder
from jaxscale.inference.engine import Engine
from jaxscale.inference.hosts import HostLost
from jaxscale.inference.kv_scales import measure_kv_scales
from jaxscale.inference.llm import (
    GREEDY,
    LLM,
    Generation,
    follow,
    generate,
    make_engine,
)
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
