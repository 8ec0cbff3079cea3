"""Every kernel under compute-sanitizer, at one small test of each.

`python -m tests.sanitize` runs on a machine with a GPU. Each test has a process of its
own, with a time limit: racecheck is slow, and a kernel that hangs ends no other. Tests
compare values too, as the sanitizer may change when a kernel's parts run.
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


__all__ = ["TESTS", "check", "main"]

_FOLDER = "tests/pallas_kernels"
TESTS = {
    "layer_norm": "layer_norm/test_gpu.py::test_gradients",
    "matmul": "matmul/test_matmul_gpu.py::test_rows_past_the_end_are_not_read[none]",
    "dense": "matmul/test_dense_gpu.py::test_gradients",
    "quantized_matmul": "quantized_matmul/test_gpu.py::test_every_number_is_exact",
    "scaled_matmul": "scaled_matmul/test_gpu.py::test_sums_are_promoted",
    "move_pages": "move_pages/test_gpu.py::test_pages_move[gptj_6b_n16_c264]",
    "paged_attention": "paged_attention/test_gpu.py::test_tokens_without_a_page",
    "tile_sparse_matmul": "tile_sparse_matmul/test_gpu.py::test_gradients_of_a_layer",
    "attention": "varlen_attention/test_mosaic_gpu_gpu.py::test_other_head_dims[96]",
    "relative_attention": (
        "varlen_attention/test_relative_mosaic_gpu.py::test_on_a_gpu[150-v3]"
    ),
}
"""The test that stands for each kernel."""
TOOLS = ("memcheck", "racecheck")
_FAULT = 99
"""Exit code of the sanitizer when it has found something."""


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
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its children end with it
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "out of time", process.communicate()[0]
    if process.returncode == _FAULT:
        return "faults", output
    # Tests that are skipped say nothing of a kernel.
    if process.returncode or not re.search(r"\b[1-9]\d* passed", output):
        return "not passed", output
    return "clean", output


def main() -> None:
    """Prints a table of verdicts; fails unless all are clean."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize")
    parser.add_argument(
        "kernels", nargs="*", default=list(TESTS), help="all by default"
    )
    parser.add_argument("--tool", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--seconds", type=float, default=160, help="limit of a test")
    parser.add_argument("--processes", type=int, default=8, help="at a time")
    arguments = parser.parse_args()
    sanitizer = find_sanitizer()

    def run(tool: str, kernel: str) -> bool:
        start = time.perf_counter()
        node = f"{_FOLDER}/{TESTS[kernel]}"
        pytest = f"{sys.executable} -m pytest -x -q -n 0 -m gpu {node}".split()
        options = ("--tool", tool, "--error-exitcode", str(_FAULT))
        verdict, output = check((sanitizer, *options, *pytest), arguments.seconds)
        took = time.perf_counter() - start
        if verdict != "clean":
            output = "".join(f"    {line}\n" for line in output.splitlines()[-40:])
        else:
            output = ""
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
