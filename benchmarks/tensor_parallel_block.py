"""A tensor-parallel Transformer block: fused collectives against those of XLA.

``fwd`` and ``fwd_bwd`` are a block of LLaMA in training, its rows split over devices
between the matmuls (sequence parallelism): normalization, queries, keys and values
(all-gather), rotary embedding, causal attention (cuDNN), output (reduce-scatter), and
the MLP likewise. ``decode`` is a step of one token for each sequence against a cache:
rows are on all devices, and the second matmul of each pair ends in an all-reduce.

All forms are the same function; only ``implementation`` of the collective matmuls
differs: ``mosaic_gpu``, ``auto`` (None), ``xla_nccl`` (xla), ``xla_lhs`` (the same with
XLA's latency-hiding scheduler), ``xla_ring``. `jaxscale.models` computes the same block
with normalization scales and a residual stream in modules.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks.collective_matmul import prepare_devices
from benchmarks.measure import command, loops
from benchmarks.measure.harness import Benchmark, Case, Custom, Results
from benchmarks.measure.loop_programs import Check, Form, Operand, Problem
from benchmarks.rivals.collective_baselines import AXIS, LATENCY_HIDING
from jaxscale import nn
from pallas_kernels.collective_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a block."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int

    @property
    def qkv(self) -> int:
        """Columns of the weight of queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        heads = self.num_heads * self.head_dim
        return self.d_model * (self.qkv + heads + 3 * self.d_ff)


SHAPES = {
    "llama70b": Shape(
        d_model=8192, num_heads=64, num_kv_heads=8, head_dim=128, d_ff=28672
    ),
    "tiny": Shape(d_model=256, num_heads=8, num_kv_heads=4, head_dim=64, d_ff=512),
}

FORMS: Mapping[str, tuple[str | None, Mapping[str, Any]]] = {
    "mosaic_gpu": ("mosaic_gpu", {}),
    "auto": (None, {}),
    "xla_nccl": ("xla", {}),
    "xla_lhs": ("xla", LATENCY_HIDING),
    "xla_ring": ("xla_ring", {}),
}
"""Name to the implementation of the collective matmuls and options of XLA."""

WEIGHTS = ("w_qkv", "w_out", "w_gate_up", "w_down")

Collective = Callable[..., jax.Array]


# --- The block ------------------------------------------------------------------------


def normalized(x: jax.Array) -> jax.Array:
    """Root-mean-square normalization without a scale."""
    return nn.rms_norm(x, jnp.ones(x.shape[-1]), eps=1e-5).astype(x.dtype)


def attended(
    qkv: jax.Array, shape: Shape, size: int, cache: tuple[jax.Array, ...] = ()
) -> jax.Array:
    """Attention of the heads of one device, causal or of one token over a cache.

    Args:
        qkv: [B,S,(heads + 2 kv_heads) head_dim] of this device.
        shape: sizes of the block.
        size: number of devices.
        cache: keys and values [B,S,kv_heads,head_dim]; the token takes the last place.
    """
    heads, kv_heads = shape.num_heads // size, shape.num_kv_heads // size
    batch, length = qkv.shape[:2]
    parts = qkv.reshape(batch, length, heads + 2 * kv_heads, shape.head_dim)
    q, k, v = jnp.split(parts, (heads, heads + kv_heads), axis=2)
    start = cache[0].shape[1] - 1 if cache else 0
    positions = jnp.broadcast_to(jnp.arange(start, start + length), (batch, length))
    rates = nn.rope_inv_freq(shape.head_dim, 5e5)
    q, k = (nn.rotary(x, positions, rates) for x in (q, k))
    if cache:
        k = jnp.concatenate([cache[0][:, :-1], k], axis=1)
        v = jnp.concatenate([cache[1][:, :-1], v], axis=1)
    y = nn.attention(q, k, v, causal=not cache)
    return y.reshape(batch, length, heads * shape.head_dim)


def gated(gate_up: jax.Array) -> jax.Array:
    """SwiGLU."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def training_block(
    x: jax.Array,
    w_qkv: jax.Array,
    w_out: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    *,
    shape: Shape,
    size: int,
    implementation: str | None,
) -> jax.Array:
    """The block on one device: x is [B,S/D,d_model]."""
    options = {"axis_name": AXIS, "implementation": implementation}
    gather: Collective = functools.partial(all_gather_matmul, **options)
    scatter: Collective = functools.partial(matmul_reduce_scatter, **options)
    x = x + scatter(attended(gather(normalized(x), w_qkv), shape, size), w_out)
    return x + scatter(gated(gather(normalized(x), w_gate_up)), w_down)


def training_step(x: jax.Array, dy: jax.Array, *weights: jax.Array, **options: Any):
    """Output of the block and gradients of x and of all weights."""
    y, pull = jax.vjp(functools.partial(training_block, **options), x, *weights)
    return y, *pull(dy)


def decoding_block(
    x: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    w_qkv: jax.Array,
    w_out: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    *,
    shape: Shape,
    size: int,
    implementation: str | None,
) -> jax.Array:
    """A step of one token for each sequence: x is [B,d_model] on all devices."""
    reduce: Collective = functools.partial(
        matmul_all_reduce, axis_name=AXIS, implementation=implementation
    )
    qkv = jnp.matmul(normalized(x), w_qkv)[:, None]
    y = attended(qkv, shape, size, (k_cache, v_cache))[:, 0]
    x = x + reduce(y, w_out)
    return x + reduce(gated(jnp.matmul(normalized(x), w_gate_up)), w_down)


# --- Problems -------------------------------------------------------------------------


def weights(shape: Shape) -> dict[str, Operand]:
    """Weights, whose first matmuls are split by columns and second by rows."""
    d, heads = shape.d_model, shape.num_heads * shape.head_dim
    sizes = {
        "w_qkv": (d, shape.qkv),
        "w_out": (heads, d),
        "w_gate_up": (d, 2 * shape.d_ff),
        "w_down": (shape.d_ff, d),
    }
    return {
        name: Operand(
            shape=size,
            spec=P(None, AXIS) if name in ("w_qkv", "w_gate_up") else P(AXIS),
            scale=size[0] ** -0.5,
        )
        for name, size in sizes.items()
    }


def problem(params: Mapping[str, Any], names: Sequence[str]) -> Problem:
    """Operands and forms of one case."""
    shape, tp, batch = SHAPES[params["model"]], params["tp"], params["batch"]
    if tp > len(jax.devices()):
        raise SystemExit(f"tp={tp} on {len(jax.devices())} devices")
    length, kind = params["seq_len"], params["pass"]
    if kind == "decode":
        x = Operand(shape=(batch, shape.d_model), spec=P())
        size = (batch, length, shape.num_kv_heads, shape.head_dim)
        cache = Operand(shape=size, spec=P(None, None, AXIS))
        more = {"k_cache": cache, "v_cache": cache}
        function, out_spec = decoding_block, P()
    else:
        split = P(None, AXIS)
        x = Operand(shape=(batch, length, shape.d_model), spec=split)
        more = {"dy": x} if kind == "fwd_bwd" else {}
        function, out_spec = training_block, split
        if kind == "fwd_bwd":
            function = training_step
            out_spec = (split, split, *(o.spec for o in weights(shape).values()))
    operands = {"x": x, **more, **weights(shape)}
    options = {"shape": shape, "size": tp}
    forms = [
        Form(
            name=name,
            function=functools.partial(
                function, implementation=implementation, **options
            ),
            operands=tuple(operands),
            out_spec=out_spec,
            check="all",
            compiler_options=compiler_options,
        )
        for name, (implementation, compiler_options) in FORMS.items()
        if name in names
    ]

    def expected(drawn: Mapping[str, jax.Array]) -> Any:
        wide = [drawn[name].astype(jnp.float32) for name in operands]
        return sampled(function(*wide, implementation="xla", **options))

    mesh = jax.make_mesh((tp,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:tp])
    spread = P(AXIS) if kind == "decode" else out_spec  # every device's own copy
    return Problem(
        label=" ".join(f"{key}={value}" for key, value in params.items()),
        mesh=mesh,
        operands=operands,
        derived={},
        forms=forms,
        checks={"all": Check(expected=expected, found=sampled, spec=spread)},
        num_sets=1,  # the weights alone exceed the L2
        seconds=estimate(params),
    )


def sampled(results: Any) -> Any:
    """Some rows of every result, in whole."""

    def some(x: jax.Array) -> jax.Array:
        axis = max(x.ndim - 2, 0)
        return lax.slice_in_dim(x, 0, None, max(1, x.shape[axis] // 61), axis)

    return jax.tree.map(some, results)


def flops(params: Mapping[str, Any]) -> float:
    """FLOPs of each device: useful ones, causal attention counts half."""
    shape, batch, length = SHAPES[params["model"]], params["batch"], params["seq_len"]
    decodes = params["pass"] == "decode"
    tokens = batch if decodes else batch * length
    seen = length if decodes else length / 2
    heads = shape.num_heads * shape.head_dim
    forward = tokens * (2 * shape.parameters + 4 * heads * seen)
    return forward * (3 if params["pass"] == "fwd_bwd" else 1) / params["tp"]


def estimate(params: Mapping[str, Any]) -> float:
    """About how many seconds a call takes."""
    nbytes = 2 * SHAPES[params["model"]].parameters / params["tp"]
    return max(1.4 * flops(params) / 650e12, nbytes / 3e12) + 100e-6


def metrics(params: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Useful FLOP/s of one device."""
    return {"tflops": flops(params) / seconds / 1e12}


def compare(
    params: Mapping[str, Any], seconds: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Speed-up over XLA's plain form, and over the best of its forms."""
    found: dict[str, dict[str, float]] = {name: {} for name in seconds}
    theirs = [t for name, t in seconds.items() if name.startswith("xla_")]
    for name, t in seconds.items():
        if "xla_nccl" in seconds:
            found[name]["speedup"] = seconds["xla_nccl"] / t
        if theirs and not name.startswith("xla_"):
            found[name]["speedup_best_xla"] = min(theirs) / t
    return found


def measure(
    cases: Sequence[Case], names: Sequence[str], samples: int
) -> Iterator[tuple[Case, Results]]:
    """Time the cases."""
    problems = [problem(case.params, names) for case in cases]
    measured = loops.measure(problems, samples, batch=4)
    for case, (_, results) in zip(cases, measured, strict=True):
        yield case, results


def _elsewhere(params: Any, seed: int, samples: int) -> Any:
    raise NotImplementedError("`measure` times all implementations")


def _cases(model: str, tp: int, batch: int, seq_len: int, batches: Sequence[int]):
    sizes = {"model": model, "tp": tp}
    for kind in ("fwd", "fwd_bwd"):
        train = {"pass": kind, "batch": batch, "seq_len": seq_len}
        yield Case(f"{model}_block", {**sizes, **train})
    for rows in batches:
        decode = {"pass": "decode", "batch": rows, "seq_len": 1024}
        yield Case(f"{model}_decode", {**sizes, **decode})


BENCHMARK = Benchmark(
    name="tensor_parallel_block",
    cases=[
        case
        for tp in (4, 2)
        for case in _cases("llama70b", tp, 1, 8192, (1, 4, 16, 32, 64))
    ],
    quick_cases=list(_cases("tiny", 4, 2, 64, (4,))),
    kernels=("collective_matmul",),
    devices=lambda params: params["tp"],
    inputs=lambda params, key: (),
    implementations={name: Custom(_elsewhere) for name in FORMS},
    metrics=metrics,
    measure=measure,
    compare=compare,
    selectors={"pass": "pass", "tp": "tp", "batch": "batch"},
    timing="wall time a call in loops inside one program, in random order",
    max_rel_error=5e-2,
    samples=7,
)

if __name__ == "__main__":
    prepare_devices(sys.argv[1:])
    command.run(BENCHMARK)
