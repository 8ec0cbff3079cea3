"""A cache of a run's compiled programs, for its next start."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxscale.checks import private_folder
from pallas_kernels.mosaic.kernels_ahead import AHEAD


@contextlib.contextmanager
def programs_in(folder: Path) -> Iterator[bool]:
    """Context in which JAX caches its compiled programs in `folder`.

    On a GPU, XLA autotunes each matmul at every start, and another choice rounds
    differently. A resumed run that uses its first programs avoids that, and the time to
    compile. A cache that JAX has already (``JAX_COMPILATION_CACHE_DIR``, which a
    supervisor sets) does the same and is kept. On a CPU programs do not depend on
    timing, but on the machine: keep them no longer than the process.

    Args:
        folder: Directory of the run; loading a program can run any code, so only the
            user may write there.

    Yields:
        Whether the cache has programs, beside those of kernels compiled ahead.

    Raises:
        ValueError: others may write to the folder, or it cannot be made.
    """
    if given := jax.config.jax_compilation_cache_dir:
        yield _has_programs(Path(given))
        return
    jax.config.update("jax_compilation_cache_dir", str(private_folder(folder)))
    compilation_cache.reset_cache()
    try:
        yield _has_programs(folder)
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


def _has_programs(folder: Path) -> bool:
    return any(not path.name.startswith(AHEAD) for path in folder.glob("*"))
