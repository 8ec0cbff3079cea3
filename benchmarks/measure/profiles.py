"""Profiles of calls: what the GPU does in each, and what of the host XLA has named.

CUPTI, which watches the kernels of a CUDA graph one by one, makes calls longer: times
without it are taken before.
"""

import collections
import itertools
import os
import pathlib
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from benchmarks.measure import timing


CALL = "call"
"""What a call is named in a profile."""

GRAPHS_STAY = "--xla_enable_command_buffers_during_profiling=true"
"""Without it XLA launches the kernels of CUDA graphs singly in a profile."""

LEAST_US = 20.0
"""Of what XLA names, what takes less is not reported."""

_UPDATES = ("command_buffer::initialize", "command_buffer::update")
_UNSETTLED = 2  # first calls of a profile

Span = tuple[float, float]
"""Begin and end, in ns."""


def keep_graphs() -> None:
    """Have profiles show calls with their CUDA graphs; before JAX finds its devices."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {GRAPHS_STAY}".strip()


def profiled(call: Callable[[], Any], calls: int = 10) -> dict[str, float]:
    """Profile calls, each of which waits for its result; gives `summary`.

    Raises:
        RuntimeError: There is a GPU, but no kernel in the profile.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(_UNSETTLED + calls):
                with jax.profiler.TraceAnnotation(CALL):
                    jax.block_until_ready(call())
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        found = summary(jax.profiler.ProfileData.from_file(str(path)))
    if timing.on_gpu() and "kernels" not in found:
        raise RuntimeError("the profile has no kernel; may CUPTI be used here?")
    return found


def summary(profile: Any) -> dict[str, float]:
    """Medians over the calls of a profile, times in us.

    ``traced_us`` is the call, of which ``gpu_us`` pass from the begin of its first
    kernel to the end of its last one, ``before_gpu_us`` and ``after_gpu_us`` outside.
    ``kernel_us`` of the span some kernel runs (or a copy), ``gap_us`` none; ``kernels``
    counts them, and ``graph_updates`` how often XLA has rewritten a CUDA graph. ``host
    NAME`` is the calling thread's time in what XLA names so, but for what is named
    within, and ``beside NAME`` that of other threads. Of the GPU nothing is said where
    there is none.

    Args:
        profile: A `jax.profiler.ProfileData` of calls of `profiled`.
    """
    kernels: list[Span] = []
    threads: list[list[tuple[float, float, str]]] = []
    for plane in profile.planes:
        on_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            spans = [
                (e.start_ns, e.start_ns + e.duration_ns, e.name) for e in line.events
            ]
            if not on_gpu:
                threads.append(spans)
            elif line.name.startswith("Stream"):
                kernels += [(begin, end) for begin, end, _ in spans]
    calls = sorted(s for spans in threads for s in spans if s[2] == CALL)[_UNSETTLED:]
    kernels.sort()
    found = []
    for i, (begin, end, _) in enumerate(calls):
        until = calls[i + 1][0] if i + 1 < len(calls) else float("inf")
        one = {"traced_us": (end - begin) / 1e3}
        one |= _on_gpu([k for k in kernels if begin <= k[0] < until], begin, end)
        for spans in threads:
            inside = [s for s in spans if begin <= s[0] and s[1] <= end]
            where = "host" if (begin, end, CALL) in inside else "beside"
            for name, ns in own_times(inside).items():
                key = f"{where} {name}"
                one[key] = one.get(key, 0.0) + ns / 1e3
            if kernels:
                updates = sum(name.startswith(_UPDATES) for *_, name in inside)
                one["graph_updates"] = one.get("graph_updates", 0.0) + updates
        found.append(one)
    keys = dict.fromkeys(itertools.chain.from_iterable(found))
    made = {k: statistics.median(one.get(k, 0.0) for one in found) for k in keys}
    return {k: x for k, x in made.items() if " " not in k or x >= LEAST_US}


def _on_gpu(kernels: Sequence[Span], begin: float, end: float) -> dict[str, float]:
    """The part of `summary` about the GPU, of the sorted kernels of a call."""
    if not kernels:
        return {}
    busy, last = 0.0, kernels[0][0]
    for start, stop in kernels:
        busy += max(stop - max(start, last), 0.0)
        last = max(last, stop)
    first = kernels[0][0]
    times = {
        "before_gpu_us": first - begin,
        "gpu_us": last - first,
        "after_gpu_us": end - last,
        "kernel_us": busy,
        "gap_us": last - first - busy,
    }
    return {k: ns / 1e3 for k, ns in times.items()} | {"kernels": float(len(kernels))}


def own_times(spans: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """Time of each name in the nested spans of a thread, but for spans within.

    Numbers in names, which differ from call to call, are written as ``#``.
    """
    total = collections.defaultdict[str, float](float)
    around: list[tuple[float, str]] = []
    for begin, end, given in sorted(spans, key=lambda span: (span[0], -span[1])):
        name = re.sub(r"\d+", "#", given)
        while around and around[-1][0] <= begin:
            around.pop()
        if around:
            end = min(end, around[-1][0])
            total[around[-1][1]] -= end - begin
        total[name] += end - begin
        around.append((end, name))
    return dict(total)
