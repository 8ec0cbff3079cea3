"""Kernels that are compiled before the programs that call them."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import core
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import compile_ahead, keep_modules, kernels_ahead
from tests.compiled import compile_for_h200, messages


def program(devices, number):
    """A program with a kernel that adds a number."""

    def body(x, y):
        y[...] = x[...] + number

    x = jax.ShapeDtypeStruct((256,), jnp.float32)
    place = jax.sharding.SingleDeviceSharding(devices[0]) if devices else None
    added = plgpu.kernel(body, out_type=x, kernel_name="ahead")
    return jax.jit(added), (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),)


def lower(number):
    fn, shapes = program((), number)
    fn.trace(*shapes).lower(lowering_platforms=("cuda",))


def test_each_kernel_is_compiled_once(monkeypatch):
    compiled, known = [], core.KNOWN_KERNELS
    monkeypatch.setattr(
        kernels_ahead, "compile_kernel", lambda *args: compiled.append(args)
    )
    before = set(known)
    with keep_modules(), compile_ahead(device := jax.devices()[0]):
        lower(8.25)
        lower(8.25)
        lower(8.5)
    lower(8.75)
    assert core.KNOWN_KERNELS is known
    entered = {key: known[key] for key in known if key not in before}
    assert len(compiled) == 2
    assert len(entered) == 3
    assert all(known[key] == code and on is device for key, code, on in compiled)


def test_an_error_ends_it():
    known = core.KNOWN_KERNELS
    with pytest.raises(KeyError), compile_ahead(jax.devices()[0]):
        raise KeyError
    assert core.KNOWN_KERNELS is known


def test_contexts_may_overlap(monkeypatch):
    compiled, known = [], core.KNOWN_KERNELS
    monkeypatch.setattr(
        kernels_ahead, "compile_kernel", lambda *args: compiled.append(args)
    )
    first, second = (compile_ahead(jax.devices()[0]) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    lower(9.25)
    second.__exit__(None, None, None)
    assert len(compiled) == 1
    assert core.KNOWN_KERNELS is known
    lower(9.5)


def test_threads_that_do_not_start_leave_the_program_as_it_is(monkeypatch):
    def submit(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    with compile_ahead(jax.devices()[0]):
        lower(9.75)


def compiled_before(devices):
    """A program for `compile_for_h200` whose kernel is compiled when it is lowered."""
    said = []
    for number, context in ((8.25, compile_ahead(devices[0])), (8.5, None)):
        fn, shapes = program(devices, number)
        if context is None:
            lowered = fn.lower(*shapes)
        else:
            with context:
                lowered = fn.lower(*shapes)
        with messages() as found:
            lowered.compile()
        said += found
    calls = [text.count("Compiling entry function 'ahead") for text in said]
    assert calls == [0, 1], calls
    return fn, shapes


def test_a_program_finds_its_kernel():
    compile_for_h200(compiled_before)
