"""Matmuls of fp8 operands: our Hopper kernel, cuBLASLt by XLA and by torch, and bf16.

Every implementation is compared with the fp32 matmul of the fp8 numbers and their
scales. So what matmuls in bf16, of the numbers before they were rounded, are off by is
what rounding to fp8 costs.

``xla`` and ``torch_exact`` ask cuBLASLt for sums that are promoted, as the kernel's
are; ``xla_fast`` and ``torch_fast`` leave them to the tensor cores. ``xla_fused`` hands
both scales to cuBLASLt, which writes bf16 (one scale per operand only); ``xla`` is the
public function. ``bf16_mosaic_gpu`` and ``bf16_dense`` (cuBLAS) multiply 16 bits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.measure import command
from benchmarks.measure.harness import Benchmark, Case, Jax, Params, Torch
from pallas_kernels.matmul import matmul
from pallas_kernels.scaled_matmul import quantize_fp8, reference, scaled_matmul
from pallas_kernels.scaled_matmul.specs import SPECS


_SHORT = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_LONG = {short: name for name, short in _SHORT.items()}


def case(name: str, m: int, n: int, k: int, types: str, scales: str) -> Case:
    """A matmul of M rows, N columns and K inputs, scaled by ``row`` or ``tensor``."""
    return Case(name, {"M": m, "N": n, "K": k, "types": types, "scales": scales})


def dtypes(params: Params) -> list[str]:
    """Types of both operands, as in ``e5m2 x e4m3``."""
    return [_LONG[short] for short in params["types"].split(" x ")]


def inputs(params: Params, key: jax.Array) -> tuple[jax.Array, ...]:
    """Bits of both operands (torch reads no fp8 of JAX), scales, and both in bf16."""
    axis = -1 if params["scales"] == "row" else None
    rows = params["M"], params["N"]
    found: list[tuple[jax.Array, ...]] = []
    for size, dtype, drawn in zip(
        rows, dtypes(params), jax.random.split(key), strict=True
    ):
        # Drawn in fp32: in bf16 the largest number of each row would be the same.
        x = jax.random.normal(drawn, (size, params["K"]))
        q, scale = quantize_fp8(x, dtype, axis=axis)
        bits = lax.bitcast_convert_type(q, jnp.uint8)
        found.append((bits, scale, x.astype(jnp.bfloat16)))
    (a, a_scale, x), (b, b_scale, w) = found
    return a, b, a_scale, b_scale, x, w


def of_fp8(function: Callable[..., Any], params: Params) -> Callable[..., Any]:
    """A function of fp8 operands and scales, as one of `inputs`."""
    types = dtypes(params)

    def run(a, b, a_scale, b_scale, x, w):
        a, b = (
            lax.bitcast_convert_type(bits, dtype)
            for bits, dtype in zip((a, b), types, strict=True)
        )
        return function(a, b, a_scale, b_scale)

    return run


def public(name: str) -> Jax:
    """The public function with one implementation."""
    return Jax(
        functools.partial(of_fp8, functools.partial(scaled_matmul, implementation=name))
    )


def xla_fast(params: Params) -> Callable[..., Any]:
    """Sums left to the tensor cores."""

    def run(a, b, a_scale, b_scale):
        sums = lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return (sums * a_scale[..., None] * b_scale).astype(jnp.bfloat16)

    return of_fp8(run, params)


def xla_fused(params: Params) -> Callable[..., Any]:
    """The form in which XLA hands scales to cuBLASLt, with promoted sums."""
    if params["scales"] != "tensor":
        raise NotImplementedError("cuBLASLt takes one scale of an operand on Hopper")

    def run(a, b, a_scale, b_scale):
        a, b = (
            x.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
            for x, scale in ((a, a_scale), (b, b_scale))
        )
        return lax.dot_general(
            a,
            b,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.bfloat16,
        )

    return of_fp8(run, params)


def torch_scaled_mm(params: Params, *, fast: bool) -> Callable[..., Any]:
    """``torch._scaled_mm``."""
    import torch

    types = [getattr(torch, name) for name in dtypes(params)]
    by_row = params["scales"] == "row"

    def run(a, b, a_scale, b_scale, x, w):
        if by_row:
            a_scale, b_scale = a_scale[:, None], b_scale[None]
        return torch._scaled_mm(
            a.view(types[0]),
            b.view(types[1]).t(),
            scale_a=a_scale,
            scale_b=b_scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    return run


def bf16(name: str) -> Jax:
    """The matmul of 16 bits with one implementation."""
    run = functools.partial(matmul, rhs_transposed=True, implementation=name)
    return Jax(lambda params: lambda a, b, a_scale, b_scale, x, w: run(x, w))


BENCHMARK = Benchmark(
    name="scaled_matmul",
    cases=[
        case(
            s.name,
            s.m,
            s.n,
            s.k,
            " x ".join(_SHORT[t] for t in s.types),
            "row" if s.by_row else "tensor",
        )
        for s in SPECS
    ],
    quick_cases=[
        case("tiny", 72, 192, 256, "e4m3 x e4m3", "row"),
        case("tiny_mixed", 64, 128, 256, "e5m2 x e4m3", "tensor"),
    ],
    kernels=("scaled_matmul",),
    inputs=inputs,
    reference=lambda params: of_fp8(reference.scaled_matmul, params),
    implementations={
        "mosaic_gpu": public("mosaic_gpu"),
        "xla": public("xla"),
        "xla_fused": Jax(xla_fused),
        "xla_fast": Jax(xla_fast),
        "torch_exact": Torch(functools.partial(torch_scaled_mm, fast=False)),
        "torch_fast": Torch(functools.partial(torch_scaled_mm, fast=True)),
        "bf16_mosaic_gpu": bf16("mosaic_gpu"),
        "bf16_dense": bf16("xla"),
    },
    metrics=lambda params, s: {
        "tflops": 2 * params["M"] * params["N"] * params["K"] / s / 1e12
    },
    # The matmul in bf16 is that of other numbers.
    max_rel_error=0.1,
    selectors={"rows": "M", "scales": "scales"},
)

if __name__ == "__main__":
    command.run(BENCHMARK)
