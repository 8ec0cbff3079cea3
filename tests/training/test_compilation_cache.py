"""Where the compiled programs of a run are kept."""

import jax
import numpy as np
import pytest

from jaxscale.training.compilation_cache import programs_in
from pallas_kernels.mosaic.kernels_ahead import AHEAD


@pytest.fixture(autouse=True)
def keep_all():
    """Programs that compile in no time, too."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def run(power):
    jax.block_until_ready(jax.jit(lambda x: x**power)(np.arange(3, dtype=np.float32)))


def entries(folder):
    return sorted(path.name for path in folder.glob("*-cache"))


def test_programs_are_kept_and_found(tmp_path):
    folder = tmp_path / "programs"
    with programs_in(folder):
        run(5)
    first = entries(folder)
    assert any(name.startswith("jit__lambda") for name in first)
    run(6)  # outside
    assert entries(folder) == first
    jax.clear_caches()
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*-cache")}
    with programs_in(folder):
        run(5)
    assert entries(folder) == first
    assert written == {path: path.stat().st_mtime_ns for path in written}
    assert jax.config.jax_compilation_cache_dir is None


def test_kernels_compiled_ahead_are_no_programs_of_the_run(tmp_path):
    folder = tmp_path / "programs"
    with programs_in(folder) as cached:
        assert not cached
        (folder / f"{AHEAD}-0123-cache").touch()
    with programs_in(folder) as cached:
        assert not cached
        run(7)
    with programs_in(folder) as cached:
        assert cached


def test_a_folder_that_others_write_to_is_refused(tmp_path):
    folder = tmp_path / "programs"
    with programs_in(folder):
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with (
        pytest.raises(
            ValueError, match=rf"others may write to {folder}, and .* delete"
        ),
        programs_in(folder),
    ):
        pass


def test_an_error_leaves_no_cache_behind(tmp_path):
    with pytest.raises(KeyError), programs_in(tmp_path / "programs"):
        raise KeyError
    assert jax.config.jax_compilation_cache_dir is None


def test_a_cache_that_jax_has_is_kept(tmp_path):
    own = str(tmp_path / "own")
    jax.config.update("jax_compilation_cache_dir", own)
    try:
        with programs_in(tmp_path / "programs"):
            assert jax.config.jax_compilation_cache_dir == own
            run(7)
        assert jax.config.jax_compilation_cache_dir == own
        assert not (tmp_path / "programs").exists()
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
