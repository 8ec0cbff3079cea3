"""Bodies of calls, in the form of OpenAI's API, with vLLM's names for what it lacks."""

from jaxscale.inference.server.schema.body import Body
from jaxscale.inference.server.schema.chat import (
    Chat,
    Detokenize,
    Message,
    NamedTool,
    Tokenize,
)
from jaxscale.inference.server.schema.completions import Completion
from jaxscale.inference.server.schema.encoders import Embedding, Rerank, Score
from jaxscale.inference.server.schema.generation import GenerationBody
from jaxscale.inference.server.schema.messages import Messages
from jaxscale.inference.server.schema.responses import Responses


__all__ = [
    "Body",
    "Chat",
    "Completion",
    "Detokenize",
    "Embedding",
    "GenerationBody",
    "Message",
    "Messages",
    "NamedTool",
    "Rerank",
    "Responses",
    "Score",
    "Tokenize",
]
