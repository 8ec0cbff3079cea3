"""An OpenAI-compatible HTTP server for decoders and encoders.

``jaxscale serve PATH`` starts it from the command line. It needs the extra ``serve``.
"""

from jaxscale.checks import pip_install
from jaxscale.public import listing


try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"the HTTP server needs {error.name}: {pip_install('serve')}"
    ) from error

from jaxscale.inference.server.app import create_app
from jaxscale.inference.server.backend import (
    Backend,
    EngineBackend,
    Load,
    TextModel,
)
from jaxscale.inference.server.config import ServerConfig
from jaxscale.inference.server.run import background, serve
from jaxscale.inference.server.served_encoder import ServedEncoder


__all__ = [
    "Backend",
    "EngineBackend",
    "Load",
    "ServedEncoder",
    "ServerConfig",
    "TextModel",
    "background",
    "create_app",
    "serve",
]

__dir__ = listing(__all__)
