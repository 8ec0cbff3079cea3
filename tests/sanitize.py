"""Every kernel under compute-sanitizer, at one small test of each.

`python -m tests.sanitize` runs on a machine with a GPU, and ends within three minutes.
Each test has a process of its own, as a kernel that hangs must end no other, and gets a
line as it ends. Tests compare values too, as the sanitizer may change when a kernel's
parts run. Kernels of XLA and cuBLAS, of which a process has many, are not checked.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


__all__ = ["TESTS", "check", "excerpt", "main"]

_FOLDER = "tests/pallas_kernels"
TESTS = {
    "fp8_operands": "fp8_operands/test_gpu.py::test_what_is_not_finite",
    "layer_norm": (
        "layer_norm/test_gpu.py::test_values_repeat_and_are_right[bert_base_130-direct]"
    ),
    "matmul": "matmul/test_matmul_gpu.py::test_rows_past_the_end_are_not_read[none]",
    "dense": "matmul/test_dense_gpu.py::test_gradients",
    "quantized_matmul": "quantized_matmul/test_gpu.py::test_every_number_is_exact",
    "decode_layer": "decode_layer/test_gpu.py::test_tiny_layers[changes1]",
    "segment_mean": (
        "segment_mean/test_gpu.py::test_values_repeat_and_are_right[bert_base_256]"
    ),
    "encode_layer": (
        "encode_layer/test_gpu.py::test_values_repeat_and_are_right[8-False]"
    ),
    "scaled_matmul": "scaled_matmul/test_gpu.py::test_sums_are_promoted",
    "paged_attention": "paged_attention/test_gpu.py::test_tokens_without_a_page",
    "tile_sparse_matmul": "tile_sparse_matmul/test_gpu.py::test_gradients_of_a_layer",
    "attention": "varlen_attention/test_mosaic_gpu_gpu.py::test_other_head_dims[96]",
    "relative_attention": (
        "varlen_attention/test_relative_mosaic_gpu.py::test_on_a_gpu[150-v3]"
    ),
    "relative_gradients": (
        "varlen_attention/test_backward_relative.py::test_on_a_gpu[few-v3]"
    ),
}
"""The test that stands for each kernel."""
TOOLS = ("memcheck", "racecheck")
_FAULT = 99
"""Exit code of the sanitizer when it has found something."""
_OPTIONS = (
    *("--error-exitcode", str(_FAULT)),
    *("--kernel-name", "kns=mosaic_gpu_kernel"),  # how the names of ours end
    *("--report-api-errors", "no"),  # jax asks for what a driver may not know
    *("--target-processes", "application-only"),  # and not ptxas
)
_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    # An allocation for each array: past its end memcheck finds no other array.
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    # Launches one by one: racecheck gave up in programs of several kernels, perhaps for
    # the CUDA graphs that these are.
    "XLA_FLAGS": "--xla_gpu_enable_command_buffer=",
}
_ALLOCATE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context, memory = ctypes.c_void_p(), ctypes.c_void_p()
for error in (
    cuda.cuInit(0),
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
    cuda.cuCtxSetCurrent(context),
    cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1024)),
):
    if error:
        raise SystemExit(f"CUDA error {error}")
print("1 passed")
"""
"""A program that does what a virtual machine may refuse a sanitizer."""


def find_sanitizer() -> str:
    """The program: of the CUDA toolkit, or of a wheel in this environment.

    Raises:
        FileNotFoundError: It is in neither.
    """
    toolkit = shutil.which(
        "compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin"
    )
    wheels = (Path(path) / "nvidia" for path in sys.path)
    found = [
        toolkit,
        *(
            str(path)
            for folder in wheels
            for path in folder.glob("**/compute-sanitizer")
        ),
    ]
    for path in found:
        if path and os.access(path, os.X_OK) and Path(path).is_file():
            return path
    raise FileNotFoundError(
        "compute-sanitizer is not on PATH; install the CUDA toolkit or the wheel "
        "nvidia-cuda-sanitizer-api"
    )


def check(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """Runs a test under the sanitizer.

    Args:
        command: The sanitizer, its options and what it runs.
        seconds: Time after which the process is ended.

    Returns:
        The verdict in a word or two, and the output.
    """
    process = subprocess.Popen(
        command,
        env=os.environ | _ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its children end with it
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            output, _ = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:  # its kernel holds it
            output = "the process does not end\n"
        return "out of time", output
    if process.returncode == _FAULT:
        return "faults", output
    # Tests that are skipped say nothing of a kernel.
    if process.returncode or not re.search(r"\b[1-9]\d* passed", output):
        return "not passed", output
    return "clean", output


def excerpt(output: str) -> str:
    """What the sanitizer says, which comes between other lines, and the last lines."""
    lines = output.splitlines()
    found = [line for line in lines[:-20] if line.startswith("=========")]
    return "".join(f"    {line}\n" for line in found[:40] + lines[-20:])


def main() -> None:
    """Prints a table of verdicts; fails unless all are clean."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize")
    parser.add_argument(
        "kernels", nargs="*", default=list(TESTS), help="all by default"
    )
    parser.add_argument("--tool", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--seconds", type=float, default=170, help="limit of all")
    parser.add_argument("--processes", type=int, default=10, help="at a time")
    arguments = parser.parse_args()
    sanitizer = find_sanitizer()
    end = time.perf_counter() + arguments.seconds
    verdict, output = check((sanitizer, sys.executable, "-c", _ALLOCATE), 30)
    if verdict != "clean":
        raise SystemExit(f"{sanitizer} does not work on this machine:\n{output}")

    def run(tool: str, kernel: str) -> bool:
        start = time.perf_counter()
        node = f"{_FOLDER}/{TESTS[kernel]}"
        pytest = f"{sys.executable} -m pytest -x -q -n 0 -m gpu {node}".split()
        verdict, output = check(
            (sanitizer, "--tool", tool, *_OPTIONS, *pytest), max(1.0, end - start)
        )
        took = time.perf_counter() - start
        output = "" if verdict == "clean" else excerpt(output)
        print(
            f"{kernel:20} {tool:10} {verdict:12} {took:4.0f} s\n{output}",
            end="",
            flush=True,
        )
        return verdict == "clean"

    with concurrent.futures.ThreadPoolExecutor(arguments.processes) as pool:
        pairs = [
            (tool, kernel) for tool in arguments.tool for kernel in arguments.kernels
        ]
        clean = list(pool.map(lambda pair: run(*pair), pairs))
    if not all(clean):
        raise SystemExit(f"{clean.count(False)} of {len(clean)} are not clean")


if __name__ == "__main__":
    main()
