"""Lowers kernels for CUDA on a machine without a GPU (the third ring of kernel tests).

The lowering runs all of Pallas and Mosaic GPU down to the serialized kernel: layout
inference, the checks of TMA descriptors and of wgmma operands, the recomputation of
peer ids on the host, and the limit of shared memory per block (227 KiB on Hopper). It
does not run ptxas, so it sees neither register spills nor instructions that ``sm_90``
lacks (TMA gather): `tests.compiled` does.
"""

import contextlib
from collections.abc import Callable, Mapping

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh


CUSTOM_CALL = "mosaic_gpu_v2"
"""How a Mosaic GPU kernel appears in the lowered text."""

MULTICAST_MARK = "symmetric_memory_parameters"
"""What a kernel that asks for NVLink multicast leaves in the lowered text."""


class MulticastRefused(AssertionError):
    """A kernel asks for NVLink multicast, which no kernel of this project may use."""


def cuda_mesh(axis_sizes: Mapping[str, int], num_sms: int = 132) -> AbstractMesh:
    """A mesh of GPUs that need not exist, with automatic axes.

    Args:
        axis_sizes: The axes by name, in order; any number of devices.
        num_sms: What code that asks the mesh's device for its size is told.
    """
    return AbstractMesh(
        tuple(axis_sizes.values()),
        tuple(axis_sizes),
        axis_types=(AxisType.Auto,) * len(axis_sizes),
        abstract_device=AbstractDevice(
            device_kind="NVIDIA H200", num_cores=num_sms, platform="cuda"
        ),
    )


def lower_for_cuda(
    fn: Callable,
    *shapes,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    num_sms: int = 132,
    kernels: int | None = None,
) -> str:
    """Lower ``fn`` for CUDA and return the text.

    Args:
        fn: The function to lower, jitted or not. Static arguments go into a
            ``functools.partial``.
        shapes: A ``jax.ShapeDtypeStruct`` (or an array) for each argument; pytrees too.
        mesh: The context mesh, for functions that call ``jax.shard_map`` without one:
            ``{"tensor": 4}`` makes GPUs that need not exist (see :func:`cuda_mesh`).
            A function that brings its own mesh needs none.
        num_sms: Number of multiprocessors of the abstract device of the context mesh.
        kernels: If given, how many Mosaic GPU kernels the text must hold; without it,
            at least one.

    Returns:
        The StableHLO text.

    Raises:
        MulticastRefused: If a kernel uses ``multicast_ref``, ``multimem_*`` or
            ``semaphore_signal_multicast``.
        AssertionError: If the text holds no kernel (``fn`` fell back to XLA) or not
            ``kernels`` of them.
        Exception: What Pallas raises for a kernel that does not lower.

    Example:
        ``lower_for_cuda(fn, jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16))``
    """
    if isinstance(mesh, Mapping):
        mesh = cuda_mesh(mesh, num_sms)
    if isinstance(mesh, AbstractMesh):
        context = jax.sharding.use_abstract_mesh(mesh)
    elif isinstance(mesh, Mesh):
        context = jax.set_mesh(mesh)
    else:
        context = contextlib.nullcontext()
    jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
    with context:
        text = jitted.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    if MULTICAST_MARK in text:
        raise MulticastRefused(
            f"the lowered kernel holds {MULTICAST_MARK!r}: it uses NVLink multicast "
            "(multicast_ref, multimem_* or semaphore_signal_multicast); send to each "
            "peer with plgpu.remote_ref instead"
        )
    found = text.count(f"@{CUSTOM_CALL}")
    if found == 0 or (kernels is not None and found != kernels):
        wanted = "at least one" if kernels is None else str(kernels)
        raise AssertionError(
            f"expected {wanted} Mosaic GPU kernel(s) in the lowered text, found "
            f"{found}; name the implementation so that nothing falls back to XLA"
        )
    return text
