"""The Triton kernel on a CPU: compiled for three generations of GPUs; refusals."""

import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import triton_call
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.tile_sparse_matmul import passes, tile_sparse_matmul, triton
from tests.pallas_kernels.tile_sparse_matmul.cases import random_weight
from tests.pallas_kernels.triton_compiled import (
    CAPABILITIES,
    DEVICES,
    TENSOR_CORES,
    compile_for,
)
from tests.pallas_kernels.triton_interpreter import interpreted
from tests.tolerances import RELATIVE, relative_error


pytest.importorskip("triton")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("tokens", "tile", "dtype", "activation", "y_major"),
    [
        (4096, 128, "bfloat16", "none", True),
        (1000, 64, "float16", "gelu_tanh", False),
        (64, 256, "bfloat16", "silu", True),
        (8, 128, "bfloat16", "gelu", False),
    ],
)
def test_kernel_compiles(capability, tokens, tile, dtype, activation, y_major):
    from pallas_kernels.tile_sparse_matmul import triton_kernels

    device = DEVICES[capability]
    launch = triton.launch_of(tokens, tile, device)
    constants = {
        "tokens": tokens,
        "features": 4096,
        "room": 1024,
        "tile": tile,
        "block_tokens": launch.block_tokens,
        "step": 64,
        "has_bias": True,
        "activation": activation,
        "y_major": y_major,
    }
    kernel, _, _ = compile_for(
        capability,
        triton_kernels.multiply,
        [dtype, dtype, "int32", "int32", dtype, dtype],
        constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    assert kernel.metadata.shared <= device.smem_bytes
    ptx = kernel.asm["ptx"]
    # The gather stays asynchronous: rows go to shared memory 16 bytes at a time.
    assert "cp.async.cg.shared.global" in ptx
    assert TENSOR_CORES.get(capability, "mma.sync") in ptx
    assert kernel.asm["cubin"]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("tile", "y_major"), [(64, True), (128, False), (256, True)])
def test_gradient_compiles(capability, tile, y_major):
    from pallas_kernels.tile_sparse_matmul import triton_kernels

    device = DEVICES[capability]
    launch = triton.grad_launch_of(tile, device)
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((4096 // tile, 1024, tile), jnp.bfloat16)
    kernel, _, stack = compile_for(
        capability,
        triton_kernels.gradient_of_values,
        [x.dtype, x.dtype, "int32", "int32", x.dtype],
        triton.grad_constants(x, values, 4096, 4096, y_major, launch),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    assert kernel.metadata.shared <= device.smem_bytes
    assert stack == 0
    ptx = kernel.asm["ptx"]
    assert "cp.async" in ptx and TENSOR_CORES.get(capability, "mma.sync") in ptx


@pytest.mark.parametrize("layout", [(True, True), (False, False)])
@pytest.mark.parametrize("granularity", [1, 64])
def test_values_and_gradients(layout, granularity, monkeypatch):
    """Of 100 tokens, tiles that keep none and some rows, and a lost column."""
    interpreted(monkeypatch, triton)
    outputs, pruned = 160, (3,)
    if granularity == 64:  # the transpose has tiles, too
        monkeypatch.setattr(passes, "_dense_grad_inputs", None)
        outputs, pruned = 192, ()
    w, dense, mask = random_weight(
        256, outputs, 64, [64, 0, 128], granularity, jnp.float16, pruned=pruned
    )
    rng = np.random.default_rng(0)
    x_major, y_major = layout
    x, dy = (
        jnp.asarray(rng.normal(size=(n, 100) if major else (100, n)), jnp.float16)
        for n, major in zip((256, outputs), layout, strict=True)
    )

    def ours(x, values):
        return tile_sparse_matmul(
            x,
            w.with_values(values),
            feature_major=layout,
            implementation="triton",
        )

    y, pullback = jax.vjp(ours, x, w.values)
    dx, dvalues = pullback(dy)
    x, dy, y, dx = (
        np.asarray(a, np.float32).T if major else np.asarray(a, np.float32)
        for a, major in ((x, x_major), (dy, y_major), (y, y_major), (dx, x_major))
    )
    assert relative_error(y, x @ dense) < RELATIVE[w.dtype]
    assert relative_error(dx, dy @ dense.T) < RELATIVE[w.dtype]
    found = w.with_values(dvalues).to_dense()
    assert relative_error(found, np.where(mask, x.T @ dy, 0)) < RELATIVE[w.dtype]


def test_the_kernel_says_what_it_needs(monkeypatch):
    w, _, _ = random_weight(128, 128, 64, [64, 30], dtype=jnp.bfloat16)
    small, _, _ = random_weight(128, 128, 32, [64, 30, 1, 2], dtype=jnp.bfloat16)
    x = jnp.ones((8, 128), jnp.bfloat16)
    run = functools.partial(tile_sparse_matmul, implementation="triton")
    with pytest.raises(Unsupported, match="needs an NVIDIA Ampere, Ada, Hopper or"):
        run(x, w)
    monkeypatch.setattr(triton, "check_triton", lambda device, _: device)
    with use_device(DEVICES[80]):
        with pytest.raises(Unsupported, match=r"tile 32 .* takes tiles of \(64, 128"):
            run(x, small)
        with pytest.raises(Unsupported, match="operands of type float32"):
            run(x.astype(jnp.float32), w.with_values(w.values.astype(jnp.float32)))
        with pytest.raises(Unsupported, match=r"needs compute capability 9\.x"):
            tile_sparse_matmul(x, w, implementation="mosaic_gpu")


def test_a_missing_package_is_named(monkeypatch):
    w, _, _ = random_weight(128, 128, 64, [64, 30], dtype=jnp.bfloat16)
    x = jnp.ones((8, 128), jnp.bfloat16)
    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: None)
    with (
        use_device(H200),
        pytest.raises(Unsupported, match=r"pip install '\.\[triton\]' in a clone"),
    ):
        jax.eval_shape(
            functools.partial(tile_sparse_matmul, implementation="triton"), x, w
        )


@pytest.mark.parametrize("before", [None, "somewhere"])
def test_the_cache_of_other_users_of_triton_stays(monkeypatch, tmp_path, before):
    line = 'import os; os.environ["TRITON_CACHE_DIR"] = ""'
    (tmp_path / "jax_triton.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_triton", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", before or "")
    if before is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    assert triton_call._jax_triton().__name__ == "jax_triton"
    assert os.environ.get("TRITON_CACHE_DIR") == before
    del sys.modules["jax_triton"]
