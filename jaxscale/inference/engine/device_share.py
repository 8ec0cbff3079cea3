"""The share of a GPU's memory that JAX reserves."""

import os

import jax


_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_USUAL = 0.75  # of JAX without either

SERVING = 0.95
"""What a process reserves that serves. On 24 GB this leaves 1.2 GB for what JAX does
not count: 0.5 GB of CUDA's context, kernels and graphs, 0.2 GB of cuBLAS and cuDNN,
0.3 GB of NCCL's buffers on several GPUs."""


def reserve_for_serving() -> None:
    """Let JAX reserve 0.95 of each GPU, unless it has begun or the user says otherwise.

    To be called before JAX is asked for its devices: this is when it reserves.
    """
    if not (_has_begun() or _chosen()):
        os.environ[_NAMES[-1]] = str(SERVING)


def reserved_share() -> float:
    """The share of each GPU that JAX has reserved, or will."""
    return float(_chosen() or _USUAL)


def _chosen() -> str | None:
    return next(filter(None, map(os.environ.get, _NAMES)), None)


def _has_begun() -> bool:
    """Whether JAX knows its devices: this number is settled by then."""
    count = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", count + 2)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False
