"""The share of a GPU's memory that JAX reserves."""

import ctypes
import os

import jax


_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_USUAL = 0.75  # of JAX without either

_LEFT = 1_300_000_000
"""Bytes of a GPU that JAX does not count: 0.5 GB of CUDA's context, kernels and graphs,
0.2 GB of cuBLAS and cuDNN, 0.3 GB of NCCL's buffers on several GPUs."""

SERVING = 0.95
"""The most that a process reserves that serves."""


def reserve_for_serving() -> None:
    """Let JAX reserve up to 0.95 of each GPU; 1.3 GB stay free.

    Nothing changes if it has begun or the user says otherwise. To be called before JAX
    is asked for its devices: this is when it reserves. It is said by a variable of the
    environment, which processes that this one starts have, too.
    """
    if not (_has_begun() or _chosen()):
        os.environ[_NAMES[0]] = f"{serving_share(_smallest_gpu()):.4g}"


def serving_share(size: int | None) -> float:
    """The share to reserve of a GPU of so many bytes; None is unknown.

    Example:
        >>> serving_share(80 << 30), serving_share(13 * 10**9)
        (0.95, 0.9)
    """
    return SERVING if size is None else max(min(SERVING, 1 - _LEFT / size), 0.5)


class _MemoryInfo(ctypes.Structure):
    """NVML's ``nvmlMemory_t``, in bytes."""

    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


def _smallest_gpu() -> int | None:
    """Bytes of the smallest GPU, which the driver knows before JAX begins."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    count, sizes = ctypes.c_uint(), []
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for i in range(count.value):
        device, info = ctypes.c_void_p(), _MemoryInfo()
        if nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(device)):
            continue
        if not nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(info)):
            sizes.append(info.total)
    nvml.nvmlShutdown()
    return min(sizes, default=None)


def reserved_share() -> float:
    """The share of each GPU that JAX has reserved, or will."""
    return float(_chosen() or _USUAL)


def share_name() -> str:
    """The variable of the environment that says it: JAX takes only one of two."""
    return next(filter(os.environ.get, _NAMES), _NAMES[0])


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
