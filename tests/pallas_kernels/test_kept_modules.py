"""Lowered kernels that are kept: equal ones are lowered once, others are not mixed."""

import functools
import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import keep_modules, kept_modules
from pallas_kernels.mosaic.kept_modules import identity


def program(number, size=128, name="kept"):
    """A program with a kernel that adds a number."""

    def body(x, y):
        y[...] = x[...] + number

    return jax.jit(
        lambda x: plgpu.kernel(
            body, out_type=jax.ShapeDtypeStruct((size,), jnp.float32), kernel_name=name
        )(x)
    ), jax.ShapeDtypeStruct((size,), jnp.float32)


def lower(number, size=128, name="kept"):
    fn, x = program(number, size, name)
    with keep_modules():
        return fn.trace(x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def count(monkeypatch):
    """How often JAX lowers a kernel, from here on."""
    calls = []

    def lowered(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    plain = kept_modules.PLAIN
    monkeypatch.setattr(kept_modules, "PLAIN", lowered)
    monkeypatch.setattr(kept_modules, "_kept", {})
    return lambda: len(calls)


def test_outside_jax_lowers_as_ever():
    """Also after an error, and while one of two that were entered goes on."""
    plain = kept_modules.PLAIN
    assert lowering.lower_jaxpr_to_module is plain  # importing changes nothing
    with keep_modules():
        with pytest.raises(RuntimeError), keep_modules():
            raise RuntimeError
        assert lowering.lower_jaxpr_to_module is kept_modules.lower_jaxpr_to_module
    assert lowering.lower_jaxpr_to_module is plain


def test_another_program_has_the_same_module(count):
    first = lower(1.0)
    assert (lower(1.0), count()) == (first, 1)


def test_another_kernel_has_its_own(count):
    texts = {lower(1.0), lower(2.0), lower(1.0, 256), lower(1.0, name="other")}
    assert (len(texts), count()) == (4, 4)


def test_a_module_is_the_same_each_time(count, monkeypatch):
    """All but the number of a kernel, by which JAX names the files of a dump."""
    codes = []
    for _ in range(3):
        monkeypatch.setattr(kept_modules, "_kept", {})
        lower(1.0)
        lower(1.0)
        ((code, _),) = kept_modules._kept.values()
        codes.append(code)
    assert count() == 3
    # Of three numbers in a row two have as many digits.
    one, other = next(p for p in itertools.pairwise(codes) if len({*map(len, p)}) == 1)
    assert sum(a != b for a, b in zip(one, other, strict=True)) <= 2


def test_modules_are_simplified(monkeypatch):
    plain, sizes = kept_modules.PLAIN, []

    def lowered(*args, **kwargs):
        result, code = plain(*args, **kwargs), io.BytesIO()
        result.module.operation.write_bytecode(code)
        sizes.append(len(code.getvalue()))
        return result

    monkeypatch.setattr(kept_modules, "PLAIN", lowered)
    monkeypatch.setattr(kept_modules, "_kept", {})
    lower(1.0, size=4096)
    ((code, _),) = kept_modules._kept.values()
    assert len(code) < 0.8 * sizes[0]


def test_only_the_latest_are_kept(count, monkeypatch):
    monkeypatch.setattr(kept_modules, "_MOST", 2)
    for number in (1.0, 2.0, 3.0, 3.0, 2.0, 1.0):
        lower(number)
    assert count() == 4
    assert len(kept_modules._kept) == 2


def test_functions_are_compared_by_what_they_hold():
    def adds(number):
        return lambda x: x + number

    def subtracts(number):
        return lambda x: x - number

    assert identity(adds(1)) == identity(adds(1))
    others = [adds(2), adds(1.0), subtracts(1), functools.partial(adds(1), 3)]
    assert all(identity(adds(1)) != identity(other) for other in others)
    partial = functools.partial
    assert identity(partial(adds, 1)) == identity(partial(adds, 1))
    assert identity(partial(adds, 1)) != identity(partial(adds, True))


def test_traces_are_compared_by_their_equations():
    def trace(fn):
        return identity(jax.make_jaxpr(fn)(1.0, 2.0))

    same = trace(lambda x, y: jnp.sin(x) * y)
    assert trace(lambda a, b: jnp.sin(a) * b) == same
    for other in (
        lambda x, y: jnp.sin(y) * x,
        lambda x, y: jnp.sin(x) * x,
        lambda x, y: jnp.cos(x) * y,
        lambda x, y: jnp.sin(x) * 2.0,
    ):
        assert trace(other) != same


def test_arrays_are_compared_by_content():
    assert identity(np.arange(3)) == identity(np.arange(3))
    assert identity(np.arange(3)) != identity(np.arange(3, dtype=np.int32))
    assert identity(np.zeros(1)) != identity(-np.zeros(1))


def test_what_cannot_be_compared_is_lowered_anew(count, monkeypatch):
    monkeypatch.setattr(kept_modules, "identity", lambda value: [])
    lower(1.0)
    lower(1.0)
    assert count() == 2
