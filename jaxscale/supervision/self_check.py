"""The self-check of a host that may have caused a fault: ``python -m`` it, directory.

It exits with 1, and says why on its last line, where the host must not be used: files
do not come back as they were written, the same sum is not the same twice, or the GPUs
do not answer.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zlib


_BYTES = 2**24
_GPU_SECONDS = 60.0


def check(directory: str) -> str | None:
    """What is wrong with this host; None if nothing is known.

    Args:
        directory: The output directory of the run.
    """
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
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        subprocess.run(query, check=True, capture_output=True, timeout=_GPU_SECONDS)
    except subprocess.CalledProcessError as error:
        return f"nvidia-smi failed with code {error.returncode}"
    except subprocess.TimeoutExpired:
        return f"nvidia-smi did not answer within {_GPU_SECONDS:g} s"
    return None


if __name__ == "__main__":
    problem = check(sys.argv[1])
    print(problem or "nothing found")
    sys.exit(problem is not None)
