"""Compiles programs for H200s on a machine without a GPU, driver or CUDA toolkit.

This is the fourth ring of kernel tests: what XLA makes of a program (copies, donated
buffers, collectives, memory) and what ptxas makes of a kernel (registers, spills).
There are no times, and XLA's autotuner does not run: a real GPU takes its products from
cuBLAS or from Triton, so look at both.

The plugin that compiles is in ``.cuda``, where `make install` puts it. It is on the
path of a child process alone: elsewhere it would look for a GPU. What was compiled
is kept in ``.cuda_cache``, under a hash of the lowered program and the options.
"""

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax

from jaxscale.training.planning.compiled import (
    H200_TARGET,
    donate_in_place,
    target_devices,
)
from tests.hlo import Written, written
from tests.lowering import MULTICAST_MARK, MulticastRefused


ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / ".cuda"
CACHE = ROOT / ".cuda_cache"

type Products = Literal["cublas", "triton"]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What ptxas says of a Mosaic kernel."""

    name: str
    registers: int
    """Of a thread, before warpgroups hand registers to each other."""
    spilled: int
    """Bytes that are stored and loaded again."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program compiled for H200s; sizes are those of one device, in bytes."""

    hlo: str
    """The scheduled program."""
    arguments: int
    outputs: int
    aliased: int
    """Outputs that take the place of donated arguments."""
    temporaries: int
    thunks: tuple[str, ...]
    """Kind and name of what the host starts, in its order. What a command buffer (a
    CUDA graph) starts follows it, indented."""
    kernels: tuple[Kernel, ...]
    """In the order in which they were compiled, equal ones once."""
    serialized: tuple[str, ...] = ()
    """What ptxas says of wgmma instructions that it makes wait for each other."""

    def count(self, operation: str) -> int:
        """How often an operation stands in the program; asynchronous ones count once.

        Args:
            operation: Its name in HLO: ``"all-gather"``, ``"copy"``, ``"custom-call"``.
        """
        return len(re.findall(rf"\s{re.escape(operation)}(?:-start)?\(", self.hlo))

    def sizes(self, operation: str) -> list[int]:
        """Numbers of elements of the results of an operation, the largest first."""
        found = re.findall(rf"= \w+\[([\d,]*)\]\S* {re.escape(operation)}\(", self.hlo)
        sizes = [math.prod(map(int, n.split(","))) for n in found if n]
        return sorted(sizes, reverse=True)

    def written(self, at_least_bytes: int) -> list[Written]:
        """What the program writes besides its results; see `tests.hlo.written`."""
        return written(self.hlo, at_least_bytes)


def compile_for_h200(
    program: Callable[..., tuple[Any, tuple[Any, ...]]],
    *arguments: Any,
    count: int = 1,
    products: Products = "cublas",
    flags: tuple[str, ...] = (),
) -> Compiled:
    """Compiles a program for H200s that need not exist.

    Args:
        program: A function of a module, which a child process calls with the list of
            devices and ``arguments``; it returns a jitted function and what that takes,
            as ``jax.ShapeDtypeStruct`` with shardings.
        arguments: What JSON holds.
        count: How many devices there are.
        products: Where XLA takes its matrix products from.
        flags: More flags of XLA, such as those of a preset of `jaxscale.xla_flags`.

    Raises:
        FileNotFoundError: The plugin is not installed.
        RuntimeError: The program does not compile, or a kernel of it uses NVLink
            multicast; with the traceback.
    """
    if sys.platform != "linux":
        import pytest

        pytest.skip("the plugin that compiles is for Linux")
    if not PLUGIN.is_dir():
        raise FileNotFoundError(f"{PLUGIN} has no CUDA plugin; run `make install`")
    request = [program.__module__, program.__qualname__, arguments, count]
    answer = _child(products, flags).ask(request)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    kernels = tuple(Kernel(**kernel) for kernel in answer.pop("kernels"))
    lists = {name: tuple(answer[name]) for name in ("thunks", "serialized")}
    return Compiled(**answer | lists | {"kernels": kernels})


class _Child:
    """A process with the plugin, which compiles one program after the other."""

    def __init__(self, products: Products, more: tuple[str, ...]) -> None:
        triton = str(products == "triton").lower()
        flags = f"--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm={triton}"
        path = [str(ROOT), str(PLUGIN), os.environ.get("PYTHONPATH", "")]
        settings = {
            "XLA_FLAGS": " ".join((flags, *more)),
            "JAX_PLATFORMS": "cpu",
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "PYTHONPATH": os.pathsep.join(path),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.compiled"],
            cwd=ROOT,
            env=os.environ | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def close(self) -> None:
        with self.process:  # which closes the pipes and waits
            self.process.kill()

    def ask(self, request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            return {"error": "the process that compiles has ended"}
        return json.loads(line)


_child = functools.cache(_Child)


# --- In the child ---------------------------------------------------------------------


def kernels_in(ptxas: str) -> list[dict[str, Any]]:
    """The kernels in the messages of ptxas."""
    pattern = (
        r"Function properties for (\w+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill"
        r" loads\n.*?Used (\d+) registers"
    )
    return [
        {
            "name": name.removesuffix("_mosaic_gpu_kernel"),
            "registers": int(registers),
            "spilled": int(stored) + int(loaded),
        }
        for name, stored, loaded, registers in re.findall(pattern, ptxas, re.DOTALL)
    ]


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    """What the compiler writes meanwhile, to the file of descriptor 1, as one text."""
    found: list[str] = []
    with tempfile.TemporaryFile("w+") as file:
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield found
        finally:
            os.dup2(before, 1)
            os.close(before)
        file.seek(0)
        found.append(file.read())


def _answer(module: str, name: str, arguments: list[Any], count: int) -> dict[str, Any]:
    program = getattr(importlib.import_module(module), name)
    fn, shapes = program(target_devices(count), *arguments)
    lowered = fn.lower(*shapes)
    donate_in_place(lowered.compiler_ir())
    text = lowered.as_text()
    if MULTICAST_MARK in text:
        raise MulticastRefused(f"a kernel holds {MULTICAST_MARK!r}")
    version = importlib.metadata.version("jax-cuda13-pjrt")
    options = lowered._lowering._compiler_options_kvs  # of `jax.jit`
    key = repr((version, os.environ["XLA_FLAGS"], *options, count, text, H200_TARGET))
    path = CACHE / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    if path.exists() and "serialized" in (kept := json.loads(path.read_text())):
        return kept
    with tempfile.TemporaryDirectory() as dump:
        with messages() as found:
            compiled = lowered.compile({"xla_dump_to": dump})
        (said,) = found
        kernels = kernels_in(said)
        # There is a second file where passes changed what the first says.
        file = sorted(Path(dump).glob("*.thunk_sequence*.txt"))[-1]
        thunks = re.sub(r"\d+: (\w+) *\[.*?\] *(\S*).*", r"\1 \2", file.read_text())
    memory = compiled.memory_analysis()
    answer = {
        # Kernels are long, and are data.
        "hlo": re.sub(r"backend_config=.*", _trips, compiled.as_text()),
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "thunks": [line.rstrip() for line in thunks.splitlines()],
        "kernels": kernels,
        "serialized": re.findall(r"\(C75\d\d\).*", said),
    }
    CACHE.mkdir(exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(answer))
    partial.replace(path)
    return answer


def _trips(config: re.Match[str]) -> str:
    """What stays of a backend's configuration: how often a loop goes around."""
    return "".join(re.findall(r'"known_trip_count":\{.*?\}', config[0]))


def _serve() -> None:
    """Answers requests, one a line."""
    import traceback

    from pallas_kernels import mosaic

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed is no answer
    for line in sys.stdin:
        try:
            with mosaic.use_device(mosaic.H200):
                answer = _answer(*json.loads(line))
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
