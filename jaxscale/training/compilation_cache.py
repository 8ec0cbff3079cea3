"""Compiled programs of a run, for its next start."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxscale.checks import private_folder


@contextlib.contextmanager
def programs_in(folder: Path, platform: str) -> Iterator[None]:
    """Within it, what JAX compiles for a GPU is looked up in `folder`, and put there.

    On a GPU, XLA times several forms of each matrix product at every start and takes
    the fastest, and another one rounds otherwise. A run that goes on with the programs
    that it began with is spared that, and the time to compile. A cache that JAX has
    already (``JAX_COMPILATION_CACHE_DIR``, which a supervisor sets) does the same and
    stays. On a CPU programs depend on no timing.

    Args:
        folder: Of the run; to load a program can run any code, so only the user may
            write there.
        platform: Of the devices.

    Raises:
        ValueError: others may write to the folder, or it cannot be made.
    """
    if platform != "gpu" or jax.config.jax_compilation_cache_dir:
        yield
        return
    jax.config.update("jax_compilation_cache_dir", str(private_folder(folder)))
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
