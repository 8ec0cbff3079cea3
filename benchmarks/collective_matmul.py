"""Collective matmuls: ours, their bounds, and every baseline.

Sizes are those of an entire layer; each device multiplies ``1 / tp`` of it.

- ``mosaic_gpu``: the fused kernel, tuned where the tables have an entry; ``untuned``:
  with the config of the heuristic. ``auto``: what ``implementation=None`` picks.
- ``low_latency``: gathers by the fused kernel and sums after a matmul of XLA, both
  without a barrier before each call.
- ``matmul_only``: the matmul alone, of cuBLAS or of our matmul (with its own config or
  with tiles of 128 x 320), whichever is fastest (``is_mosaic_gpu`` says);
  ``comm_only``: the same bytes written by a kernel that only copies. No overlap can
  beat both.
- ``xla_nccl``: the collective and the matmul, one after the other; ``xla_lhs``: the
  same with XLA's latency-hiding scheduler; ``xla_ring``: our ring of ``ppermute``;
  ``xla_windowed``: the collective matmul of XLA's partitioner (its windowed einsum),
  from shardings alone; ``xla_one_shot``: sums by XLA's own kernels in the place of
  NCCL's.
- ``jax_sample``: the all-gather matmul of `jax.experimental.pallas.ops.gpu`.
- ``fp8_mosaic_gpu``, ``fp8_xla``: the kernel and XLA on operands of 8 bits (E4M3, a
  scale for each row), compared with the matmul of the rounded operands.
- ``torch_nccl``, ``torch_async_tp``: PyTorch, one process per GPU.

``overlap_efficiency`` is Flux's ``E = 1 - (t - t_mm) / (t_xla - t_mm)``: the share of
the exposed communication that is hidden. Some layers move more than they compute and
cannot reach 1, so ``overlap_efficiency_star``, ``E* = (t_xla - t) / (t_xla - max(t_mm,
t_comm))``, says how much of what can be gained is. Negative values are kept; where
``t_xla`` is below a bound there is none.
"""

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks.measure import command, loops, timing
from benchmarks.measure.harness import Benchmark, Case, Custom, NoMeasurement, Results
from benchmarks.measure.loop_programs import MAX_SETS, Form, Operand, Problem
from benchmarks.rivals import collective_baselines as baselines
from benchmarks.rivals import torch_collective, torch_processes
from benchmarks.rivals.collective_baselines import AXIS
from benchmarks.rivals.collective_checks import checks
from pallas_kernels import collective_matmul
from pallas_kernels.collective_matmul import (
    AllReduceWorkspace,
    CollectiveConfig,
    GatherWorkspace,
    low_latency_all_gather_matmul,
    low_latency_all_reduce,
    make_all_reduce_workspace,
    make_gather_workspace,
)
from pallas_kernels.collective_matmul.config import (
    CollectiveProblem,
    heuristic,
    in_order_of_k,
)
from pallas_kernels.collective_matmul.specs import ROWS, SPECS, TENSOR_PARALLEL
from pallas_kernels.matmul import MatmulConfig, matmul
from pallas_kernels.mosaic import H200, DeviceSpec, check_hopper
from pallas_kernels.scaled_matmul import quantize_fp8


DECODE_ROWS = (1, 4, 16, 64, 512)
"""M of `matmul_all_reduce`, which serves decode."""

MOST_ROWS_AT_ONCE = 128
"""Most rows of an exchange in one shot, which sends all of them to all devices."""

OURS = {
    "all_gather": collective_matmul.all_gather_matmul,
    "reduce_scatter": collective_matmul.matmul_reduce_scatter,
    "all_reduce": collective_matmul.matmul_all_reduce,
}

SCALED = {
    "all_gather": collective_matmul.scaled_all_gather_matmul,
    "reduce_scatter": collective_matmul.scaled_matmul_reduce_scatter,
}
"""Of operands of 8 bits."""

BF16 = jnp.dtype(jnp.bfloat16)
BF16_BYTES = BF16.itemsize

WIDEST = MatmulConfig(tile_n=320, stages=3, store_slots=3, cluster="m")
"""At the power cap often faster than what is chosen for a GPU that is not."""

# Rates for estimates of how long a call takes.
_FLOPS, _MEMORY, _LINK, _LAUNCH = 650e12, 3e12, 250e9, 15e-6


# --- Cases ----------------------------------------------------------------------------


def cases() -> Iterator[Case]:
    """Every layer, way of communicating, number of devices and of rows."""
    for tp in reversed(TENSOR_PARALLEL):
        for spec in SPECS:
            kinds: dict[str, Sequence[int]] = {spec.kind: ROWS}
            if spec.kind == "reduce_scatter":
                kinds["all_reduce"] = DECODE_ROWS
            for kind, rows in kinds.items():
                for m in rows:
                    sizes = {"M": m, "N": spec.n, "K": spec.k}
                    yield Case(spec.name, {"kind": kind, "tp": tp, **sizes})


def quick_cases() -> Iterator[Case]:
    """A tiny one of each kind."""
    for kind in OURS:
        sizes = {"M": 32, "N": 256, "K": 256}
        yield Case("tiny", {"kind": kind, "tp": 4, **sizes})


# --- Forms ----------------------------------------------------------------------------


def bytes_sent(params: Mapping[str, Any]) -> float:
    """Bytes that each device sends to others (and receives from them)."""
    tp, m, n, k = (params[name] for name in ("tp", "M", "N", "K"))
    others = (tp - 1) / tp
    if params["kind"] == "all_gather":
        return others * m * k * BF16_BYTES
    passes = 2 if params["kind"] == "all_reduce" else 1
    return passes * others * m * n * BF16_BYTES


def estimate(params: Mapping[str, Any]) -> float:
    """About how many seconds a call takes that overlaps nothing."""
    tp, m, n, k = (params[name] for name in ("tp", "M", "N", "K"))
    weight = n * k / tp * BF16_BYTES
    product = max(2 * m * n * k / tp / _FLOPS, weight / _MEMORY)
    return product + bytes_sent(params) / _LINK + _LAUNCH


def problem(params: Mapping[str, Any], names: Sequence[str]) -> Problem:
    """Operands and forms of one case."""
    kind, tp, m, n, k = (params[name] for name in ("kind", "tp", "M", "N", "K"))
    if kind == "all_gather":
        operands = {
            "x": Operand(shape=(m, k), spec=P(AXIS)),
            "w": Operand(shape=(k, n), spec=P(None, AXIS)),
        }
        gathered = lambda drawn: lax.all_gather(drawn["x"], AXIS, tiled=True)  # noqa: E731
        derived = {"x_gathered": (gathered, P())} | eight_bits(P(AXIS))
        touched = m * k + n * k / tp + m * n / tp
    else:
        operands = {
            "x": Operand(shape=(m, k), spec=P(None, AXIS)),
            "w": Operand(shape=(k, n), spec=P(AXIS)),
            "partial": Operand(shape=(tp * m, n), spec=P(AXIS), scale=k**0.5),
        }
        derived = eight_bits(P(None, AXIS)) if kind == "reduce_scatter" else {}
        touched = m * k / tp + n * k / tp + m * n
    if tp > len(jax.devices()):
        raise NotImplementedError(f"tp={tp} on {len(jax.devices())} devices")
    mesh = jax.make_mesh((tp,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:tp])
    return Problem(
        label=f"{kind} tp={tp} M={m} N={n} K={k}",
        mesh=mesh,
        operands=operands,
        derived=derived,
        forms=[form for form in forms(params) if form.name in names],
        checks=checks(params),
        num_sets=timing.number_of_sets(touched * BF16_BYTES, MAX_SETS),
        seconds=estimate(params),
    )


def eight_bits(spec: P) -> dict[str, tuple[Any, P]]:
    """Both operands in 8 bits, K last and split so, and scales of each device's own."""

    def part(name: str, index: int) -> Any:
        def make(drawn: Any) -> jax.Array:
            rows = drawn["x"] if name == "a" else drawn["w"].T  # [.., K]
            return quantize_fp8(rows, axis=-1)[index]

        return make

    found = {name: (part(name, 0), spec) for name in ("a", "b")}
    return found | {f"{name}_scale": (part(name, 1), P(AXIS)) for name in ("a", "b")}


def forms(params: Mapping[str, Any]) -> list[Form]:
    """All that runs in JAX."""
    kind, tp = params["kind"], params["tp"]
    gathers = kind == "all_gather"
    out_spec = {"all_gather": P(None, AXIS), "reduce_scatter": P(AXIS)}.get(kind, P())

    def collective(name: str, function: Any, **more: Any) -> Form:
        return Form(
            name=name,
            function=function,
            operands=("x", "w"),
            out_spec=out_spec,
            check="result",
            **more,
        )

    def ours(implementation: str | None, **more: Any) -> Any:
        options = {"axis_name": AXIS, "implementation": implementation, **more}
        return functools.partial(OURS[kind], **options)

    def alone(function: Any, is_mosaic_gpu: bool) -> Form:
        return Form(
            name="matmul_only",
            function=function,
            operands=("x_gathered" if gathers else "x", "w"),
            out_spec=P(None, AXIS) if gathers else P(AXIS),
            check="result" if gathers else "product",
            metrics={"is_mosaic_gpu": float(is_mosaic_gpu)},
        )

    def pushed(blocks: int) -> Form:
        push = getattr(baselines, f"push_{kind}")

        def function(x: jax.Array) -> jax.Array:
            if params["M"] % tp:
                raise NotImplementedError("rows that do not divide among devices")
            return push(x, size=tp, blocks=blocks, device=DeviceSpec.current())

        return Form(
            name="comm_only",
            function=function,
            operands=("x" if gathers else "partial",),
            out_spec=P(AXIS),
            check="pushed",
        )

    def scaled(implementation: str) -> Form:
        function = functools.partial(
            SCALED[kind], axis_name=AXIS, implementation=implementation
        )
        return Form(
            name=f"fp8_{implementation}",
            function=function,
            operands=("a", "b", "a_scale", "b_scale"),
            out_spec=out_spec,
            check="rounded",
        )

    xla = baselines.xla_collective(kind)
    found = [
        collective("mosaic_gpu", ours("mosaic_gpu")),
        collective("untuned", ours("mosaic_gpu", config=untuned(params))),
        collective("auto", ours(None)),
        alone(baselines.product, False),
        *(
            alone(functools.partial(matmul, implementation="mosaic_gpu", **more), True)
            for more in ({}, {"config": WIDEST})
        ),
        *(pushed(blocks) for blocks in baselines.PUSH_BLOCKS),
        collective("xla_nccl", xla),
        collective("xla_lhs", xla, compiler_options=baselines.LATENCY_HIDING),
        collective("xla_ring", ours("xla_ring")),
    ]
    if kind != "all_reduce":
        found += [scaled("mosaic_gpu"), scaled("xla")]
        found += [
            collective(
                "xla_windowed",
                baselines.product,
                partitioned=True,
                compiler_options=options,
            )
            for options in baselines.windowed(tp)
        ]
    if gathers:
        found += [
            collective("jax_sample", functools.partial(baselines.jax_sample, **config))
            for config in baselines.SAMPLE_CONFIGS
        ]
        device = DeviceSpec.current() or H200
        found += [
            collective(
                "order_of_k",
                ours("mosaic_gpu", config=config),
                metrics={"tile_n": config.tile_n, "buffer_bytes": config.buffer_bytes},
            )
            for config in in_order_of_k(local_problem(params), device)
        ]
        found.append(
            collective(
                "low_latency",
                gather_without_barrier,
                state=functools.partial(gather_workspace, params),
            )
        )
    if kind == "all_reduce":
        found += [
            collective("xla_one_shot", xla, compiler_options=baselines.ONE_SHOT),
            collective(
                "low_latency",
                low_latency,
                state=functools.partial(all_reduce_workspace, params),
            ),
        ]
    return found


def all_reduce_workspace(params: Mapping[str, Any]) -> AllReduceWorkspace:
    """What the calls of `low_latency` hand on."""
    if params["M"] > MOST_ROWS_AT_ONCE:
        raise NotImplementedError(f"more than {MOST_ROWS_AT_ONCE} rows")
    return make_all_reduce_workspace(
        params["M"] * params["N"], BF16, axis_name=AXIS, device=hopper()
    )


def gather_workspace(params: Mapping[str, Any]) -> GatherWorkspace:
    """What the calls of `gather_without_barrier` hand on."""
    return make_gather_workspace(
        params["M"] // params["tp"], params["K"], BF16, axis_name=AXIS, device=hopper()
    )


def hopper() -> DeviceSpec:
    """The GPU that kernels without a barrier are built for."""
    return check_hopper(DeviceSpec.current(), "low_latency")


def gather_without_barrier(
    handed_on: GatherWorkspace, x: jax.Array, w: jax.Array
) -> Any:
    """The fused kernel, with a workspace in the place of XLA's barrier."""
    return low_latency_all_gather_matmul(
        x, w, handed_on, axis_name=AXIS, device=hopper()
    )


def low_latency(handed_on: AllReduceWorkspace, x: jax.Array, w: jax.Array) -> Any:
    """A matmul of XLA, and the exchange without a barrier."""
    product = baselines.product(x, w)
    return low_latency_all_reduce(product, handed_on, axis_name=AXIS)


def local_problem(params: Mapping[str, Any]) -> CollectiveProblem:
    """What one device computes in a case."""
    kind, tp, m, n, k = (params[name] for name in ("kind", "tp", "M", "N", "K"))
    n, k = (n // tp, k) if kind == "all_gather" else (n, k // tp)
    m = -(-m // tp) * tp  # an all-reduce of one row
    return CollectiveProblem(kind=kind, m=m, n=(n,), k=(k,), devices=tp, dtype=BF16)


def untuned(params: Mapping[str, Any]) -> CollectiveConfig:
    """The config of a case that no table has."""
    return heuristic(local_problem(params), DeviceSpec.current() or H200)


def spec_name(case: Case) -> str:
    """The name of the case's kernels in the manifest."""
    return f"{case.name} {local_problem(case.params).key}"


# --- Measure --------------------------------------------------------------------------


def compare(
    params: Mapping[str, Any], seconds: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Rates of a device, speed-up over XLA, efficiencies of the overlap."""
    flops = 2 * params["M"] * params["N"] * params["K"] / params["tp"]
    xla = seconds.get("xla_nccl")
    alone, bare = seconds.get("matmul_only"), seconds.get("comm_only")
    found: dict[str, dict[str, float]] = {}
    for name, t in seconds.items():
        here = found[name] = {}
        if name != "comm_only":
            here["tflops"] = flops / t / 1e12
        if name != "matmul_only":
            halved = name.startswith("fp8") and params["kind"] == "all_gather"
            here["nvlink_gb_per_s"] = bytes_sent(params) / (1 + halved) / t / 1e9
        if xla is None or name in ("matmul_only", "comm_only"):
            continue
        here["speedup"] = xla / t
        if alone is not None and xla > alone:
            here["overlap_efficiency"] = 1 - (t - alone) / (xla - alone)
        if alone is not None and bare is not None and xla > max(alone, bare):
            here["overlap_efficiency_star"] = (xla - t) / (xla - max(alone, bare))
    return found


def measure(
    wanted: Sequence[Case], names: Sequence[str], samples: int
) -> Iterator[tuple[Case, Results]]:
    """Time the cases: PyTorch's first, in processes of their own, then JAX's."""
    theirs = [name for name in names if name in torch_collective.NAMES]
    ours = [name for name in names if name not in theirs]
    with timing.turn() if theirs else contextlib.nullcontext():
        elsewhere = torch_collective.measure(
            [dict(case.params) for case in wanted], theirs, samples
        )
    if not ours:
        yield from zip(wanted, elsewhere, strict=True)
        return
    problems: list[Problem] = []
    places: list[int] = []
    for place, case in enumerate(wanted):
        try:
            problems.append(problem(case.params, ours))
            places.append(place)
        except NotImplementedError as error:
            reason = NoMeasurement(f"not supported: {error}")
            yield case, dict.fromkeys(names, reason)
    measured = loops.measure(problems, samples)
    for place, (_, results) in zip(places, measured, strict=True):
        every = results | elsewhere[place]
        missing = NoMeasurement("not supported: no such form of this kind")
        yield wanted[place], {name: every.get(name, missing) for name in names}


def _elsewhere(params: Any, seed: int, samples: int) -> Any:
    raise NotImplementedError("`measure` times all implementations")


NAMES = (
    "mosaic_gpu",
    "untuned",
    "auto",
    "order_of_k",
    "low_latency",
    "matmul_only",
    "comm_only",
    "xla_nccl",
    "xla_lhs",
    "xla_ring",
    "xla_windowed",
    "xla_one_shot",
    "fp8_mosaic_gpu",
    "fp8_xla",
    "jax_sample",
    *torch_collective.NAMES,
)

KINDS = {
    **dict.fromkeys(("order_of_k", "jax_sample"), ("all_gather",)),
    "low_latency": ("all_gather", "all_reduce"),
    "xla_one_shot": ("all_reduce",),
    **dict.fromkeys(
        ("xla_windowed", "fp8_mosaic_gpu", "fp8_xla"), ("all_gather", "reduce_scatter")
    ),
}
"""Of which kinds there are the forms that not all have."""

BENCHMARK = Benchmark(
    name="collective_matmul",
    cases=tuple(cases()),
    quick_cases=tuple(quick_cases()),
    kernels=("collective_matmul",),
    spec=spec_name,
    devices=lambda params: params["tp"],
    offers=lambda case, name: case.params["kind"] in KINDS.get(name, tuple(OURS)),
    inputs=lambda params, key: (),
    implementations={name: Custom(_elsewhere) for name in NAMES},
    measure=measure,
    compare=compare,
    selectors={"kind": "kind", "tp": "tp", "rows": "M"},
    timing="wall time a call in loops inside one program, in random order",
    samples=7,
)


def prepare_devices(argv: Sequence[str]) -> None:
    """Before jax starts: no multicast, only the GPUs that are needed, a CPU as four.

    jax's sample takes all devices that it sees.
    """
    os.environ.update(torch_processes.NO_MULTICAST)
    jax.config.update("jax_num_cpu_devices", 4)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tp", nargs="+", type=int, default=[])
    sizes = parser.parse_known_args(argv)[0].tp
    if sizes and "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(max(sizes))))


if __name__ == "__main__":
    prepare_devices(sys.argv[1:])
    command.run(BENCHMARK)
