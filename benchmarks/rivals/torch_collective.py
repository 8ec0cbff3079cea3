"""The PyTorch baselines of `benchmarks.collective_matmul`, one process per GPU.

``torch_nccl`` calls the collective and the matmul one after the other,
``torch_async_tp`` the fused operators of PyTorch's asynchronous tensor parallelism
(``torch.ops.symm_mem``), which copy with the copy engine while they multiply. Each is
timed as a series of calls and as a replay of one CUDA graph, and the faster counts.

The command starts ``python -m benchmarks.rivals.torch_collective`` once for every GPU,
with all problems; the first process prints a line of JSON for each result as it comes,
so that what hangs costs only what would have come after it.
"""

import importlib.util
import json
import os
import pathlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.rivals import torch_processes
from benchmarks.rivals.torch_processes import say


NAMES = ("torch_nccl", "torch_async_tp")

START_SECONDS, RESULT_SECONDS = 150.0, 40.0
"""Longest time until the first result, and from one to the next."""

SECONDS = 0.06
"""Length of what is timed at once, and of the rest after it: those of `loops`."""

MAX_SETS = 16
L2_BYTES = 60e6
BF16_BYTES = 2
SAMPLED = 64


# --- The command's side ---------------------------------------------------------------


def measure(
    problems: Sequence[Mapping[str, Any]], names: Sequence[str], samples: int
) -> list[dict[str, Any]]:
    """Time problems in processes of PyTorch.

    Args:
        problems: params of `benchmarks.collective_matmul`.
        names: which of `NAMES`.
        samples: times to take of each.

    Returns:
        For each problem its results by name, as `benchmarks.measure.harness.Results`.
    """
    from benchmarks.measure import timing
    from benchmarks.measure.harness import NoMeasurement

    if not names:
        return [{} for _ in problems]
    if importlib.util.find_spec("torch") is None or not timing.on_gpu():
        reason = NoMeasurement("torch with a GPU is not there")
        return [dict.fromkeys(names, reason) for _ in problems]
    found: list[dict[str, Any]] = [{} for _ in problems]
    for tp in sorted({params["tp"] for params in problems}):
        places = [i for i, params in enumerate(problems) if params["tp"] == tp]
        some = [dict(problems[i]) for i in places]
        for place, result in zip(
            places, run_children(some, names, samples, tp), strict=True
        ):
            found[place] = result
    return found


def run_children(
    problems: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    samples: int,
    size: int,
    backend: str = "nccl",
    python: str = sys.executable,
) -> list[dict[str, Any]]:
    """Start the processes, read what the first one prints, and end them."""
    from benchmarks.measure.harness import Measurement, NoMeasurement

    job = {
        "problems": [dict(params) for params in problems],
        "names": list(names),
        "samples": samples,
    }
    lines = torch_processes.run(
        "torch_collective",
        job,
        size=size,
        backend=backend,
        python=python,
        start_seconds=START_SECONDS,
        result_seconds=RESULT_SECONDS,
    )
    results: list[dict[str, Any]] = [{} for _ in problems]
    for line in lines:
        here = results[line["problem"]]
        name = line["name"]
        if "reason" in line:
            here.setdefault(name, NoMeasurement(line["reason"], line["failed"]))
            continue
        new = Measurement(
            line["seconds"],
            line["error"],
            {"cuda_graph": float(line["cuda_graph"]), **line["costs"]},
            size,
        )
        old = here.get(name)
        if not isinstance(old, Measurement) or new.median < old.median:
            here[name] = new
    lost = NoMeasurement("failed: the processes ended or hung", failed=True)
    return [{name: result.get(name, lost) for name in names} for result in results]


# --- The children's side --------------------------------------------------------------


def child(job: Mapping[str, Any], rank: int) -> None:
    """Time all problems on one device; the first process prints the results."""
    import torch

    warnings.simplefilter("ignore", FutureWarning)  # newer names of the collectives
    torch.manual_seed(rank)
    device = torch_processes.meet(job, rank)
    if device != "cpu" and "torch_async_tp" in job["names"]:
        _without_multicast()
    capturable = set(job["names"]) if device != "cpu" else set()
    for place, params in enumerate(job["problems"]):
        for name in job["names"]:
            try:
                results = _measure(params, name, device, job["samples"], capturable)
                for result in results:
                    say(rank, {"problem": place, "name": name, **result})
            except NotImplementedError as error:
                reason = f"not supported: {error}"
                say(rank, _no_result(place, name, reason, failed=False))
            except Exception as error:
                if rank == 0:
                    traceback.print_exc()
                reason = f"failed: {type(error).__name__}"
                say(rank, _no_result(place, name, reason, failed=True))
    torch_processes.part(rank)


def _no_result(place: int, name: str, reason: str, failed: bool) -> dict[str, Any]:
    return {"problem": place, "name": name, "reason": reason, "failed": failed}


def _without_multicast() -> None:
    """Prepares symmetric memory, and refuses where it could use multicast."""
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory as symmetric

    for name, value in torch_processes.NO_MULTICAST.items():
        if os.environ.get(name) != value:
            raise RuntimeError(f"{name} is {os.environ.get(name)!r}, expected {value}")
    # A second lock: the only operator among ours that could ask for it.
    if hasattr(symmetric, "_should_use_multimem_all_gather_matmul"):
        symmetric._should_use_multimem_all_gather_matmul = lambda *a, **k: False
    if hasattr(symmetric, "enable_symm_mem_for_group"):
        # Needed by older versions, deprecated in newer ones.
        symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)


def _function(kind: str, name: str, size: int) -> Callable[[Any, Any], Any]:
    """``(x, w) -> y`` on the parts of one device."""
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD.group_name

    def gathered(x: Any) -> Any:
        y = x.new_empty(size * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(y, x)
        return y

    def reduced(y: Any) -> Any:
        if dist.get_backend() == "gloo":  # which has no reduce-scatter
            dist.all_reduce(y)
            return y.chunk(size)[dist.get_rank()]
        out = y.new_empty(y.shape[0] // size, y.shape[1])
        dist.reduce_scatter_tensor(out, y)
        return out

    def everywhere(y: Any) -> Any:
        dist.all_reduce(y)
        return y

    def fused_gather(x: Any, w: Any) -> Any:
        _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
            x, [w], gather_dim=0, group_name=group, return_A=False
        )
        return y

    def fused_scatter(x: Any, w: Any) -> Any:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x, w, "sum", scatter_dim=0, group_name=group
        )

    functions = {
        ("all_gather", "torch_nccl"): lambda x, w: gathered(x) @ w,
        ("reduce_scatter", "torch_nccl"): lambda x, w: reduced(x @ w),
        ("all_reduce", "torch_nccl"): lambda x, w: everywhere(x @ w),
        ("all_gather", "torch_async_tp"): fused_gather,
        ("reduce_scatter", "torch_async_tp"): fused_scatter,
    }
    if (kind, name) not in functions:
        raise NotImplementedError("no such operator in torch")
    return functions[kind, name]


def _measure(
    params: Mapping[str, Any],
    name: str,
    device: Any,
    samples: int,
    capturable: set[str],
) -> Any:
    """Yields a result of a series of calls, then one of a graph of them."""
    import torch

    kind, size = params["kind"], params["tp"]
    m, n, k = params["M"], params["N"], params["K"]
    function = _function(kind, name, size)
    gathers = kind == "all_gather"
    x_shape = (m // size, k) if gathers else (m, k // size)
    w_shape = (k, n // size) if gathers else (k // size, n)
    whole, part = (m * k, m * n) if gathers else (m * n, m * k)
    touched = BF16_BYTES * (whole + (part + n * k) / size)
    count = max(1, min(MAX_SETS, int(2 * L2_BYTES // touched) + 1))
    x = torch.randn(x_shape, dtype=torch.bfloat16, device=device)
    ws = [torch.randn(w_shape, dtype=x.dtype, device=device) for _ in range(count)]
    y, costs = _first_call(function, x, ws[0], device)
    error = _error(kind, y, x, ws[0], size)
    del y

    def calls() -> None:
        for w in ws * -(-2 // count):
            function(x, w)

    per_turn = count * -(-2 // count)
    calls()
    yield {
        "seconds": _times(calls, per_turn, samples, device),
        "error": error,
        "costs": costs,
        "cuda_graph": False,
    }
    if name in capturable:
        replay = _captured(calls, device)
        if replay is None:
            capturable.discard(name)
            return
        yield {
            "seconds": _times(replay, per_turn, samples, device),
            "error": error,
            "costs": costs,
            "cuda_graph": True,
        }


def _first_call(
    function: Callable[[Any, Any], Any], x: Any, w: Any, device: Any
) -> tuple[Any, dict[str, float]]:
    """The result, and the seconds and memory that a first call takes."""
    import torch

    start = time.perf_counter()
    if device == "cpu":
        return function(x, w), {"compile_seconds": time.perf_counter() - start}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = function(x, w)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    nbytes = torch.cuda.max_memory_allocated() - before
    return y, {"compile_seconds": seconds, "memory_mb": nbytes / 1e6}


def _captured(calls: Callable[[], None], device: Any) -> Callable[[], None] | None:
    """The calls as a CUDA graph; None, on all devices, where one cannot capture it."""
    import torch
    import torch.distributed as dist

    replay = None
    try:
        replay = _capture(calls)
    except RuntimeError as error:
        print(f"no CUDA graph: {error}", flush=True)
        torch.cuda.synchronize()
    worked = torch.tensor([float(replay is not None)], device=device)
    dist.all_reduce(worked, dist.ReduceOp.MIN)
    return replay if worked.item() else None


def _capture(calls: Callable[[], None]) -> Callable[[], None]:
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The watchdog of NCCL asks for the state of events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        calls()
    return graph.replay


def _times(
    calls: Callable[[], None], per_turn: int, samples: int, device: Any
) -> list[float]:
    """Seconds of a call, the slowest device counts; all devices start together."""
    import torch
    import torch.distributed as dist

    on_gpu = device != "cpu"

    def once(turns: int) -> float:
        dist.barrier()
        if not on_gpu:
            start = time.perf_counter()
            for _ in range(turns):
                calls()
            return (time.perf_counter() - start) / turns
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(turns):
            calls()
        end.record()
        torch.cuda.synchronize()
        taken = start.elapsed_time(end) / 1e3
        time.sleep(min(taken, SECONDS))
        return taken / turns

    def slowest(seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64, device=device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value.item()

    estimate = slowest(once(2))
    turns = max(2, round(SECONDS / estimate)) if on_gpu else 2
    return [slowest(once(turns)) / per_turn for _ in range(samples)]


def _error(kind: str, y: Any, x: Any, w: Any, size: int) -> float:
    """Largest error of some columns of the first rows against fp32, on any device."""
    import torch
    import torch.distributed as dist

    columns = w[:, :SAMPLED].float()
    if kind == "all_gather":
        some = x[:SAMPLED].contiguous()
        rows = some.new_empty(size * some.shape[0], some.shape[1])
        dist.all_gather_into_tensor(rows, some)
        found = torch.cat([part[:SAMPLED, :SAMPLED] for part in y.chunk(size)])
        expected = rows.float() @ columns
    else:
        parts = torch.stack([part[:SAMPLED] for part in x.chunk(size)])
        expected = parts.float() @ columns
        dist.all_reduce(expected)
        if kind == "reduce_scatter":
            expected, found = expected[dist.get_rank()], y[:SAMPLED, :SAMPLED]
        else:
            found = torch.stack([part[:SAMPLED, :SAMPLED] for part in y.chunk(size)])
    off = (found.float() - expected).abs().max() / expected.abs().max()
    off = torch.nan_to_num(off, nan=1e9).to(torch.float64).reshape(1)
    dist.all_reduce(off, dist.ReduceOp.MAX)
    return off.item()


if __name__ == "__main__":
    child(json.loads(pathlib.Path(sys.argv[1]).read_text()), int(sys.argv[2]))
