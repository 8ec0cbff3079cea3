"""The Triton kernel on a CPU: values by its interpreter, compiled for GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.layer_norm import layer_norm, reference, triton
from pallas_kernels.mosaic import use_device
from tests.pallas_kernels.triton_compiled import CAPABILITIES, DEVICES, compile_for
from tests.pallas_kernels.triton_interpreter import interpreted
from tests.tolerances import RELATIVE, relative_error


pytest.importorskip("triton")
EPS = 1e-5


@pytest.mark.parametrize(
    ("shape", "more"), [((5, 3, 70), ("bias", "residual", "x_bias")), ((9, 1000), ())]
)
def test_values_and_gradients(shape, more, monkeypatch):
    interpreted(monkeypatch, triton)
    rng = np.random.default_rng(0)
    columns = shape[-1:]
    shapes = {"x": shape, "scale": columns}
    shapes |= {name: shape if name == "residual" else columns for name in more}
    arrays = {
        name: jnp.asarray(3 + rng.normal(size=size), jnp.float16)
        for name, size in shapes.items()
    }
    run = functools.partial(layer_norm, eps=EPS, implementation="triton")
    y, pullback = jax.vjp(lambda a: run(**a), arrays)
    exact = {name: a.astype(jnp.float32) for name, a in arrays.items()}

    def definition(a):
        a = {n: v.reshape(-1, v.shape[-1]) if v.ndim > 1 else v for n, v in a.items()}
        none = dict.fromkeys(("bias", "residual", "x_bias"))
        return reference.layer_norm(**(none | a), eps=EPS).reshape(shape)

    want, wanted_pullback = jax.vjp(definition, exact)
    assert y.dtype == jnp.float16
    assert relative_error(y, want) < RELATIVE[jnp.dtype("float16")]
    dy = jnp.asarray(rng.normal(size=shape), jnp.float16)
    found, wanted = pullback(dy)[0], wanted_pullback(dy.astype(jnp.float32))[0]
    for name, gradient in found.items():
        assert relative_error(gradient, wanted[name]) < 0.01, name


@pytest.mark.parametrize("width", [768, 8192])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernel_compiles(capability, width):
    from pallas_kernels.layer_norm import triton_kernels

    x = jax.ShapeDtypeStruct((4096, width), jnp.bfloat16)
    names = ("has_bias", "has_residual", "has_x_bias")
    found, _, stack = compile_for(
        capability,
        triton_kernels.normalize,
        ["bfloat16"] * 6,
        triton.constants(x, EPS) | dict.fromkeys(names, True),
        num_warps=triton.warps_of(width),
        num_stages=2,
    )
    assert found.metadata.shared <= DEVICES[capability].smem_bytes
    assert stack == 0
    assert "ld.global.v4" in found.asm["ptx"] or "ld.global.v2" in found.asm["ptx"]


def test_what_it_cannot_do_is_said(monkeypatch):
    monkeypatch.setattr(triton, "check_triton", lambda device, _: device)
    wide = jnp.zeros((1, 16_385), jnp.bfloat16)
    with (
        use_device(DEVICES[80]),
        pytest.raises(Unsupported, match="takes 1 to 16384 columns"),
    ):
        layer_norm(wide, wide[0], eps=EPS, implementation="triton")
