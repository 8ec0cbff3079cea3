"""Runs of two processes on this machine that find each other by JAX's own service."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from tests.ports import free_port


def join(coordinator: str, rank: str) -> None:
    """What each process does first; it then has two CPU devices of four."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(coordinator, 2, int(rank))


def run_two(module: str, *arguments: str) -> list[tuple[Any, str]]:
    """What two processes print last, as JSON, and what they write to stderr.

    Args:
        module: To run, with the arguments coordinator, rank and `arguments`.
        arguments: The same for both.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, coordinator, str(rank), *arguments],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [(json.loads(out.splitlines()[-1]), errors) for out, errors in outputs]
