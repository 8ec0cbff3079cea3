"""Test configuration shared by the tests, the doctests and the notebooks.

The environment is set before jax is imported: eight simulated CPU devices, and enough
threads for the callbacks of the Mosaic GPU interpreter, one a device, which block while
they wait for each other and would starve on a small machine.
"""

import gc
import importlib.util
import logging
import os
import re
import signal
from collections.abc import Generator, Iterator
from pathlib import Path


os.environ.setdefault("NPROC", "64")
os.environ["HF_HUB_OFFLINE"] = "1"  # names of models come from its cache alone

# Shapes and types of public functions are checked at run time where beartype is there.
if importlib.util.find_spec("beartype") is not None:
    from tests.typechecker import check_packages

    check_packages("jaxscale", "pallas_kernels")

import jax
import pytest
from _pytest.doctest import DoctestModule
from jax._src.xla_bridge import backends_are_initialized
from jax.experimental.compilation_cache import compilation_cache


jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


TESTS = Path(__file__).parent / "tests"

pytest_plugins = ["tests.resume"]

# Not tests, and they import what a machine for GPU tests may lack.
collect_ignore = ["tests/fixtures", "tests/typechecker.py"]

# Most of the time goes to compiling programs that run for milliseconds. The fusion
# emitters set up MLIR for each fusion, which takes four times as long as all the rest.
COMPILE_FAST = (
    "--xla_backend_optimization_level=0",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
)
# On a GPU, XLA would compile and time dozens of ways to take each product of a
# reference, of which cuBLAS knows a good one: minutes for tests of milliseconds.
CUBLAS_CHOOSES = (
    "--xla_gpu_autotune_level=0",
    "--xla_gpu_enable_triton_gemm=false",
)


def asks_for_gpus(config: pytest.Config) -> bool:
    """Whether `-m` selects tests for GPUs."""
    selected = config.option.markexpr
    return "gpu" in selected and "not gpu" not in selected


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--exhaustive``."""
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run also the cases that `tests.tiers` marks as exhaustive",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keep to the CPU, also where there are GPUs, unless GPU tests are asked for.

    Tolerances and the eight devices of the other tests are those of the CPU.
    """
    if backends_are_initialized():
        raise pytest.UsageError("a conftest.py computes: too early for flags of XLA")
    given = os.environ.get("XLA_FLAGS", "")
    if asks_for_gpus(config):
        os.environ["XLA_FLAGS"] = " ".join([*CUBLAS_CHOOSES, given])
        if "PYTEST_XDIST_WORKER" in os.environ:  # one of many on a GPU
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
        os.environ["XLA_FLAGS"] = " ".join([given, *COMPILE_FAST])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file without tests for GPUs where those are asked for.

    All the files take longer to import than most tests take.
    """
    if not asks_for_gpus(config) or collection_path.suffix != ".py":
        return None
    return not re.search(r"mark\.(multi)?gpu\b", collection_path.read_text()) or None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for doctests in the packages alone: tests have none."""
    found = yield
    if file_path.is_relative_to(TESTS):
        return [part for part in found if not isinstance(part, DoctestModule)]
    return found


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skip the tests whose GPUs this machine lacks; leave out exhaustive cases."""
    if not config.option.exhaustive:
        more = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=more)
        left = set(more)
        items[:] = [item for item in items if item not in left]
    needs = {"gpu": 1, "multigpu": 2}
    found = sum(d.platform == "gpu" for d in jax.devices())
    for item in items:
        for marker, count in needs.items():
            if found < count and item.get_closest_marker(marker):
                item.add_marker(
                    pytest.mark.skip(reason=f"needs {count} GPU(s), found {found}")
                )


def pytest_collection_finish() -> None:
    """Spare the modules, which stay, the search for garbage, and search less often.

    Tracing makes objects by the hundred thousand, nearly all without cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


LOGS = ("jaxscale", "jax", "absl")


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Give the next test the environment, signal handlers and log levels of this one.

    What is made to be a process of its own, as a command is, leaves others.
    """
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    handlers = {number: signal.getsignal(number) for number in numbers}
    levels = {log: log.level for log in map(logging.getLogger, LOGS)}
    environ = dict(os.environ)
    yield
    for log, level in levels.items():
        log.setLevel(level)
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler is not None:
            signal.signal(number, handler)
    for name in {*environ, *os.environ} - {"PYTEST_CURRENT_TEST"}:
        if name not in environ:
            del os.environ[name]
        elif os.environ.get(name) != environ[name]:
            os.environ[name] = environ[name]


@pytest.fixture
def no_shape_hook() -> Iterator[None]:
    """Switch the jaxtyping checks off, to reach an op's own error messages."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Take equal programs from a cache: every call of `fit` compiles anew."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
