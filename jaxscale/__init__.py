"""Large Transformers that train and serve faster on NVIDIA GPUs, in JAX.

Five published systems become one library; `pallas_kernels` holds their GPU kernels.

1. **Flux**: tensor-parallel matmuls that hide their communication.
2. **ByteTransformer**: models that never compute on padding (encoders, decoders).
3. **Flover**: serving in which requests join and leave at every token.
4. **MegaScale**: pretraining at scale (sharding, pipelines, training, supervision).
5. **Tile-wise sparsity**: pruned models that run faster than dense ones.

Subpackages, lowest first: `jaxscale.supervision`, which needs no jax,
`jaxscale.sharding`, `jaxscale.nn`, `jaxscale.models`, then
`jaxscale.training`, `jaxscale.inference` and `jaxscale.pruning` side by side,
`jaxscale.recipes`, which composes these three, and `jaxscale.cli`.
"""

import importlib
from types import ModuleType


__all__ = ["__version__"]

__version__ = "0.1.0"
"""Version of the distribution."""

_SUBPACKAGES = (
    "cli",
    "inference",
    "models",
    "nn",
    "observability",
    "pruning",
    "recipes",
    "sharding",
    "supervision",
    "training",
)


def __getattr__(name: str) -> ModuleType:
    """The subpackage `name`, imported when it is first asked for."""
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; what it has is in its "
        f"packages: {', '.join(_SUBPACKAGES)}"
    )


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBPACKAGES])
