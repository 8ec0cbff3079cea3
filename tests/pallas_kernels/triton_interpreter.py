"""Triton's kernels on a CPU: its interpreter in the place of jax-triton.

`interpreted(monkeypatch)` has `pallas_kernels.triton_call` run kernels by numpy, one
program after the other, inside the program that JAX computes. Outputs begin as NaN.
`installed(monkeypatch)` has programs traced as where jax-triton is installed.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import triton_call
from pallas_kernels.mosaic import H200


_one = threading.Lock()  # the interpreter has one grid at a time


@functools.cache
def _kernels(path):
    """The kernels of a file, made for the interpreter: a module of their own."""
    import triton

    spec = importlib.util.spec_from_file_location("interpreted_kernels", path)
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _language(kernel):
    """Triton's own functions in Triton, such as `tl.zeros`, for the interpreter."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    with pytest.MonkeyPatch.context() as patch:
        for module in (tl, tl.standard):
            for name, value in tuple(vars(module).items()):
                if isinstance(value, JITFunction):
                    patch.setattr(module, name, _interpreted_function(value))
        scope = interpreter._patch_lang(kernel)
        scopes = scope, interpreter._patch_lang(tl.standard.zeros.fn)
        # numpy 2.5 makes no number of an array of one element.
        scope.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
        # Once is enough, and not at each call of a function.
        patch.setattr(
            interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope()
        )
        try:
            yield
        finally:
            for each in reversed(scopes):
                each.restore()


@functools.cache
def _interpreted_function(function):
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(function.fn)


def _pointer(array):
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    names = {"float16": "fp16", "float32": "fp32", "int32": "int32", "int8": "int8"}
    element = tl.dtype(names[array.dtype.name])
    kind = tl.pointer_type(element)
    handle = TensorHandle(np.array([array.ctypes.data], np.uint64), kind)
    return tl.tensor(handle, kind)


def _run(kernel, arrays, out_shape, grid, constants):
    from triton.runtime.interpreter import GridExecutor

    fn = getattr(_kernels(kernel.fn.__code__.co_filename), kernel.fn.__name__)
    inputs = [np.ascontiguousarray(x) for x in arrays]
    outputs = [np.full(x.shape, np.nan, x.dtype) for x in out_shape]
    names = fn.arg_names
    pointers = dict(zip(names, map(_pointer, [*inputs, *outputs]), strict=False))
    with _one, _language(fn.rewrite()), np.errstate(all="ignore"):
        executor = GridExecutor(fn.rewrite(), names, grid)
        executor(**pointers, **constants)
    return tuple(outputs)


def _triton_call(*arrays, kernel, out_shape, grid, **constants):
    for launch in ("name", "num_warps", "num_stages"):
        constants.pop(launch)
    run = functools.partial(
        _run, kernel, out_shape=out_shape, grid=grid, constants=constants
    )
    return jax.pure_callback(lambda *a: run(arrays=a), tuple(out_shape), *arrays)


def interpreted(monkeypatch, *modules):
    """Let modules that launch Triton's kernels run them by the interpreter.

    Args:
        monkeypatch: pytest's.
        *modules: those that import `check_triton`.
    """
    _replace(monkeypatch, _triton_call)
    for module in modules:
        monkeypatch.setattr(
            module, "check_triton", lambda device, op_name: device or H200
        )


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel that is launched."""

    name: str
    kernel: Any
    dtypes: tuple[str, ...]
    num_warps: int
    num_stages: int
    constants: tuple[tuple[str, Any], ...]


def installed(monkeypatch):
    """As where jax-triton is installed; no kernel is made, and results are zero.

    Returns:
        The launches, as they are traced.
    """
    found = []

    def zeros(*arrays, kernel, out_shape, grid, name, num_warps, num_stages, **more):
        assert all(0 < n < 2**31 for n in grid), grid
        dtypes = tuple(x.dtype.name for x in (*arrays, *out_shape))
        constants = tuple(sorted(more.items()))
        found.append(Launch(name, kernel, dtypes, num_warps, num_stages, constants))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in out_shape)

    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: name)
    _replace(monkeypatch, zeros)
    return found


def _replace(monkeypatch, call):
    module = types.SimpleNamespace(triton_call=call)
    monkeypatch.setattr(triton_call, "_jax_triton", lambda: module)
