"""The collective matmuls, for the tuner.

Dispatching a call to several GPUs takes longer than many calls, so a program calls an
op many times in a loop: once for each entry of the first operand. Their number is part
of the program, since a loop whose length is data asks the host at every turn.

Axis letters: B leading axes, M rows of all devices, K contraction, N columns.
"""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.collective_matmul.config import (
    Call,
    CollectiveConfig,
    CollectiveProblem,
    Kind,
)
from pallas_kernels.collective_matmul.config import (
    candidates as candidates,
)
from pallas_kernels.collective_matmul.ops import OPS, run
from pallas_kernels.collective_matmul.specs import ROWS, SPECS, TENSOR_PARALLEL
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec


# They are used and benchmarked under sustained load: the GPU is at its power cap, where
# another config can be the fastest than after long pauses.
IDLE_SHARE: float = 1

AXIS = "tensor"

DECODE_ROWS = 512
"""Most rows for which an all-reduce is tuned too, which serves decoding."""

SECONDS = 0.03
"""A timed program runs about as long."""

# Rates for estimates of how long a call takes.
_FLOPS, _LINK, _LAUNCH = 650e12, 250e9, 20e-6


def problems() -> Mapping[str, CollectiveProblem]:
    """The problems of `SPECS` in bfloat16, by name of the layer and key."""
    found = {}
    for size in TENSOR_PARALLEL:
        for spec in SPECS:
            n, k = spec.local(size)
            for rows in ROWS:
                kinds: list[Kind] = [spec.kind]
                if spec.kind == "reduce_scatter" and rows <= DECODE_ROWS:
                    kinds.append("all_reduce")
                for kind in kinds:
                    problem = CollectiveProblem(
                        kind=kind,
                        m=rows,
                        n=(n,),
                        k=(k,),
                        devices=size,
                        dtype=jnp.dtype(jnp.bfloat16),
                    )
                    found[f"{spec.name} {problem.key}"] = problem
    return found


def _mesh(problem: CollectiveProblem) -> Mesh:
    if (found := len(jax.devices())) < problem.devices:
        raise Unsupported(f"{problem.devices} devices are needed, {found} are there")
    devices = jax.devices()[: problem.devices]
    return jax.make_mesh((problem.devices,), (AXIS,), (AxisType.Auto,), devices=devices)


def _specs(problem: CollectiveProblem) -> tuple[P, P, P]:
    """Partitions of x, the weights and the output."""
    rows, columns = P(None, AXIS), P(None, None, AXIS)
    w_in, w_out = (P(AXIS), P(None, AXIS))
    if problem.rhs_transposed:
        w_in, w_out = w_out, w_in
    if problem.kind == "all_gather":
        return rows, w_out, columns
    return columns, w_in, rows if problem.kind == "reduce_scatter" else P()


def _calls(problem: CollectiveProblem) -> int:
    """Number of calls that take about `SECONDS`; 2 where there is no GPU."""
    if jax.default_backend() != "gpu":
        return 2
    rows = problem.batch * problem.m
    products = 2 * rows * sum(problem.n) * sum(problem.k) / _FLOPS
    moved = problem.batch * problem.rows * (problem.devices - 1)
    width = problem.k[0] if problem.kind == "all_gather" else problem.n[0]
    links = moved * width * problem.dtype.itemsize / _LINK
    return max(2, round(SECONDS / (products + links + _LAUNCH)))


def arguments(problem: CollectiveProblem) -> tuple[Any, ...]:
    """An entry for each call, then tuples of random normal x and of weights."""
    mesh, size = _mesh(problem), problem.devices
    x_spec, w_spec, _ = _specs(problem)
    gathers = problem.kind == "all_gather"
    xs = [(problem.batch, problem.m, k if gathers else k * size) for k in problem.k]
    ws = [
        (k, n * size) if gathers else (k * size, n)
        for k in problem.k
        for n in problem.n
    ]
    if problem.rhs_transposed:
        ws = [shape[::-1] for shape in ws]

    def drawn(seed: int, shape: tuple[int, ...], spec: P) -> jax.Array:
        normal = functools.partial(jax.random.normal, shape=shape, dtype=problem.dtype)
        sharded = jax.jit(normal, out_shardings=NamedSharding(mesh, spec))
        return sharded(jax.random.key(seed))

    return (
        np.zeros(_calls(problem), np.int8),
        tuple(drawn(i, shape, x_spec) for i, shape in enumerate(xs)),
        tuple(drawn(100 + i, shape, w_spec) for i, shape in enumerate(ws)),
    )


def _program(
    problem: CollectiveProblem,
    implementation: str,
    config: CollectiveConfig | None,
    device: DeviceSpec | None = None,
) -> Callable[..., jax.Array]:
    """``(turns, xs, ws)`` to the first matmul of the last of the calls."""
    op = next(op for op in OPS if op.kind == problem.kind)
    gathers = problem.kind == "all_gather"
    call = Call(
        axis_name=AXIS,
        size=problem.devices,
        rhs_transposed=problem.rhs_transposed,
        out_dtype=problem.dtype,
        implementation=implementation,
        config=config,
        device=device,
    )

    def once(xs: Any, ws: Any) -> jax.Array:
        outputs = run(op, xs[0] if gathers else xs, ws, call)
        return outputs[0][0] if gathers else outputs

    def local(turns: jax.Array, xs: Any, ws: Any) -> jax.Array:
        def turn(carry: Any, _: jax.Array) -> Any:
            # The next call waits for this one, and none is hoisted.
            return lax.optimization_barrier((carry[0], once(carry[0], ws))), None

        y = jax.eval_shape(once, xs, ws)
        start = (xs, jnp.zeros(y.shape, y.dtype))
        return lax.scan(turn, start, turns)[0][1]

    x_spec, w_spec, out_spec = _specs(problem)
    return jax.shard_map(
        local,
        mesh=_mesh(problem),
        in_specs=(P(), x_spec, w_spec),
        out_specs=out_spec,
        check_vma=False,
    )


def kernel(
    problem: CollectiveProblem, config: CollectiveConfig, device: DeviceSpec
) -> Callable[..., jax.Array]:
    """The kernel with a config, in a loop."""
    return _program(problem, "mosaic_gpu", config, device)


def baseline(problem: CollectiveProblem) -> Callable[..., jax.Array]:
    """A collective and cuBLAS through XLA, in a loop."""
    return _program(problem, "xla", None)


def time_us(fn: Callable[..., Any], *args: Any, iterations: int) -> list[float]:
    """Wall time of a call in the loop of a program, for each of at least `iterations`.

    Args:
        fn: a compiled program.
        *args: its arguments, an entry for each call first.
        iterations: how many calls to time.

    Returns:
        The mean time of a call in each program, in microseconds, once for each call.
    """
    calls = args[0].shape[0]
    times: list[float] = []
    while len(times) < iterations:
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times += [1e6 * (time.perf_counter() - start) / calls] * calls
    return times
