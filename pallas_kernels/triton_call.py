"""Kernels in Triton, launched through jax-triton: for NVIDIA GPUs other than Hopper.

Triton and jax-triton are an extra, so nothing here imports them before a kernel runs.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec


GENERATIONS = (8, 9, 10, 12)
"""First numbers of compute capabilities: Ampere and Ada, Hopper, Blackwell twice."""
_LEAST_SMEM = 101_376  # of the GPUs whose tiles are the smallest


def check_triton(device: DeviceSpec | None, op_name: str) -> DeviceSpec:
    """Returns the device if Triton's kernels run on it.

    Raises:
        Unsupported: there is no NVIDIA GPU, it is older than Ampere or has too little
            shared memory, or jax-triton is not installed.
    """
    if device is None or device.compute_capability[0] not in GENERATIONS:
        raise Unsupported(
            f"{op_name}: the Triton kernel needs an NVIDIA Ampere, Ada, Hopper or"
            f" Blackwell GPU, got {device and device.name}; use implementation='xla'"
        )
    if device.smem_bytes < _LEAST_SMEM:
        raise Unsupported(
            f"{op_name}: {device.name} has {device.smem_bytes} bytes of shared memory a"
            f" block, the Triton kernel needs {_LEAST_SMEM}; use implementation='xla'"
        )
    if importlib.util.find_spec("jax_triton") is None:
        raise Unsupported(
            f"{op_name}: the Triton kernel needs jax-triton; pip install '.[triton]' in"
            " a clone of jaxscale, or use implementation='xla'"
        )
    return device


def triton_call(
    kernel: str,
    arrays: Sequence[jax.Array],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    constants: Mapping[str, Any],
) -> tuple[jax.Array, ...]:
    """Launches a kernel; under `jax.vmap` once for each element.

    Args:
        kernel: the op and the name of a function of its `triton_kernels`, as in
            "layer_norm.normalize": of pointers to the arrays and the outputs, and of
            the constants.
        arrays: what it reads.
        out_shape: shapes and types of what it writes.
        grid: programs along each axis.
        num_warps: warps of a program.
        num_stages: depth of Triton's pipeline.
        constants: values of the parameters that are `tl.constexpr`.
    """
    op, function = kernel.split(".")
    kernels = importlib.import_module(f"pallas_kernels.{op}.triton_kernels")
    call = functools.partial(
        _jax_triton().triton_call,
        kernel=getattr(kernels, function),
        out_shape=list(out_shape),
        grid=grid,
        name=f"{op}_{function}",
        num_warps=num_warps,
        num_stages=num_stages,
        **constants,
    )
    # jax-triton has no batching rule.
    return tuple(jax.custom_batching.sequential_vmap(call)(*arrays))


def _jax_triton() -> Any:
    """The module jax_triton.

    It empties Triton's cache directory in the environment, without which others who use
    Triton in the process, `torch.compile` among them, fail.
    """
    before = os.environ.get("TRITON_CACHE_DIR")
    module = importlib.import_module("jax_triton")
    if before is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = before
    return module
