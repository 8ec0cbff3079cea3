"""The Triton kernel on a CPU: values by its interpreter, compiled for GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import use_device
from pallas_kernels.quantized_matmul import quantized_matmul, reference, triton
from tests.pallas_kernels.triton_compiled import DEVICES, compile_for, reads_late
from tests.pallas_kernels.triton_interpreter import interpreted
from tests.tiers import first
from tests.tolerances import RELATIVE, relative_error


pytest.importorskip("triton")


def operands(tokens, depth, features, dtype="float16"):
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, depth)), dtype)
    w = jnp.asarray(rng.integers(-127, 128, (features, depth)), jnp.int8)
    return x, w, jnp.asarray(rng.uniform(0.01, 0.02, features), jnp.float32)


@pytest.mark.parametrize(("tokens", "depth", "features"), [(3, 200, 70), (65, 64, 129)])
def test_values(tokens, depth, features, monkeypatch):
    interpreted(monkeypatch, triton)
    x, w, scale = operands(tokens, depth, features)
    y = quantized_matmul(x, w, scale, implementation="triton")
    want = reference.quantized_matmul(x, w, scale)
    assert y.dtype == x.dtype
    assert relative_error(y, want) < RELATIVE[x.dtype]
    rows = jnp.stack([x, x[::-1]])
    mapped = jax.vmap(lambda x: quantized_matmul(x, w, scale, implementation="triton"))
    np.testing.assert_array_equal(mapped(rows)[0], y)


@pytest.mark.parametrize("tokens", first([1, 32, 64, 4096], 1, 4096))
@pytest.mark.parametrize("weight", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("capability", first(DEVICES, 80, 90, 100, 120))
def test_kernel_compiles(capability, weight, tokens, monkeypatch):
    from pallas_kernels.quantized_matmul import triton_kernels

    device = DEVICES[capability]
    x = jax.ShapeDtypeStruct((tokens, 4096), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((14336, 4096), jnp.dtype(weight))
    scale = jax.ShapeDtypeStruct((14336,), jnp.float32)
    if weight != "int8" and device.compute_capability < (8, 9):
        monkeypatch.setattr(triton, "check_triton", lambda device, _: device)
        with pytest.raises(Unsupported, match=r"fp8 from compute capability 8\.9 on"):
            triton.quantized_matmul(
                *(jnp.zeros(a.shape[-1:] * 2, a.dtype) for a in (x, w)),
                jnp.zeros(4096),
                device=device,
                out_dtype=x.dtype,
            )
        return
    launch = triton.launch_of(tokens, w.shape[0], device)
    found, _, stack = compile_for(
        capability,
        triton_kernels.multiply,
        [x.dtype, w.dtype, scale.dtype, x.dtype],
        triton.constants(x, w, launch),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    assert found.metadata.shared <= device.smem_bytes
    assert stack == 0
    assert "mma" in found.asm["ptx"] and "cp.async" in found.asm["ptx"]


@pytest.mark.parametrize(
    ("waits", "first_operand", "late"),
    [("1", "{%r1, %r2}", True), ("0", "{%r1, %r2}", False), ("1", "%rd1", False)],
)
def test_registers_that_a_product_in_flight_reads_are_seen(waits, first_operand, late):
    """As in the kernel's loop on Hopper when its weight was the first operand."""
    product = f"wgmma.mma_async.sync.aligned.m64n256k16 {{%r5}}, {first_operand}, %rd2;"
    step = f"{product}\nwgmma.commit_group;\nwgmma.wait_group.sync.aligned {waits};"
    assert reads_late(f"\n$L__BB0_1:\n{step}\n@%p1 bra $L__BB0_1;\n") == late


def test_what_it_cannot_do_is_said(monkeypatch):
    x, w, scale = operands(2, 32, 16, "float32")
    with pytest.raises(Unsupported, match="needs an NVIDIA Ampere, Ada, Hopper or"):
        quantized_matmul(x, w, scale, implementation="triton")
    monkeypatch.setattr(triton, "check_triton", lambda device, _: device)
    with (
        use_device(DEVICES[80]),
        pytest.raises(Unsupported, match="x of type float32, the Triton kernel takes"),
    ):
        quantized_matmul(x, w, scale, implementation="triton")
