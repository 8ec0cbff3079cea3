"""The one version of jax whose private names the interpreter patches."""

import jax


JAX_VERSION = "0.11.2"

ADVICE = (
    f"; tests/interpreter patches private names of jax {JAX_VERSION}: compare "
    "jax/_src/pallas/mosaic_gpu/interpret of both versions, adapt EXPECTED and the "
    "patches in tests/interpreter/session.py, then JAX_VERSION in version.py"
)


def check_version() -> None:
    """Raise unless jax is the version that the patches are written for."""
    if jax.__version__ != JAX_VERSION:
        raise RuntimeError(f"jax {jax.__version__}, expected {JAX_VERSION}" + ADVICE)
