"""The Triton kernel on a CPU: compiled for three generations of GPUs; refusals."""

import functools
import os
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import triton_call
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, DeviceSpec, use_device
from pallas_kernels.tile_sparse_matmul import tile_sparse_matmul
from pallas_kernels.tile_sparse_matmul.triton import launch_of, tile_sparse_kernel
from tests.pallas_kernels.tile_sparse_matmul.cases import random_weight


SMEM_BYTES = {80: 166_912, 89: 101_376, 90: 232_448}


def device_of(capability):
    return DeviceSpec(
        name=f"sm_{capability}",
        num_sms=108,
        smem_bytes=SMEM_BYTES[capability],
        compute_capability=divmod(capability, 10),
    )


def compiled(capability, tokens, tile, dtype, activation, y_major):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = tile_sparse_kernel()
    launch = launch_of(tokens, tile, 4096 // tile, device_of(capability))
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
    types = dict.fromkeys(constants, "constexpr")
    for name in ("x", "values", "bias", "out"):
        types[name] = f"*{dtype}"
    types |= {"rows": "*i32", "counts": "*i32"}
    ordered = {name: types[name] for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(6)}
    return triton.compile(
        ASTSource(kernel, ordered, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize(
    ("tokens", "tile", "dtype", "activation", "y_major"),
    [
        (4096, 128, "bf16", "none", True),
        (1000, 64, "fp16", "gelu_tanh", False),
        (64, 256, "bf16", "silu", True),
        (8, 128, "bf16", "gelu", False),
    ],
)
def test_kernel_compiles(capability, tokens, tile, dtype, activation, y_major):
    kernel = compiled(capability, tokens, tile, dtype, activation, y_major)
    assert kernel.metadata.shared <= SMEM_BYTES[capability]
    ptx = kernel.asm["ptx"]
    # The gather stays asynchronous: rows go to shared memory 16 bytes at a time.
    assert "cp.async.cg.shared.global" in ptx
    assert ("wgmma.mma_async" if capability == 90 else "mma.sync") in ptx
    assert kernel.asm["cubin"]


def test_the_kernel_says_what_it_needs():
    w, _, _ = random_weight(128, 128, 64, [64, 30], dtype=jnp.bfloat16)
    small, _, _ = random_weight(128, 128, 32, [64, 30, 1, 2], dtype=jnp.bfloat16)
    x = jnp.ones((8, 128), jnp.bfloat16)
    run = functools.partial(tile_sparse_matmul, implementation="triton")
    with pytest.raises(Unsupported, match="needs an NVIDIA Ampere, Ada, Hopper or"):
        run(x, w)
    with use_device(device_of(80)):
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
