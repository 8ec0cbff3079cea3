"""Processes of PyTorch, one a GPU, that a benchmark in JAX starts and listens to.

Each runs ``python -m benchmarks.MODULE JOB RANK``; the first prints a line of JSON for
each result as it comes, so that what hangs costs only what would have come after it.
"""

import contextlib
import json
import os
import pathlib
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any


NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""Environment that keeps NCCL and PyTorch from NVLink multicast."""

START_SECONDS = 150.0
"""Longest time until the first result."""

RESULT_SECONDS = 40.0
"""Longest time from one result to the next."""


# --- The command's side ---------------------------------------------------------------


def run(
    module: str,
    job: Mapping[str, Any],
    *,
    size: int,
    backend: str = "nccl",
    python: str = sys.executable,
    start_seconds: float = START_SECONDS,
    result_seconds: float = RESULT_SECONDS,
) -> list[dict[str, Any]]:
    """Start the processes, read what the first one prints, and end them.

    Args:
        module: Of `benchmarks`; its children get the job with `size`, `backend` and a
            free `port`, and their rank.
        job: What to do, as JSON.
        size: Number of processes.
        backend: Of `torch.distributed`: ``nccl``, or ``gloo`` without GPUs.
        python: What runs them.
        start_seconds: Longest time until the first result.
        result_seconds: Longest time from one result to the next.

    Returns:
        The lines of JSON until one with ``done``, or until the end.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {**job, "size": size, "backend": backend, "port": port}
    environment = {**os.environ, **NO_MULTICAST, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        children = [
            subprocess.Popen(
                [python, "-m", f"benchmarks.rivals.{module}", str(path), str(rank)],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
                env=environment,
                cwd=pathlib.Path(__file__).parents[2],
            )
            for rank in range(size)
        ]
        arrived: queue.Queue = queue.Queue()
        reader = threading.Thread(target=_read, args=(children[0], arrived))
        reader.start()
        try:
            lines = list(_lines(arrived, start_seconds, result_seconds))
        finally:
            for child in children:
                child.kill()
            for child in children:
                child.wait()
            reader.join()
    print(f"-- torch, {size} processes: {len(lines)} results", flush=True)
    return lines


def _read(child: subprocess.Popen, arrived: queue.Queue) -> None:
    with child.stdout or contextlib.nullcontext([]) as pipe:
        for line in pipe:
            arrived.put(line)
    arrived.put(None)


def _lines(
    arrived: queue.Queue, start_seconds: float, result_seconds: float
) -> Iterator[dict[str, Any]]:
    """What the first child prints, until it ends or is silent for too long."""
    patience = start_seconds
    while True:
        try:
            line = arrived.get(timeout=patience)
        except queue.Empty:
            print(f"-- torch: no result for {patience:.0f} s, ended", flush=True)
            return
        if line is None:
            return
        if not line.startswith("{"):
            print(line, end="", flush=True)
            continue
        result = json.loads(line)
        if "done" in result:
            return
        patience = result_seconds
        yield result


# --- The children's side --------------------------------------------------------------


def meet(job: Mapping[str, Any], rank: int) -> Any:
    """Join the other processes; the device of this one, ``"cpu"`` with gloo."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if job["backend"] == "nccl" else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group(
        job["backend"],
        init_method=f"tcp://127.0.0.1:{job['port']}",
        rank=rank,
        world_size=job["size"],
        **({} if device == "cpu" else {"device_id": device}),
    )
    return device


def say(rank: int, line: Mapping[str, Any]) -> None:
    """Print a result, once."""
    if rank == 0:
        print(json.dumps(line), flush=True)


def part(rank: int) -> None:
    """End: from here on nothing matters, even if it hangs."""
    import torch.distributed as dist

    say(rank, {"done": True})
    dist.barrier()
    dist.destroy_process_group()
