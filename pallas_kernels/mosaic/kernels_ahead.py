"""Kernels that are compiled while the program that calls them is lowered.

XLA compiles the kernels of a program one after the other, each for a third of a second
or more, and a training step in fp8 has dozens. What it has compiled it keeps for all
programs of the process, by a hash of the kernel. So within `compile_ahead` threads
compile a program of its own for each kernel, as soon as JAX has lowered it. These
programs never run.
"""

import concurrent.futures
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.experimental.mosaic.gpu import core
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import SingleDeviceSharding
from jaxlib.mlir import ir


_lock = threading.Lock()
_entered = 0
_before: dict[bytes, bytes] = core.KNOWN_KERNELS


@contextlib.contextmanager
def compile_ahead(device: Any) -> Iterator[None]:
    """Compiles kernels in threads, from the moment when they are lowered in here.

    Errors are left to the programs that call the kernels. Where these come from a cache
    of compiled programs, it would be for nothing. Contexts that overlap, also in other
    threads, share the device of the first one.

    Args:
        device: a GPU of this process, of the kind of those that run the kernels.
    """
    global _entered, _before
    with _lock:
        if not _entered:
            _before = core.KNOWN_KERNELS
            core.KNOWN_KERNELS = _Known(_before, device)
        _entered += 1
    failed = True
    try:
        yield
        failed = False
    finally:
        pool = None
        with _lock:
            _entered -= 1
            if not _entered:
                known: Any = core.KNOWN_KERNELS
                pool = known.pool
                _before.update(known)
                core.KNOWN_KERNELS = _before
        if pool is not None:
            pool.shutdown(cancel_futures=failed)


class _Known(dict[bytes, bytes]):
    """Serialized kernels by their hashes, where JAX enters each that it lowers."""

    def __init__(self, known: dict[bytes, bytes], device: Any) -> None:
        super().__init__(known)
        self.pool = concurrent.futures.ThreadPoolExecutor()
        self._device = device

    def __setitem__(self, key: bytes, module: bytes) -> None:
        super().__setitem__(key, module)
        # Without threads, or when the last context is left, nothing is ahead.
        with contextlib.suppress(RuntimeError):
            self.pool.submit(compile_kernel, key, module, self._device)


AHEAD = "jit_compiled_ahead"
"""How the names of its programs begin, also in JAX's cache of compiled programs."""


def compile_kernel(key: bytes, module: bytes, device: Any) -> None:
    """Compiles a program that has a kernel; XLA looks at no more of it than these.

    Args:
        key: its hash.
        module: the serialized kernel.
        device: the GPU that it is for.
    """

    def compiled_ahead() -> jax.Array:
        return _kernel.bind(key=key, module=module)

    fn = jax.jit(compiled_ahead, out_shardings=SingleDeviceSharding(device))
    fn.trace().lower(lowering_platforms=("cuda",)).compile()


def _lower_kernel(ctx: Any, *, key: bytes, module: bytes) -> Any:
    config: dict[str, Any] = {
        "kernel_hash": ir.StringAttr.get(key),
        "module": ir.StringAttr.get(module),
    }
    for flag in (
        "use_custom_barrier",
        "skip_device_barrier",
        "uses_xla_collective_metadata",
    ):
        config[flag] = ir.BoolAttr.get(False)
    return jax.ffi.ffi_lowering("mosaic_gpu_v2", backend_config=config)(ctx)


_kernel: Any = Primitive("mosaic_gpu_kernel")
_kernel.def_abstract_eval(lambda **_: ShapedArray((1,), jnp.float32))
mlir.register_lowering(_kernel, _lower_kernel)
