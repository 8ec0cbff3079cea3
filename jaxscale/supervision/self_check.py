"""The self-check of a host that may have caused a fault.

Run it by ``python -m`` with the output directory and a time limit in seconds. It exits
with 1, and says why on its last line, if the host must not be used: files read back
differ, a repeated checksum differs, the GPUs do not answer, or ``jaxscale diagnose``
finds one that is slow or wrong. If JAX uses no GPUs, that check, and the seconds that
it takes to start, are skipped.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping


_BYTES = 2**24
_GPU_SECONDS = 60.0
_START_SECONDS = 10.0
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def check(directory: str) -> str | None:
    """What is wrong with this host; None if nothing is found."""
    data = os.urandom(_BYTES)
    sums = {(hashlib.sha256(data).digest(), zlib.crc32(data)) for _ in range(3)}
    if len(sums) > 1:
        return "the same bytes have different sums: processor or memory is broken"
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            if file.read() != data:
                return f"a file in {directory} does not hold what was written"
    except OSError as error:
        return f"{directory} cannot be written: {error.strerror}"
    return None


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """The GPUs of this host that JAX would use here.

    Raises:
        RuntimeError: the driver of the GPUs does not answer.
    """
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        found = subprocess.run(
            query, check=True, capture_output=True, text=True, timeout=_GPU_SECONDS
        )
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"nvidia-smi failed with code {error.returncode}") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"nvidia-smi did not answer within {_GPU_SECONDS:g} s"
        ) from None
    platforms = environ.get("JAX_PLATFORMS") or "cuda"
    wanted = {"cuda", "gpu"} & set(platforms.split(","))
    if not wanted or not any(map(importlib.util.find_spec, _PLUGINS)):
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    count = len(found.stdout.split())
    if visible is None:
        return count
    return min(
        count, len([d for d in visible.split(",") if d.strip() not in ("", "-1")])
    )


def check_gpus(count: int, seconds: float) -> str | None:
    """The faults that ``jaxscale diagnose`` finds on the GPUs of this host."""
    command = [sys.executable, "-m", "jaxscale", "diagnose", "--no-host"]
    # A host is excluded for good only if there is no doubt.
    command += ["--least-share", "0.5"]
    command += ["--gpus", f"{count}", "--seconds", f"{seconds:g}"]
    command += ["--measure-seconds", f"{seconds / 2:g}"]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(found.stdout, end="")
    lines = found.stdout.strip().splitlines()
    if found.returncode == 1 and lines:
        return lines[-1]
    # If it could not run, nothing is known.
    return None


def main(directory: str, seconds: float) -> int:
    """Check this host; the exit code."""
    begun = time.monotonic()
    try:
        problem = check(directory)
        if problem is None and (count := count_gpus()):
            left = seconds - (time.monotonic() - begun) - _START_SECONDS
            problem = check_gpus(count, max(left, _START_SECONDS))
    except RuntimeError as error:
        problem = str(error)
    print(problem or "nothing found")
    return problem is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
