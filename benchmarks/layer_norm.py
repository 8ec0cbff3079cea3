"""Layer norms of packed tokens, alone and as the end of a layer's block.

Where `adds` is true a bias and a residual are added first, as behind a matmul:
``norm(x + x_bias + residual)``.

- ``mosaic_gpu``, ``triton``, ``xla``: `layer_norm`.
- ``torch``: `torch.nn.functional.layer_norm`, what is added by itself;
  ``torch_compile``: the same compiled, which makes one kernel of it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.measure import command
from benchmarks.measure.harness import Benchmark, Case, Jax, Params, Torch
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.layer_norm.specs import SPECS


EPS = 1e-12
LEAST_ROWS = 4
"""Of the kernel; a norm of fewer is not measured."""


def case(name: str, t: int, d: int, adds: bool) -> Case:
    """One norm."""
    return Case(name, {"T": t, "D": d, "adds": adds})


def inputs(params: Params, key: jax.Array) -> tuple:
    """Random activations, scale, bias, and what is added."""
    keys = jax.random.split(key, 5)
    wide, narrow = (params["T"], params["D"]), (params["D"],)
    shapes = wide, narrow, narrow, narrow, wide
    drawn = [
        jax.random.normal(k, shape, jnp.bfloat16)
        for k, shape in zip(keys, shapes, strict=True)
    ]
    return tuple(drawn if params["adds"] else drawn[:3])


def normalized(implementation: str) -> Jax:
    """`layer_norm`."""

    def make(params: Params) -> Callable[..., jax.Array]:
        def run(x: Any, scale: Any, bias: Any, *added: Any) -> jax.Array:
            more = dict(zip(("x_bias", "residual"), added, strict=False))
            return layer_norm(
                x, scale, bias, eps=EPS, implementation=implementation, **more
            )

        return run

    return Jax(make)


def reference(params: Params) -> Callable[..., jax.Array]:
    """The definition."""

    def run(x: Any, scale: Any, bias: Any, *added: Any) -> jax.Array:
        for term in added:
            x += term
        x -= x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale + bias

    return run


def torch_norm(compiled: bool) -> Torch:
    """A baseline in torch."""

    def make(params: Params) -> Callable[..., Any]:
        import torch

        def run(x: Any, scale: Any, bias: Any, *added: Any) -> Any:
            for term in added:
                x = x + term
            return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, bias, EPS)

        if not compiled:
            return run
        torch.compiler.reset()  # or else the ninth shape would not be compiled
        return torch.compile(run, dynamic=False)

    return Torch(make)


def metrics(params: Params, seconds: float) -> dict[str, float]:
    """How fast activations are read and written."""
    nbytes = 2 * params["T"] * params["D"] * (3 if params["adds"] else 2)
    return {"tb_per_s": nbytes / seconds / 1e12}


BENCHMARK = Benchmark(
    name="layer_norm",
    cases=[
        case(s.name, s.t, s.d, adds)
        for s in SPECS
        if s.t >= LEAST_ROWS
        for adds in (True, False)
    ],
    quick_cases=[case("tiny", 8, 64, adds) for adds in (True, False)],
    kernels=("layer_norm",),
    inputs=inputs,
    reference=reference,
    implementations={
        "mosaic_gpu": normalized("mosaic_gpu"),
        "triton": normalized("triton"),
        "xla": normalized("xla"),
        "torch": torch_norm(compiled=False),
        "torch_compile": torch_norm(compiled=True),
    },
    metrics=metrics,
    selectors={"rows": "T", "adds": "adds"},
)

if __name__ == "__main__":
    command.run(BENCHMARK)
