"""Timers: device time on a GPU, wall time elsewhere and end to end.

Every timer takes a function and several sets of inputs, calls the function on one set
after another, and returns one time per call (or per round trip over the sets, where
calls cannot be told apart). The sets together exceed the L2 cache twice, so that no
call finds its inputs there by accident.
"""

import dataclasses
import fcntl
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax


L2_BYTES = 60e6
"""L2 of the H200; the H100 has 50 MB."""

MAX_SETS = 64

RUN_SECONDS = 60.0
"""A program on several devices that runs longer hangs."""


def number_of_sets(nbytes: float, most: int = MAX_SETS) -> int:
    """How many sets of inputs of ``nbytes`` it takes to pass through the L2 twice.

    Args:
        nbytes: Of a set, on one device.
        most: That is given at most; without a GPU it is two.
    """
    if not on_gpu():
        return 2
    if nbytes >= 2 * L2_BYTES:
        return 1
    return min(most, int(2 * L2_BYTES // max(nbytes, 1)) + 1)


def on_gpu() -> bool:
    """Whether the default device of jax is a GPU."""
    return jax.devices()[0].platform == "gpu"


def torch_is_there() -> bool:
    """Whether torch baselines can run: torch is installed and sees a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@contextmanager
def bounded(what: str, seconds: float | None = None) -> Iterator[None]:
    """End the process if the block takes longer: a kernel that hangs never returns."""
    seconds = RUN_SECONDS if seconds is None else seconds

    def end() -> None:
        print(f"\nHANGS {what}: over {seconds:.0f} s; leave it out", flush=True)
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def turn() -> Iterator[None]:
    """Have the GPU alone among the processes that were told of one another.

    Where the environment variable ``BENCHMARK_LOCK`` names a file, processes that
    measure parts of a benchmark compile side by side and run one after another.
    """
    with _held(fcntl.LOCK_EX):
        yield


@contextmanager
def preparing() -> Iterator[None]:
    """Compile or check beside others that do, while nobody has a `turn`.

    For benchmarks of wall times, which suffer from busy neighbors.
    """
    with _held(fcntl.LOCK_SH):
        yield


@contextmanager
def _held(kind: int) -> Iterator[None]:
    path = os.environ.get("BENCHMARK_LOCK")
    if path is None:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, kind)
        yield  # closing the file lets the next one go


class _EachSet:
    """Calls ``function`` on every set; looks jitted, so the profiler leaves it so."""

    def __init__(self, function: Callable, sets: Sequence[tuple]):
        self.function, self.sets = function, sets

    def __call__(self) -> list[Any]:
        return [self.function(*inputs) for inputs in self.sets]

    def trace(self):
        raise NotImplementedError("only called")

    def lower(self):
        raise NotImplementedError("only called")


def jax_device_time(function: Callable, sets: Sequence[tuple], calls: int) -> list:
    """Kernel time of each call in seconds, by CUPTI.

    The sum over the kernels of a call, without the gaps between them. With several
    devices CUPTI reports the kernels of all: the mean over devices, one time for each
    round over the sets.
    """
    from jax.experimental.mosaic.gpu import profiler

    devices = {
        device
        for leaf in jax.tree.leaves(sets)
        if isinstance(leaf, jax.Array)
        for device in leaf.devices()
    }
    measured = profiler.measure(_EachSet(function, sets), aggregate=False)
    times: list[float] = []
    while len(times) < calls:
        outputs, kernels = measured()
        del outputs
        if not kernels:
            raise RuntimeError("CUPTI saw no kernel; is the function on the GPU?")
        milliseconds = [duration for _, duration in kernels]
        per_call, rest = divmod(len(kernels), len(sets))
        if len(devices) <= 1 and rest == 0:
            times += [
                sum(milliseconds[i * per_call : (i + 1) * per_call]) / 1e3
                for i in range(len(sets))
            ]
        else:
            times.append(sum(milliseconds) / len(sets) / max(len(devices), 1) / 1e3)
    return times


def jax_kernels(function: Callable, inputs: tuple) -> list[tuple[str, float]]:
    """Names and seconds of the kernels that a call launches, copies among them."""
    from jax.experimental.mosaic.gpu import profiler

    _, kernels = profiler.measure(_EachSet(function, [inputs]), aggregate=False)()
    found = [(name, milliseconds / 1e3) for name, milliseconds in kernels or ()]
    by_name: dict[str, list[float]] = {}
    for name, seconds in found:
        by_name.setdefault(name, []).append(seconds)
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        total = 1e6 * sum(times)
        print(f"{len(times):6d} x {name[:80]:80s} {total:9.1f} us", flush=True)
    return found


def jax_wall_time(
    function: Callable, sets: Sequence[tuple], calls: int, burst: int = 1
) -> list:
    """Wall time of a call in seconds: ``burst`` calls are dispatched, then awaited."""
    return _wall_time(function, sets, calls, burst, jax.block_until_ready)


def torch_device_time(function: Callable, sets: Sequence[tuple], calls: int) -> list:
    """Time of each round over the sets in seconds, divided by the number of sets.

    Replays of one CUDA graph of all calls between two events; where the function cannot
    be captured, the calls themselves between events.
    """
    import torch

    def each_set() -> None:
        for inputs in sets:
            function(*inputs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            each_set()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            each_set()
        replay: Callable[[], Any] = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()
        replay = each_set
    replay()
    times = []
    for _ in range(-(-calls // len(sets))):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(sets))
    return times


def torch_wall_time(
    function: Callable, sets: Sequence[tuple], calls: int, burst: int = 1
) -> list:
    """Wall time of a call in seconds: ``burst`` calls are dispatched, then awaited."""
    import torch

    return _wall_time(
        function, sets, calls, burst, lambda output: torch.cuda.synchronize()
    )


def _wall_time(function, sets, calls, burst, wait) -> list:
    times = []
    for i in range(calls):
        start = time.perf_counter()
        for j in range(burst):
            output = function(*sets[(i * burst + j) % len(sets)])
        wait(output)
        times.append((time.perf_counter() - start) / burst)
    return times


# --- What it costs before it runs, and beside its inputs ------------------------------


def costs(seconds: float, nbytes: float | None = None) -> dict[str, float]:
    """What every row says beside its time.

    Args:
        seconds: From a function to one that is ready to run: tracing, lowering and
            compiling in JAX, all of the first call elsewhere.
        nbytes: Most device memory of a call beyond its inputs; None if unknown.
    """
    found = {"compile_seconds": seconds}
    return found if nbytes is None else found | {"memory_mb": nbytes / 1e6}


def program_bytes(compiled: Any) -> float:
    """Temporaries and outputs of a compiled program that are not donated inputs."""
    analysis = compiled.memory_analysis()
    made = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    return made - analysis.alias_size_in_bytes


@dataclasses.dataclass
class Compiled:
    """A compiled program and what it costs."""

    program: Any
    costs: dict[str, float]


def compiled(lowered: Any, seconds: float = 0.0, options: Any = None) -> Compiled:
    """Compile a lowered program, also in a thread.

    Args:
        lowered: The program.
        seconds: That it took to trace and lower it.
        options: Of the compiler.
    """
    start = time.perf_counter()
    program = lowered.compile(options)
    seconds += time.perf_counter() - start
    return Compiled(program, costs(seconds, program_bytes(program)))


class Program:
    """A jitted function that is compiled once, for one kind of inputs."""

    def __init__(self, function: Callable):
        self.jitted = function if hasattr(function, "lower") else jax.jit(function)
        self.lowered = None
        self.compiled: Compiled | None = None
        self.seconds = 0.0

    def lower(self, *inputs: Any) -> "Program":
        """Trace it, once."""
        if self.lowered is None:
            start = time.perf_counter()
            self.lowered = self.jitted.lower(*inputs)
            self.seconds = time.perf_counter() - start
        return self

    def compile(self) -> Compiled:
        """Compile it, once; after `lower`."""
        if self.compiled is None:
            self.compiled = compiled(self.lowered, self.seconds)
        return self.compiled

    def __call__(self, *inputs: Any) -> Any:
        """Run it."""
        return self.lower(*inputs).compile().program(*inputs)


def torch_first_calls(
    function: Callable, inputs: tuple
) -> tuple[Any, dict[str, float]]:
    """Output and costs of a function of torch, from its first two calls.

    What stays from one call to the next, such as the memory of a CUDA graph, counts.
    """
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    function(*inputs)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    output = function(*inputs)
    torch.cuda.synchronize()
    return output, costs(seconds, torch.cuda.max_memory_allocated() - before)
