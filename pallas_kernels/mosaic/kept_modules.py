"""Lowered kernels that are kept, so that no two programs lower the same one.

JAX lowers a kernel anew in every program, each time for a few tenths of a second to
seconds of Python. A server has dozens of programs with the same few kernels. Within
`keep_modules` the module of a kernel is kept under all that it is made from: the traced
kernel, its shapes, its grid, its parameters and the settings of JAX. What cannot be
compared by its value makes a key that no other kernel has.

Modules are simplified before they are kept: that leaves half of their bytes. XLA has
them in each call of a kernel, of which a model has some for each layer, and copies,
compares and parses them in its passes.

JAX has no public place for this. So this file alone imports private modules of JAX; the
project's metadata bounds the versions.
"""

import contextlib
import functools
import gc
import io
import threading
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src.config import trace_context
from jax._src.pallas.mosaic_gpu import lowering
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jaxlib.mlir import ir, passmanager


_MOST = 1024  # modules, of 0.03 to 0.3 MB each
_kept: dict[Hashable, tuple[bytes, dict[str, Any]]] = {}
"""Bytecode and the other fields of what `PLAIN` returns, by key."""

_SIMPLIFY = "builtin.module(canonicalize,cse)"

PLAIN: Callable[..., Any] = lowering.lower_jaxpr_to_module
"""What JAX does: it lowers a kernel anew."""


_lock = threading.Lock()
_entered = 0
_before: Callable[..., Any] = PLAIN


@contextlib.contextmanager
def keep_modules() -> Iterator[None]:
    """Lowers each kernel once in all programs that are lowered in here.

    Modules stay until the next time. Programs that other threads lower meanwhile take
    part; outside JAX lowers as ever.
    """
    global _entered, _before
    with _lock:
        if not _entered:
            _before = lowering.lower_jaxpr_to_module
            lowering.lower_jaxpr_to_module = lower_jaxpr_to_module
        _entered += 1
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if not _entered:
                lowering.lower_jaxpr_to_module = _before


@functools.wraps(PLAIN)
def lower_jaxpr_to_module(*args: Any, **kwargs: Any) -> Any:
    """What `PLAIN` returns, from the modules that are kept if it is there."""
    # Where the kernel was called from is for messages of errors.
    others = {k: v for k, v in kwargs.items() if k != "outer_traceback"}
    try:
        key = (trace_context(), identity((args, others)))
        found = _kept.get(key)
    except (TypeError, RecursionError):  # not hashable, or a function that holds itself
        return PLAIN(*args, **kwargs)
    if found is not None:
        code, fields = found
        module = ir.Module.parse(code, context=ir.Context.current)
        return lowering.LoweringResult(module=module, **fields)
    with _no_collection():
        result = PLAIN(*args, **kwargs)
    passes = passmanager.PassManager.parse(_SIMPLIFY, result.module.context)
    passes.run(result.module.operation)
    code = io.BytesIO()
    result.module.operation.write_bytecode(code)
    fields = {k: v for k, v in vars(result).items() if k != "module"}
    if len(_kept) >= _MOST:
        del _kept[next(iter(_kept))]
    _kept[key] = code.getvalue(), fields
    return result


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Leaves Python's garbage for later.

    Lowering makes so many small objects that looking for cycles among them takes a
    tenth of its time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def identity(value: Any) -> Any:
    """A value that equals that of another object if both make the same kernel.

    Functions are compared by their code and by what they hold, variables of a trace by
    their place in it, arrays by their content; other objects by themselves.
    """
    match value:
        case Jaxpr():
            return _identity_of_trace(value)
        case ClosedJaxpr():
            return "closed", identity(value.jaxpr), identity(value.consts)
        case types.FunctionType():
            cells = [_content(cell) for cell in value.__closure__ or ()]
            code = value.__code__
            held = (cells, value.__defaults__, value.__kwdefaults__)
            return "function", code.co_filename, code, identity(held)
        case types.MethodType():
            return "method", identity(value.__func__), identity(value.__self__)
        case functools.partial():
            return "partial", identity((value.func, value.args, value.keywords))
        case np.ndarray() | np.generic() | jax.Array() if not isinstance(value, Tracer):
            array = np.asarray(value)
            return "array", array.shape, array.dtype, array.tobytes()
        case tuple() | list():
            return type(value), tuple(map(identity, value))
        case dict():
            return "dict", tuple((key, identity(v)) for key, v in value.items())
        case bool() | int() | float() | complex():
            return type(value), repr(value)  # True is not 1, nor 0.0 -0.0
        case _:
            return value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet: equal to none
        return object()


def _identity_of_trace(jaxpr: Jaxpr) -> Any:
    places: dict[Any, int] = {}

    def atom(variable: Any) -> Any:
        if isinstance(variable, Literal):
            return "literal", variable.aval, identity(variable.val)
        # A variable that nobody has defined is one of an outer trace.
        return places.setdefault(variable, len(places)), variable.aval

    inputs = tuple(atom(v) for v in (*jaxpr.constvars, *jaxpr.invars))
    equations = tuple(
        (
            equation.primitive,
            tuple(map(atom, equation.invars)),
            tuple(map(atom, equation.outvars)),
            identity(equation.params),
        )
        for equation in jaxpr.eqns
    )
    name = jaxpr.debug_info.func_name
    return "trace", name, inputs, equations, tuple(map(atom, jaxpr.outvars))
