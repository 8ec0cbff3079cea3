"""Kernels on the host: one callback for each device, a thread for each warpgroup.

The stock interpreter turns a kernel into a program with a callback for each operation,
which XLA compiles for seconds and runs in milliseconds, and whose blocked callbacks use
up XLA's threads. Here its code runs on numpy values in one callback, and where it would
emit a callback the function is called at once.
"""

import contextvars
import dataclasses
import functools
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import callback as jax_callback
from jax._src import config
from jax._src import core as jax_core
from jax._src.pallas.mosaic.interpret import thread_map as stock_thread_map
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as pallas_call
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret as stock

from tests.interpreter.run import current_run


_StockDeviceInfo = stock.DeviceInfo
_stock_interpret_pallas_call = pallas_call.interpret_pallas_call
_device: contextvars.ContextVar[stock.DeviceInfo] = contextvars.ContextVar("device")


class Overlay:
    """A module in which some names are others."""

    def __init__(self, module: Any, **names: Any):
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str):
        return getattr(self._module, name)


def call(function, result_types, *args, ordered=False, **kwargs):
    """Call ``function`` at once, as ``io_callback`` does when the program runs."""
    del result_types, ordered
    return function(*args, **kwargs)


def _cond(predicate, yes, no, *operands):
    return yes(*operands) if predicate else no(*operands)


def _fori_loop(lower, upper, body, value):
    for i in range(lower, upper):
        value = body(i, value)
    return value


# What the modules of the stock interpreter take for jax, its parts and `callback`.
HOST_LAX = Overlay(lax, cond=_cond, fori_loop=_fori_loop)
HOST_JAX = Overlay(jax, lax=HOST_LAX)
HOST_CALLBACK = Overlay(jax_callback, io_callback=call)
HOST_NUMPY = Overlay(
    jnp,
    **{
        name: getattr(np, name)
        for name in ("int32", "bool_", "stack", "full", "zeros", "pad", "asarray")
    },
)


def device_info() -> stock.DeviceInfo:
    """The device that the kernel of this thread runs on."""
    return _device.get()


def thread_map(
    f, num_threads, token, *args, use_ordered_callback=False, device_id=None,
    on_exception=lambda *args, **kwargs: None,
):  # fmt: skip
    """Run ``f(thread, token, *args)`` on ``num_threads`` threads of Python."""
    del use_ordered_callback
    nested = stock_thread_map.NESTED_TOKEN_VALUE

    def run(thread: int) -> None:
        try:
            with np.errstate(all="ignore"):
                f(thread, nested, *args)
        except Exception as error:
            on_exception(error, device_id=device_id, token=nested)  # wakes the others
            raise

    with futures.ThreadPoolExecutor(num_threads) as pool:
        running = [
            pool.submit(contextvars.copy_context().run, run, thread)
            for thread in range(num_threads)
        ]
    errors = [error for future in running if (error := future.exception())]
    if errors:
        on_exception(errors[0], device_id=device_id, token=token)
        raise errors[0]
    return token


def _cluster(mesh):
    """With ``concurrent_blocks`` the whole grid is one cluster."""
    if not current_run().concurrent_blocks or mesh is None or not mesh.grid:
        return mesh
    return dataclasses.replace(
        mesh,
        grid=(),
        grid_names=(),
        cluster=(*mesh.grid, *mesh.cluster),
        cluster_names=(*mesh.grid_names, *mesh.cluster_names),
    )


def _run_kernel(indices, args, *, axis_sizes, params):
    """The whole kernel of one device, from its arrays to its results."""
    info = object.__new__(_StockDeviceInfo)
    object.__setattr__(info, "axis_sizes", axis_sizes)
    object.__setattr__(
        info, "axis_indices", dict(zip(axis_sizes, map(int, indices), strict=True))
    )
    params = params | {"mesh": _cluster(params["mesh"])}
    before = _device.set(info)
    try:
        with np.errstate(all="ignore"):
            return _stock_interpret_pallas_call(*map(np.asarray, args), **params)
    finally:
        _device.reset(before)


def interpret_pallas_call(*args, **params):
    """The kernel as a single callback, ordered among those of its device."""
    axis_sizes = dict(jax_core.get_axis_env().axis_sizes)
    with config._check_vma(False):
        return jax_callback.io_callback(
            functools.partial(_run_kernel, axis_sizes=axis_sizes, params=params),
            [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in params["out_avals"]],
            [lax.axis_index(name) for name in axis_sizes],
            list(args),
            ordered=True,
        )
